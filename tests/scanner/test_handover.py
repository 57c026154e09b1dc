"""What a Ray worker hands over counts by what is in it, not by what it was asked to do. Needs no cluster."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from memlens.index.parts import PartFolder
from memlens.models.load import load
from memlens.scanner.executors import ModelRecipe
from memlens.scanner.ray import _Fleet, _Handover
from memlens.scanner.settings import ScanSettings
from memlens.scanner.state import Piece, ScanState
from memlens.testing import tiny_model, tiny_tokenizer

# Of ray only what a driver needs to receive: objects are their own references.
RAY = SimpleNamespace(put=lambda thing: thing, get=lambda thing: thing, remote=lambda **options: lambda made: made)


def test_a_piece_that_failed_before_its_worker_handed_over_is_done_again(tmp_path: Path) -> None:
    model = load(tiny_model("gpt2"), tokenizer=tiny_tokenizer(), prove=False)
    settings, layers = ScanSettings(top=3), (0, 1)
    (tmp_path / "partial").mkdir()
    keeper = PartFolder(tmp_path / "partial" / "parts")
    job = SimpleNamespace(
        model=model, settings=settings, layers=layers, pieces=[], keeper=keeper, save_seconds=1.0, recipe=ModelRecipe
    )
    fleet = _Fleet(RAY, job, 1, 0)  # type: ignore[arg-type]
    found = ScanState.start(model, layers, settings)
    found.done.add(0, 0, 3)  # a piece, and half of the next
    fleet.handover = _Handover(found.arrays(), [(found.arrays(), [Piece(0, 0, 2), Piece(0, 2, 4), Piece(1, 0, 2)])])
    fleet._end_handover()
    assert [fleet.ledger.take() for _ in range(3)] == [Piece(0, 3, 4), Piece(1, 0, 2), None]
    assert len(keeper.done_in(fleet.name)) == 3
