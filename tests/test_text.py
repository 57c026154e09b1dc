"""Visible text, cuts to a width, rows of small bars, and signed numbers."""

from hypothesis import given, strategies as st
from rich.cells import cell_len

from memlens import text


@given(st.text())
def test_visible_text_is_one_line_without_controls(original: str) -> None:
    result = text.visible(original)
    assert result == "" or len(result.splitlines()) == 1
    assert not any(ord(sign) < 32 or 0x7F <= ord(sign) < 0xA0 for sign in result)
    assert not any("\u202a" <= sign <= "\u202e" or "\u2066" <= sign <= "\u2069" for sign in result)


@given(st.text(alphabet="ab 東é\u0301😀"), st.integers(1, 12))
def test_cut_text_fits_and_keeps_its_end(original: str, room: int) -> None:
    result = text.cut_left(original, room)
    assert cell_len(result) <= room
    assert original.endswith(result.removeprefix("…"))


def test_the_bars_of_a_sparkline_are_proportional_to_the_counts() -> None:
    assert text.sparkline([0, 1, 50, 100]) == "·▁▄█"
    assert text.sparkline([]) == ""


def test_a_curve_includes_zero_and_shrinks_to_its_room() -> None:
    assert text.curve([0.0, 0.5, None, 1.0]) == "▁▅·█"
    assert text.curve([-1.0, -0.5, 0.0]) == "▁▅█"
    assert text.curve([None, None]) == "··" and text.curve([]) == "" and text.curve([0.0]) == "▁"
    assert text.curve([0.0, 0.0, 1.0, 1.0], room=2) == "▁█"


def test_a_number_that_rounds_to_zero_has_no_sign() -> None:
    assert [text.signed(value) for value in (1.2, -0.354, -0.0049, 0.0, -0.0, 0.004)] == [
        "+1.20", "−0.35", "0.00", "0.00", "0.00", "0.00",
    ]  # fmt: skip
    assert text.signed(-0.0049, 3) == "−0.005" and text.signed(float("nan")) == "+nan"
