"""Every verb on a fake device without float64, such as Apple's GPUs: the same results as on the CPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memlens
from fake_device import FakeDevices
from memlens.models.memory_model import MemoryModel
from memlens.testing import FAMILIES, MIXTURES, tiny_model, tiny_tokenizer

SUBJECTS = ("river", "press", "rain", "city", "war", "paper")
VERBS = ("runs to the sea", "fell on the hills", "rose in spring", "was free")
TEXTS = [f"The {subject} {verb}." for subject in SUBJECTS for verb in VERBS]
DEFAULT = ("qwen2_moe",)  # plain layers, shared and routed experts
ALL = [pytest.param(f, marks=() if f in DEFAULT else pytest.mark.sweep) for f in (*FAMILIES, *MIXTURES)]


def load_on(family: str, device: str) -> MemoryModel:
    return memlens.load(tiny_model(family).to(device), tokenizer=tiny_tokenizer())


def numbers(value: Any) -> Iterator[Any]:
    """Yield all numbers in nested results."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from numbers(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from numbers(inner)
    elif isinstance(value, (int, float)):
        yield value


def run_verbs(model: MemoryModel, folder: Path) -> dict[str, Any]:
    """Run the verbs that use a model. Returns their results as plain data."""
    text = folder / "text.txt"
    text.write_text("\n\n".join(TEXTS), encoding="utf-8")
    index = memlens.scan(model, text, out=folder / "index", top=5, threads=1)
    memlens.roles(memlens.values(index, model=model, threads=1), model=model)
    tables = memlens.experiment(index, "all", model=model, sample=20, null_tokens=0, threads=1)
    river = memlens.trace(model, "The river runs")
    water = [str("river" in text or "rain" in text) for text in TEXTS]
    return {
        "triggers": index.table("triggers").to_pylist(),
        "roles": index.table("roles").to_pylist(),
        "experiments": {name: table.to_pylist() for name, table in tables.items()},
        "trace": river.to_json(),
        "integrate": memlens.integrate(model, "The river runs", steps=3).to_json(),
        "circuit": memlens.circuit(model, "The river runs", nodes=7).to_json(),
        "silence": memlens.silence_each(model, "The river runs", layers=[1]).to_json(),
        "probe": memlens.probe(model, (TEXTS, water), k="1,4").to_json(),
    }


@pytest.mark.parametrize("family", ALL)
def test_every_verb_works_without_float64(family: str, tmp_path: Path) -> None:
    for name in ("cpu", "mps"):
        (tmp_path / name).mkdir()
    expected = run_verbs(load_on(family, "cpu"), tmp_path / "cpu")
    with FakeDevices():
        model = load_on(family, "mps")
        assert model.device.type == "mps"
        actual = run_verbs(model, tmp_path / "mps")
    for name, result in expected.items():
        np.testing.assert_allclose(
            list(numbers(actual[name])), list(numbers(result)), rtol=1e-3, atol=1e-4, err_msg=name
        )
