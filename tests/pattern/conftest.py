"""Planted corpora with their patterns computed, once a session."""

from __future__ import annotations

import lexicon_one
import lexicon_two
import pytest
from planted import Planted, plant

from memlens.index.reader import Index
from memlens.pattern.table import compute_patterns

CORPORA = {"first": (lexicon_one, 1), "second": (lexicon_two, 20)}


@pytest.fixture(scope="session", params=list(CORPORA))
def planted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Index, Planted]:
    index, truth = plant(tmp_path_factory.mktemp("planted") / "index", *CORPORA[request.param])
    compute_patterns(index)
    return index, truth
