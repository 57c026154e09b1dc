"""docs/findings.md: what it says happens, on the model that comes with memlens."""

import re

import pytest
from docs_pages import ROOT

import memlens
from memlens.models.memory_model import MemoryModel

PAGE = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
ROW = re.compile(r'^\| ([^|]+) \| "([^"]+)" \| (L\d+N\d+) \| (0\.\d+) \| (0\.\d+) \|$', re.MULTILINE)
TRACE = re.compile(r'^memlens trace stories "([^"]+)" --token "([^"]+)" --set (L\d+N\d+)=0$', re.MULTILINE)

STORY = PAGE.partition("<!-- story -->")[2].partition("<!-- end of story -->")[0]
ASKED = re.compile(r'^memlens trace memlens-demo "([^"]+)" --token "([^"]+)"$', re.MULTILINE)
LAYER = re.compile(
    r'^\| (\d+) \| "(.+)" \([\d.]+%\) \| "(.+)" \([\d.]+%\) \| "(.+)" \([\d.]+%\) \| ([\d.]+) \| (\w+) \|$', re.M
)
NEEDED = re.compile(r"^\| (L\d+N\d+) \| ([+-]\d+\.\d+) \| (\d\.\d+) \|", re.MULTILINE)


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


def test_the_story_is_what_a_trace_shows(model: MemoryModel) -> None:
    ((prompt, token),) = ASKED.findall(STORY)
    seen = memlens.trace(model, prompt, token=token, top=10)
    rows = LAYER.findall(STORY)
    assert [int(row[0]) for row in rows] == [layer.layer for layer in seen.layers]
    for row, layer in zip(rows, seen.layers, strict=True):
        assert row[1:4] == tuple(part[0].text for part in (layer.residual, layer.ffn, layer.output))
        assert float(row[4]) == pytest.approx(layer.p, abs=0.0011) and row[5] == layer.case
    needed = NEEDED.findall(STORY)
    alone = memlens.silence_each(model, prompt, [memory for memory, *_ in needed], token=token)
    effects = {str(one.memory): one.effect for one in seen.memories[: len(needed)]}
    assert len(needed) == len(effects)
    for memory, effect, without in needed:
        assert float(effect) == pytest.approx(effects[memory], abs=0.011)
        left = alone.p - alone.effects[memlens.MemoryId.parse(memory)]
        assert float(without) == pytest.approx(left, abs=0.002)
