"""`demo`: all stages and five findings, on a tiny model in place of the bundled one."""

import json
import shlex
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import Paths, Run, Stops, is_refused, outcomes, tables

import memlens
from memlens import pipeline
from memlens.cli import main
from memlens.errors import SettingError
from memlens.experiments.run import EXPERIMENTS
from memlens.pipeline import STAGES, Demo, demo
from memlens.settings import BUNDLED

OPTIONS: dict[str, Any] = {"prefixes": 30, "edited": 2, "threads": 1, "top": 7}


@pytest.fixture(scope="module")
def shown(models: Paths, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """A demo of the tiny gated model; only read it."""
    return demo(models["gated"], text, out=tmp_path_factory.mktemp("demo") / "index", **OPTIONS)


@pytest.fixture
def bundled(models: Paths, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command takes the tiny model and text for the bundled ones."""
    monkeypatch.setattr(pipeline, "demo", partial(demo, models["gated"], text, **OPTIONS))


def test_a_demo_has_every_stage_and_five_findings_and_says_what_was_made_smaller(shown: Demo) -> None:
    assert outcomes(shown) == dict.fromkeys(STAGES, "made")
    assert len(shown.findings) == len({smaller.name for smaller in shown.findings}) == 5
    assert sum(shown.verdicts.values()) >= 20
    assert shown.report == shown.index.folder / "report.html" and shown.report.is_file()
    assert all(map(shown.index.has, ["values", "patterns", *(f"experiments/{name}" for name in EXPERIMENTS)]))
    smaller = {sample.experiment: (sample.here, sample.default) for sample in shown.smaller}
    assert smaller["local-edits"] == (2, 100) and smaller["refinement"] == (30, 4000)
    noted = shown.index.manifest.content["experiments"]
    assert {name: noted[name]["sample"] for name in smaller} == {name: here for name, (here, _) in smaller.items()}


def test_the_command_of_every_finding_runs(shown: Demo, capsys: pytest.CaptureFixture[str]) -> None:
    for finding in shown.findings:
        words = shlex.split(finding.command)
        assert words[0] == "memlens" and main(words[1:]) == 0, finding.command
    assert capsys.readouterr().out


def test_interrupted_it_continues_to_the_same_tables(shown, models, text, tmp_path) -> None:
    job = partial(demo, models["gated"], text, out=tmp_path / "index", **OPTIONS)
    with pytest.raises(KeyboardInterrupt):
        job(watcher=Stops("experiments"))
    assert outcomes(job()) == dict.fromkeys(STAGES[:4], "kept") | dict.fromkeys(STAGES[4:], "made")
    assert tables(tmp_path / "index") == tables(shown.index.folder)
    assert [finding.lines for finding in job().findings] == [finding.lines for finding in shown.findings]


@pytest.mark.usefixtures("bundled")
def test_the_command_prints_findings_report_and_how_to_browse(run: Run, shown: Demo, tmp_path: Path) -> None:
    folder = shutil.copytree(shown.index.folder, tmp_path / "my demo")
    ran = run("demo", "-o", folder)
    assert ran.code == 0, ran.err
    assert [line[:3] for line in ran.out.splitlines() if line[:1].isdigit()] == [f"{n}. " for n in range(1, 6)]
    assert ran.out.count("   $ memlens ") == 5
    assert f"read        {folder / 'report.html'}" in ran.out
    assert f"browse      memlens serve '{folder}'" in ran.out and "your model  memlens analyze " in ran.out
    memory = next((finding.memory for finding in shown.findings if finding.memory), "L")
    assert f"next: memlens show '{folder}' {memory}" in ran.err
    tested = sum(shown.verdicts.values())
    assert f"Of {tested} claims of the paper" in ran.out
    assert "local-edits used only 2 memories per layer (default: 100)" in ran.err
    answer = json.loads(run("demo", "-o", folder, "--json", "-q").out)
    assert len(answer["findings"]) == 5 and answer["index"] == str(folder)
    assert [stage["outcome"] for stage in answer["stages"]] == ["kept"] * 5 + ["made"]


@pytest.mark.usefixtures("bundled")
def test_serve_opens_the_workbench_on_the_demo(run, shown, tmp_path, monkeypatch) -> None:
    shutil.copytree(shown.index.folder, tmp_path / "index")
    served: list[Any] = []
    monkeypatch.setattr(
        "memlens.cli.analyze.open_workbench", lambda screen, index, model, port: served.append((index, model))
    )
    assert run("demo", "-o", tmp_path / "index", "--serve").code == 0
    assert served == [(str(tmp_path / "index"), "bundled")]
    assert is_refused(run("demo", "-o", tmp_path / "none", "--serve", "--json"), "--serve", "--json")
    assert not (tmp_path / "none").exists()


def test_without_a_bundled_model_one_line_says_so(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memlens.models.load._BUNDLED", tmp_path / "nothing")
    assert is_refused(run("demo", "-o", tmp_path / "index"), "needs the bundled model", "memlens analyze")
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize("samples", [{"local-edit": 4}, {"local-edits": 0}])
def test_a_sample_that_no_experiment_can_have_is_refused_before_the_scan(models, tmp_path, samples) -> None:
    with pytest.raises(memlens.MemlensError, match=r"local-edit|--sample is 0"):
        memlens.analyze(models["plain"], BUNDLED, out=tmp_path / "index", samples=samples)
    assert not (tmp_path / "index").exists()


@pytest.mark.sweep
def test_the_bundled_model_on_bundled_text_has_five_findings(tmp_path: Path) -> None:
    outcome = demo(out=tmp_path / "index", max_tokens=6000, prefixes=40, edited=1, threads=1)
    noted = outcome.index.manifest
    assert noted.model.name == "bundled" and len(outcome.index.layers) == len(memlens.load("bundled").layers)
    assert len(outcome.findings) == 5 and outcome.report.is_file()
    assert noted.experiment("refinement").origin == "40 random prefixes of the corpus bundled:held-out, seed 0"
    assert all("CORPUS" not in finding.command for finding in outcome.findings)


def test_larger_samples_that_are_there_are_kept_and_fresh_begins_anew(shown, models, text, copy_of) -> None:
    folder = copy_of(shown.index).folder
    memlens.experiment(folder, ["local-edits"], sample=3, threads=1)
    again = demo(models["gated"], text, out=folder, **OPTIONS)
    noted = again.index.manifest.content["experiments"]
    assert noted["local-edits"]["sample"] == 3 and noted["refinement"]["sample"] == 30
    assert outcomes(again)["experiments"] == "kept"
    again = demo(models["gated"], text, out=folder, resume=False, **OPTIONS | {"edited": 1})
    assert again.index.manifest.experiment("local-edits").sample == 1


def test_what_a_demo_cannot_be_told_is_refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingError, match="no option sample; set prefixes"):
        demo(out="index", sample=5)
    for verb in (["demo"], ["scan", "bundled", "bundled"], ["analyze", "bundled", "bundled"]):
        assert is_refused(run(*verb, "-o", ""), "-o is empty")
    assert list(tmp_path.iterdir()) == []
