"""`analyze`: all stages, interrupted at any of them and continued to the same index."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import Paths, Run, Stops, checksums, is_refused, outcomes, tables

import memlens
from memlens import api, pipeline
from memlens.cli.analyze import _print_finding
from memlens.cli.screen import Screen
from memlens.experiments.run import EXPERIMENTS
from memlens.index.reader import Index
from memlens.pipeline import STAGES
from memlens.reports.findings import Finding

OPTIONS: dict[str, Any] = {"top": 7, "tokens": 9, "sample": 30, "threads": 1, "null_tokens": 0}
COMMAND = ("--top", 7, "--tokens", 9, "--sample", 30, "--null-tokens", 0)


def stop_at(wanted: str) -> Any:
    """Somebody presses Ctrl-C while something is being computed."""

    def progress(stage: str, done: int, total: int | None) -> None:
        if stage == wanted and done:
            raise KeyboardInterrupt

    return progress


def test_an_analysis_has_every_stage_and_its_sample_counts_prefixes_only(
    models: Paths, text: Path, analyzed: Index, tmp_path: Path
) -> None:
    analysis = memlens.analyze(models["gated"], text, out=tmp_path / "index", **OPTIONS)
    assert tables(analysis.index.folder) == tables(analyzed.folder)
    assert outcomes(analysis) == dict.fromkeys(STAGES, "made")
    in_order = sorted(EXPERIMENTS, key=lambda name: EXPERIMENTS[name].on_prefixes)
    assert analysis.stages[4].made == tuple(in_order) and analysis.stages[4].skipped == ()
    assert analysis.report == analysis.index.folder / "report.html" and analysis.report.is_file()
    assert all(map(analysis.index.has, ["values", "names", *(f"experiments/{name}" for name in EXPERIMENTS)]))
    noted = analysis.index.manifest.content["experiments"]
    expected = {
        "agreement": None,
        "rank": None,
        "predictive-values": 100,
        "local-edits": 100,
        "patterns": None,
        "promotion": 100,
        "silencing": 60,
    }
    assert {name: noted[name]["sample"] for name in EXPERIMENTS} == dict.fromkeys(EXPERIMENTS, 30) | expected


def test_text_without_any_next_token_makes_a_page_with_gaps(run: Run, models: Paths, tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("a\nb\nc\nd\n")
    command = [
        "analyze",
        models["plain"],
        tmp_path / "letters.txt",
        "-o",
        tmp_path / "index",
        "--unit",
        "line",
        "--null-tokens",
        0,
    ]
    ran = run(*command, "--sample", 9, "--threads", 1)
    assert ran.code == 0 and "Traceback" not in ran.err
    assert "The layers of this claim were not measured" in (tmp_path / "index" / "report.html").read_text("utf-8")


def test_interrupted_at_every_stage_it_continues_to_the_same_tables(models, text, analyzed, tmp_path) -> None:
    job: dict[str, Any] = {"model": models["gated"], "corpus": text, "out": tmp_path / "index", **OPTIONS}
    stops: list[dict[str, Any]] = [
        *({"watcher": Stops("values")}, {"progress": stop_at("values")}, {"progress": stop_at("keys")}),
        *({"watcher": Stops("patterns")}, {"progress": stop_at("shallow")}, {"watcher": Stops("experiments")}),
        *({"progress": stop_at("rank")}, {"progress": stop_at("prefixes")}, {"watcher": Stops("report")}),
    ]
    reached = []
    for stop in stops:
        with pytest.raises(KeyboardInterrupt):
            memlens.analyze(**job, **stop)
        manifest = json.loads((tmp_path / "index" / "manifest.json").read_text())
        stages = [name for name in ("values", "patterns") if name in manifest]
        reached.append((*stages, len(manifest.get("experiments", {}))))
    from_tables = sum(not one.on_prefixes for one in EXPERIMENTS.values())
    assert reached == [(0,), (0,), *[("values", 0)] * 3] + [
        ("values", "patterns", made) for made in (0, 1, from_tables, len(EXPERIMENTS))
    ]
    assert outcomes(memlens.analyze(**job)) == dict.fromkeys(STAGES, "kept") | {"report": "made"}
    assert tables(tmp_path / "index") == tables(analyzed.folder)


def test_with_two_threads_patterns_are_found_beside_the_experiments(models, text, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(pipeline, "usable_cores", lambda: 2)
    monkeypatch.setattr(pipeline, "compute_patterns", None)  # which is not called
    analysis = memlens.analyze(models["gated"], text, out=tmp_path / "index", **OPTIONS | {"threads": 2})
    assert outcomes(analysis) == dict.fromkeys(STAGES, "made")
    assert analysis.stages[4].made == tuple(sorted(EXPERIMENTS, key=lambda name: EXPERIMENTS[name].on_prefixes))
    again = memlens.patterns(shutil.copytree(tmp_path / "index", tmp_path / "again")).folder
    for name in ("patterns.parquet", "names.parquet"):
        assert (again / name).read_bytes() == (tmp_path / "index" / name).read_bytes()


@pytest.mark.parametrize(
    ("changed", "remade"),
    [
        ({}, {"report"}),
        ({"tokens": 8}, {"values", "patterns", "experiments", "report"}),
        pytest.param({"reading": "raw"}, {"values", "patterns", "experiments", "report"}, marks=pytest.mark.sweep),
        ({"sample": 29}, {"experiments", "report"}),
        pytest.param({"stop_words": "frequent"}, {"experiments", "report"}, marks=pytest.mark.sweep),
    ],
)
def test_only_what_is_not_there_yet_is_made(models, text, whole, changed, remade) -> None:
    (whole / "report.html").unlink()
    again = memlens.analyze(models["gated"], text, out=whole, **(OPTIONS | changed))
    assert {name for name, outcome in outcomes(again).items() if outcome == "made"} == remade
    if {"stop_words", "sample"} & changed.keys():  # which only the experiments on prefixes know
        assert set(again.stages[4].made) == {name for name, one in EXPERIMENTS.items() if one.on_prefixes}
    assert (whole / "report.html").is_file()


def test_a_table_that_was_damaged_or_lost_is_made_again(models, text, analyzed, whole) -> None:
    (whole / "experiments" / "rank.parquet").unlink()
    path = whole / "experiments" / "predictive-values-bins.parquet"
    path.write_bytes(path.read_bytes()[:-9] + b"x" * 9)
    again = memlens.analyze(models["gated"], text, out=whole, **OPTIONS)
    assert again.stages[4].made == ("rank", "predictive-values")
    assert tables(whole) == tables(analyzed.folder)


def test_another_validation_text_is_another_sample(models: Paths, text: Path, whole: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("The people of the city read the news. The end of the war.")
    other = OPTIONS | {"validation": tmp_path / "other.txt"}
    first = memlens.analyze(models["gated"], text, out=whole, **other)
    assert "cases" in first.stages[4].made and "rank" not in first.stages[4].made
    assert memlens.analyze(models["gated"], text, out=whole, **other).stages[4].outcome == "kept"


def test_the_command_prints_findings_verdicts_and_where_the_page_is(
    run: Run, models: Paths, text: Path, whole: Path
) -> None:
    command = ["analyze", models["gated"], text, "-o", whole, *COMMAND]
    ran = run(*command)
    assert ran.code == 0 and str(whole / "report.html") in ran.out
    assert "\n2. " in ran.out and "; paper " in ran.out and "█" in ran.out
    assert "claims of the paper that were tested" in ran.out and "next: memlens show" in ran.err
    assert ran.err.count("already complete") == 5 and "report: done" in ran.err
    answer = json.loads(run(*command, "--json", "--quiet").out)
    assert [stage["name"] for stage in answer["stages"]] == list(STAGES)
    assert [stage["outcome"] for stage in answer["stages"]] == ["kept"] * 5 + ["made"]
    assert answer["report"] == str(whole / "report.html") and answer["scan"]["memories"] == 120
    assert len(answer["findings"]) == 5 and sum(answer["verdicts"].values()) > 10


def test_a_finding_fits_the_screen_if_a_trigger_or_its_last_token_is_long(capsys: pytest.CaptureFixture[str]) -> None:
    triggers = [("The ", "-" * 90), ("", "=" * 75), ("The river " * 12, " boat")]
    _print_finding(Screen(), 1, Finding("name", "title", "memlens", "L0N1", tuple(triggers)))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "   …" + "…" + "-" * 74 + "]" and lines[2] == "   …" + "=" * 74 + "]"
    assert lines[3].endswith("The river  [boat]") and lines[3].count("[") == 1
    assert len(lines) == 5 and all(len(line) <= 80 for line in lines)


def test_the_command_stops_with_130_and_continues(run, models, text, analyzed, tmp_path, monkeypatch) -> None:
    command = ["analyze", models["gated"], text, "-o", tmp_path / "index", *COMMAND, "--threads", 1]

    def interrupt(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(api, "experiment", interrupt)
        ran = run(*command)
        assert ran.code == 130 and ran.out == "" and "run the same command again" in ran.err
        done = [line.partition(":")[0] for line in ran.err.splitlines() if ": done in " in line]
        assert done == [*STAGES[:4]]
        ran = run(*command, "--fresh")
        assert ran.code == 130 and "without --fresh" in ran.err
    ran = run(*command)
    assert ran.code == 0 and "scan: already complete" in ran.err and "values: already complete" in ran.err
    assert tables(tmp_path / "index") == tables(analyzed.folder)


def test_an_experiment_that_cannot_be_had_is_named_and_the_rest_is_made(run, models, text, tmp_path) -> None:
    command = ["analyze", models["plain"], text, "-o", tmp_path, "--layers", "0-1", "--sample", 9, "--threads", 1]
    command += ["--null-tokens", 0]
    ran = run(*command)
    assert ran.code == 0 and "last-layer was skipped: the model's last layer, 2" in ran.err
    again = json.loads(run(*command, "--json").out)["stages"][4]
    assert again["outcome"] == "kept" and [one["name"] for one in again["skipped"]] == ["last-layer"]


def test_an_index_of_something_else_is_refused_and_stays(run: Run, models: Paths, text: Path, whole: Path) -> None:
    before = checksums(whole)
    assert is_refused(run("analyze", models["plain"], text, "-o", whole, "--top", 7), "another model", "--fresh")
    assert is_refused(run("analyze", models["gated"], text, "-o", whole, "--top", 8), "--top 7 instead of 8")
    assert checksums(whole) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--sample", 0], ["--sample is 0"]),
        (["--tokens", 0], ["--tokens is 0"]),
        (["--stop-words", "xx"], ["'xx'", "frequent"]),
        (["--reading", "upside-down"], ["folded or raw"]),
        (["--validation", "nothing.txt"], ["nothing.txt"]),
    ],
)
def test_what_a_later_stage_would_refuse_is_refused_before_the_scan(run, models, text, tmp_path, options, words):
    assert is_refused(run("analyze", models["plain"], text, "-o", tmp_path / "index", *options), *words)
    assert not (tmp_path / "index").exists()
