"""Tables on a terminal: whole lines at any width, whatever the tokens are."""

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

import memlens
from memlens.cli.live import print_continuations, print_effect, print_trace
from memlens.cli.screen import Screen
from memlens.memory import MemoryId
from memlens.testing import tiny_model, tiny_tokenizer
from memlens.tracer.intervene import Continuation, intervene
from memlens.tracer.result import InterventionEffect, Trace

PROMPT = "The river runs to the sea"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
WIDE = ("会計年度の終わり", "\n\n", "\t\x1b[31m", "internationalization", " é́", "👩‍🚀", "’", "ﷺ", "a b", "")


class Drawn(Screen):
    """A screen of some width whose lines can be looked at."""

    def __init__(self, width: int, colour: bool) -> None:
        super().__init__()
        self.file = io.StringIO()
        system: Any = "standard" if colour else None
        self.out = Console(file=self.file, width=width, color_system=system, force_terminal=colour, markup=False)

    def result(self, content: Any = "") -> None:
        self.out.print(content, soft_wrap=isinstance(content, str), highlight=False)

    @property
    def lines(self) -> list[str]:
        return self.file.getvalue().splitlines()


def dressed(value: Any, texts: list[str]) -> Any:
    """A trace's plain data with every token's text another, strange one."""
    if isinstance(value, tuple):
        return tuple(dressed(one, texts) for one in value)
    if isinstance(value, MemoryId):
        return MemoryId(value.layer + 30, value.memory + 14000)
    if not hasattr(value, "__dataclass_fields__"):
        return value
    changed = {name: dressed(getattr(value, name), texts) for name in value.__dataclass_fields__ if name != "layer"}
    if "id" in changed and "text" in changed:
        changed["text"] = texts[value.id % len(texts)]
    return replace(value, **changed)


@pytest.fixture(scope="module")
def compared() -> InterventionEffect:
    edits = ["L1N3=4", *[f"L2N{at}=x{at}.125" for at in range(30)]]
    return intervene(memlens.load(tiny_model("llama"), tokenizer=tiny_tokenizer()), PROMPT, edits, top=10)


@pytest.fixture(params=["plain", "strange"])
def shown(request: pytest.FixtureRequest, compared: InterventionEffect) -> InterventionEffect:
    if request.param == "plain":
        return compared
    traces: list[Trace] = [
        replace(dressed(one, list(WIDE)), text=PROMPT + "\n会計年度" * 30, model="somebody/a-model-with-a-long-name")
        for one in (compared.before, compared.after)
    ]
    return replace(compared, before=traces[0], after=traces[1])


@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_line_is_broken_or_wider_than_the_terminal(shown: InterventionEffect, width: int, colour: bool) -> None:
    screen = Drawn(width, colour)
    print_trace(screen, shown.before, 3)
    print_effect(screen, shown)
    lines = [_COLOUR.sub("", line) for line in screen.lines]
    assert (lines != screen.lines) == colour
    assert max(cell_len(line) for line in lines) <= width
    assert not any(sign in line for line in lines for sign in "\t\x1b\r")
    text = "\n".join(lines)
    first = next(at for at, line in enumerate(lines) if "residual" in line and "ffn" in line)
    for layer in shown.before.layers:
        assert str(layer.layer) in lines[first + 1 + layer.layer]
        assert f"L{layer.by_effect[0].memory.layer}N" in lines[first + 1 + layer.layer]
    assert lines[first + 4].strip() == ""  # a line a layer, and not one more
    assert "settled in layer" in text and "KL" in text
    assert "L2N10=x10.125" in text and "L2N11=" not in text and "and 19 more edits" in text


def test_more_room_shows_more(compared: InterventionEffect) -> None:
    counts = []
    for width in (80, 120, 200):
        screen = Drawn(width, False)
        print_trace(screen, compared.before, 3)
        counts.append(sum(line.count("N") for line in screen.lines[4:7]))
    assert counts == sorted(counts) and counts[0] >= 3 and counts[-1] == 9
    assert not any("known as" in line for line in screen.lines)  # no empty column for want of an index


def test_long_continuations_are_indented_and_lose_nothing() -> None:
    screen = Drawn(80, False)
    text = Continuation("The river\n", " runs 会計年度の終わり" * 12, (1,), (0.5,))
    print_continuations(screen, [text, text])
    assert max(cell_len(line) for line in screen.lines) <= 80
    body = [line for line in screen.lines if line.strip()]
    assert sum(not line.startswith(" ") for line in body) == 2
    joined = "".join(line[len("continuation  ") :].rstrip() for line in body).replace(" ", "")
    assert joined == ("The river⏎" + " runs 会計年度の終わり" * 12).replace(" ", "") * 2
