"""docs/findings.md: what it says of silencing a memory happens, on the model that comes with memlens."""

import re

import pytest
from docs_pages import ROOT

import memlens
from memlens.models.memory_model import MemoryModel

PAGE = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
ROW = re.compile(r'^\| ([^|]+) \| "([^"]+)" \| (L\d+N\d+) \| (0\.\d+) \| (0\.\d+) \|$', re.MULTILINE)
TRACE = re.compile(r'^memlens trace stories "([^"]+)" --token "([^"]+)" --set (L\d+N\d+)=0$', re.MULTILINE)


@pytest.fixture(scope="module")
def model() -> MemoryModel:
    return memlens.load("bundled")


@pytest.mark.parametrize(("prompt", "token", "memory", "p", "p_without"), ROW.findall(PAGE))
def test_silencing_does_what_the_page_says(model, prompt, token, memory, p, p_without) -> None:
    compared = memlens.intervene(model, prompt, f"{memory}=0", token=token)
    assert compared.before.token.p == pytest.approx(float(p), abs=0.002)
    assert compared.after.token.p == pytest.approx(float(p_without), abs=0.002)
    assert f"{memory} | " in PAGE and f"memlens show stories {memory}" in PAGE


def test_each_row_has_its_command() -> None:
    rows = {(prompt, token, memory) for prompt, token, memory, *_ in ROW.findall(PAGE)}
    assert len(rows) == 3 and rows == set(TRACE.findall(PAGE))


def test_values_promote_what_the_page_says(model: MemoryModel) -> None:
    """Each memory's token is at the top of its value."""
    for _, token, memory, *_ in ROW.findall(PAGE):
        found = memlens.MemoryId.parse(memory)
        value = model.layers[found.layer].values[found.memory]
        scores = model.lens.value_scores(value[None], found.layer)[0]
        assert model.tokenizer.token_text(int(scores.argmax())) == token
