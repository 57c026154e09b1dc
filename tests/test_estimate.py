"""The estimate of an analysis: all its stages, more for more work; what is left is put right by what was taken."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import memlens
from memlens.cli.screen import ScanProgress, Screen
from memlens.errors import SettingError, UnknownName
from memlens.estimate import AnalysisEstimate, TimeLeft, estimate_analysis
from memlens.pipeline import STAGES
from memlens.scanner import autotune
from memlens.settings import CorpusSettings, ScanSettings


def test_an_estimate_has_every_stage_in_order_and_no_text_of_unknown_length(tiny_gpt2: Path, tiny_text: Path) -> None:
    model = memlens.load(tiny_gpt2, prove=False)
    settings, corpus = ScanSettings(threads=1), CorpusSettings((str(tiny_text),))
    found = estimate_analysis(model, settings, corpus, prefixes=10, tokens_per_layer=3000)
    assert found is not None and tuple(found.seconds) == STAGES
    assert all(seconds > 0 for seconds in found.seconds.values())
    assert found.in_words().startswith("this takes about ") and "experiments" in found.in_words()
    far = CorpusSettings(("hf:some/texts",))
    assert estimate_analysis(model, settings, far, prefixes=10, tokens_per_layer=3000) is None
    assert (
        estimate_analysis(model, replace(settings, max_tokens=99), far, prefixes=10, tokens_per_layer=3000) is not None
    )


def test_the_estimate_refuses_what_the_scan_refuses_and_nothing_else(
    tiny_gpt2: Path, tiny_text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, corpus = memlens.load(tiny_gpt2, prove=False), CorpusSettings((str(tiny_text),))
    with pytest.raises(UnknownName, match="layer 99 does not exist"):
        estimate_analysis(model, ScanSettings(threads=1, layers=(99,)), corpus, prefixes=1, tokens_per_layer=1500)
    settings = ScanSettings(threads=1, top=1000)
    one_layer = max(block.memories for block in model.layers) * 1000 * autotune._BYTES_A_TRIGGER
    monkeypatch.setattr(autotune, "free_memory", lambda: 3 * one_layer)  # enough for one of several layers
    assert len(model.layers) > 1
    with pytest.raises(SettingError, match="fewer --layers or --layer-budget"):
        estimate_analysis(model, settings, corpus, prefixes=1, tokens_per_layer=1500)
    assert estimate_analysis(model, settings, corpus, prefixes=1, tokens_per_layer=1500, layer_budget=1) is not None
    assert (
        estimate_analysis(model, replace(settings, layers=(1,)), corpus, prefixes=1, tokens_per_layer=1500) is not None
    )


def test_what_is_left_goes_down_with_the_clock_and_learns_from_stages_that_are_done() -> None:
    now = [100.0]
    left = TimeLeft(AnalysisEstimate({"scan": 10.0, "values": 20.0, "report": 5.0}), lambda: now[0])
    assert left.seconds() == 35
    left.begin("scan")
    now[0] += 4
    assert left.seconds() == 31
    assert left.seconds(share=0.25) == 12 + 25, "a quarter took 4 s, so that three quarters take 12"
    now[0] += 26
    assert left.seconds() == 25, "longer than foreseen, but not less than nothing"
    left.end()
    assert left.seconds() == 3 * 25, "everything takes three times as long"
    left.begin("values")
    left.end(kept=True)
    assert left.seconds() == 15
    left.begin("report")
    left.end()
    assert left.seconds() == 0


def test_two_stages_that_are_worked_on_together_are_over_together() -> None:
    now = [0.0]
    left = TimeLeft(AnalysisEstimate({"patterns": 10.0, "experiments": 20.0, "report": 5.0}), lambda: now[0])
    left.begin("patterns")
    left.join("experiments")
    now[0] += 6
    assert left.seconds() == 24 + 5
    now[0] += 9
    left.end()
    assert left.seconds() == 2.5, "half of what was foreseen for the two"
    left.begin("experiments")
    assert left.seconds() == 2.5


def test_compiling_is_told_apart_where_it_takes_long() -> None:
    stages = {"scan": 60.0}
    assert "compiling" not in AnalysisEstimate(stages, 1.0).in_words()
    assert AnalysisEstimate(stages, 14.0).in_words().endswith(", and about 14 s more for compiling, this once")


def test_the_bar_of_an_analysis_shows_what_is_left_of_all_stages_and_keeps_it_up_to_date() -> None:
    now, screen = [0.0], Screen()
    screen.err = Console(file=io.StringIO(), force_terminal=True, width=160)
    with ScanProgress(screen) as progress:
        progress.left = TimeLeft(AnalysisEstimate({"scan": 10.0, "values": 20.0}), lambda: now[0])
        assert progress._bar is not None
        progress.left.begin("scan")
        progress("scan", 0, 100)
        shown = [progress._bar.tasks[0].fields["left"]]
        now[0] = 30.0
        progress("scan", 100, 100)
        shown.append(progress._bar.tasks[0].fields["left"])
        progress.left.end()
        progress.left.begin("values")
        progress("values", 0, 5)
        shown.append(progress._bar.tasks[0].fields["left"])
    assert shown == ["about 30 s left in all", "about 20 s left in all", "about 60 s left in all"]
