"""What tests of several parts need: an index of each of four kinds of model; a browser."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import memlens
from memlens.models.memory_model import MemoryModel
from memlens.testing import tiny_model, tiny_tokenizer

KINDS = ("gpt2", "llama", "gpt_neox", "gemma2")  # plain, gated, parallel and with a post-norm
TEXT = """The river runs to the sea. The river runs to the hills. The press was free in the city of Paris.
Rain fell on the hills, and the rivers rose. Rain fell on the city. A
In 1990 a café opened near the river; it was the first of its kind, and the people of the city read the news.
The end of the war came in the spring, as the papers of the day had said it would. The river
"""
FLAGS = [
    "--headless",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="session", params=KINDS)
def scanned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MemoryModel]:
    """A scanned index folder, to be copied and not changed, and its model."""
    family = request.param
    folder = tmp_path_factory.mktemp(family)
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    model = memlens.load(tiny_model(family), tokenizer=tiny_tokenizer(adds_bos=family == "llama"))
    memlens.scan(model, folder / "text.txt", out=folder / "index", top=7)
    return folder / "index", model


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium. For one module at a time: while it is open, this process has a running event loop."""
    from playwright.sync_api import sync_playwright

    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.fail("no chromium was found on the PATH: install it (Debian: apt-get install chromium)")
    flags = [*FLAGS, "--no-sandbox"] if os.geteuid() == 0 else FLAGS
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=flags)
        yield opened
        opened.close()
