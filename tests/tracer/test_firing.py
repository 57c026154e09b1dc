"""Memories that fire on a text: as found one by one, in Python, on the command line and from one record."""

import json
from collections.abc import Callable

import pytest

import memlens
from memlens.errors import MemlensError
from memlens.index.reader import Index
from memlens.models.memory_model import MemoryModel
from memlens.tracer.trace import trace

TEXT = "The river runs to the sea and"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def pair(request: pytest.FixtureRequest, tiny_text, tmp_path_factory) -> tuple[MemoryModel, Index]:
    from memlens.testing import save_tiny

    folder = tmp_path_factory.mktemp("firing")
    source = save_tiny(folder / "model", request.param)
    index = memlens.scan(str(source), tiny_text, out=folder / "index", top=5, threads=1)
    return index.load_model(), index


def naive(model: MemoryModel, index: Index) -> dict[str, tuple[float, int, float]]:
    """name -> (relative, position, coefficient), one memory and one token at a time."""
    found = {}
    for layer in index.layers:
        for number in range(index.memories(layer)):
            name = index.names.name(layer, number)
            facts = index[name]
            best = (0.0, 0, 0.0)
            for place, m in enumerate(memlens.coefficients_on(model, name, TEXT).coefficients):
                end = facts.max if m > 0 else facts.min
                relative = m / end if m * end > 0 else 0.0
                if relative > best[0]:
                    best = (relative, place, m)
            if best[0] > 0:
                found[str(name)] = best
    return found


def test_memories_come_by_their_own_range_or_by_effect(pair: tuple[MemoryModel, Index]) -> None:
    model, index = pair
    expected = naive(model, index)
    found = memlens.fires_on(model, TEXT, index=index, limit=1000)
    assert found.total == len(expected) == len(found.found)
    assert [one.relative for one in found.found] == sorted((one.relative for one in found.found), reverse=True)
    for one in found.found:
        relative, place, m = expected[str(one.name)]
        assert (one.relative, one.coefficient) == (pytest.approx(relative, rel=1e-3), pytest.approx(m, rel=1e-3))
        assert one.token == found.tokens[one.position] and one.position == place
    by_effect = memlens.fires_on(model, TEXT, index=index, order="effect", limit=5)
    whole = trace(model, TEXT, top=1000)
    assert by_effect.prediction.id == whole.prediction.id
    effects = {str(one.memory): one.effect for one in whole.memories}
    assert [abs(one.effect) for one in by_effect.found] == sorted(
        (abs(one.effect) for one in by_effect.found), reverse=True
    )
    for one in by_effect.found:
        assert one.effect == pytest.approx(effects.get(str(one.name), 0.0), abs=1e-5)


def test_one_memory_along_a_text_is_what_a_trace_says(pair: tuple[MemoryModel, Index]) -> None:
    model, index = pair
    name = index.names.name(1, 7)
    found = memlens.coefficients_on(index, name, TEXT)
    assert "".join(found.tokens) == TEXT
    for place, m in enumerate(found.coefficients):
        layer = trace(model, TEXT, place, top=1000).layers[1]
        assert m == pytest.approx(next((one.coefficient for one in layer.by_size if one.memory == name), 0.0), abs=1e-5)


def test_the_command_line_prints_the_same_numbers(pair: tuple[MemoryModel, Index], run: Run) -> None:
    model, index = pair
    code, out, _ = run("search", index.folder, TEXT, "--in", "fires", "--limit", "3", "--json")
    found = memlens.fires_on(model, TEXT, index=index, limit=3)
    assert code == 0
    assert [one["name"] for one in json.loads(out)["found"]] == [str(one.name) for one in found.found]
    assert [one["relative"] for one in json.loads(out)["found"]] == pytest.approx([o.relative for o in found.found])
    code, out, _ = run("show", index.folder, "L1N7", "--on", TEXT, "--json")
    assert code == 0 and json.loads(out)["tokens"] == list(found.tokens)
    assert run("search", index.folder, TEXT, "--in", "fires", "--order", "effect", "--layers", "1")[0] == 0


def test_what_cannot_be_is_refused_in_one_line(pair: tuple[MemoryModel, Index], run: Run) -> None:
    model, index = pair
    for asked in (("--order", "max", TEXT), ("two", "texts"), ("--layers", "9", TEXT), ("",)):
        assert run("search", index.folder, "--in", "fires", *asked)[0] == 2
    assert run("search", index.folder, TEXT, "--order", "effect")[0] == 2
    with pytest.raises(MemlensError, match="name an index"):
        memlens.fires_on(model, TEXT)


def test_a_difference_of_two_logits_is_the_difference_of_their_parts(pair: tuple[MemoryModel, Index]) -> None:
    model, _ = pair
    one, other = trace(model, TEXT, token=" the"), trace(model, TEXT, token="e")
    both = trace(model, TEXT, token=" the", against="e")
    assert both.logit == pytest.approx(one.logit - other.logit, abs=1e-5)
    assert sum(both.parts.values()) == pytest.approx(both.logit)
    assert both.against is not None and both.against.p == pytest.approx(other.token.p)
    for part in both.parts:
        assert both.parts[part] == pytest.approx(one.parts[part] - other.parts[part], abs=1e-5)
