"""Planted corpora with their patterns computed, once a session."""

import pytest
from planted import Planted, plant, read_lexicon

from memlens.index.reader import Index
from memlens.pattern.table import compute_patterns

SEEDS = {"first": 1, "second": 20}


@pytest.fixture(scope="session", params=["first", pytest.param("second", marks=pytest.mark.sweep)])
def planted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Index, Planted]:
    folder = tmp_path_factory.mktemp("planted") / "index"
    index, truth = plant(folder, read_lexicon(request.param), SEEDS[request.param])
    compute_patterns(index)
    return index, truth
