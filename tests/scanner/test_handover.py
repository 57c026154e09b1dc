"""What a Ray worker hands over counts by what is in it, not by what it was asked to do. Needs no cluster."""

from pathlib import Path
from types import SimpleNamespace

from memlens.models.load import load
from memlens.scanner.executors import ModelRecipe
from memlens.scanner.ray import Handover, RayPool
from memlens.scanner.state import BatchRange, PartFolder, ScanState
from memlens.settings import ScanSettings
from memlens.testing import tiny_model, tiny_tokenizer

# Of ray only what a driver needs to receive: objects are their own references.
RAY = SimpleNamespace(put=lambda thing: thing, get=lambda thing: thing, remote=lambda **options: lambda made: made)


def test_a_node_without_the_model_computes_where_the_others_do(tmp_path: Path) -> None:
    """A driver on its processor with workers on GPUs, and the other way round."""
    model = load(tiny_model("gpt2"), tokenizer=tiny_tokenizer(), prove=False)
    for gpus, here, there in ((1.0, "cpu", "cuda"), (0.0, "cuda:0", "cpu")):
        job = SimpleNamespace(
            model=model, settings=ScanSettings(top=3), layers=(0,), ranges=[], save_seconds=1.0,
            parts=PartFolder(tmp_path), recipe=lambda here=here: ModelRecipe("/nowhere", device=here),
        )  # fmt: skip
        pool = RayPool(RAY, job, 1, gpus)  # type: ignore[arg-type]
        assert pool.stored.device == there
        copy = pool._copy()
        assert copy.device == there and copy.copy and not copy.source


def test_a_range_that_failed_before_its_worker_handed_over_is_done_again(tmp_path: Path) -> None:
    model = load(tiny_model("gpt2"), tokenizer=tiny_tokenizer(), prove=False)
    settings, layers = ScanSettings(top=3), (0, 1)
    (tmp_path / "partial").mkdir()
    parts = PartFolder(tmp_path / "partial" / "parts")
    job = SimpleNamespace(
        model=model, settings=settings, layers=layers, ranges=[], parts=parts, save_seconds=1.0, recipe=ModelRecipe
    )
    pool = RayPool(RAY, job, 1, 0)  # type: ignore[arg-type]
    found = ScanState.start(model, layers, settings)
    found.done.add(0, 0, 3)  # a range, and half of the next
    pool.handover = Handover(
        found.arrays(), [(found.arrays(), [BatchRange(0, 0, 2), BatchRange(0, 2, 4), BatchRange(1, 0, 2)])]
    )
    pool._end_handover()
    assert [pool.queue.take() for _ in range(3)] == [BatchRange(0, 3, 4), BatchRange(1, 0, 2), None]
    assert len(parts.done_in(pool.saver.name)) == 3
