"""`experiment` and `report`: tables on disk, a picture for people, JSON for machines, and refusals."""

import json
import shlex
from pathlib import Path

import pytest
from cli_helpers import Run, checksums, is_refused, tables

import memlens
from memlens.experiments.experiment import VERDICTS
from memlens.experiments.run import EXPERIMENTS
from memlens.index.reader import Index
from memlens.reports.sections import Tables, make_sections


def test_without_a_name_every_experiment_is_listed_with_its_state(run: Run, valued: Path, whole: Path) -> None:
    def states(folder: Path) -> dict[str, str]:
        listed = json.loads(run("experiment", folder, "--json").out)["experiments"]
        return {experiment["name"]: experiment["state"] for experiment in listed}

    ran = run("experiment", valued)
    assert ran.code == 0 and [line.split()[0] for line in ran.out.splitlines()[1:]] == list(EXPERIMENTS)
    assert states(valued) == dict.fromkeys(EXPERIMENTS, "not made") and states(whole) == dict.fromkeys(
        EXPERIMENTS, "made"
    )
    run("values", whole, "--top", 3, "--quiet", "--threads", 1)
    after = states(whole)
    assert after["agreement"] == after["cases"] == "outdated" and after["local-edits"] == "made"


def test_an_experiment_is_kept_and_printed_with_its_curve_and_the_papers(run: Run, with_values: Path) -> None:
    ran = run("experiment", with_values, "agreement", "rank", "--seed", 3, "--sample", 20)
    index = Index(with_values)
    assert ran.code == 0 and index.manifest.experiment("agreement").seed == 3
    first = ran.out.split("rank", 1)[0]
    rows = index.table("experiments/agreement").to_pylist()
    assert "Figure 4: 60 memories" in first and "in the paper" in first
    table = [line.split()[:2] for line in first.splitlines() if line.split()[:1] and line.split()[0].isdigit()]
    assert table == [[str(r["layer"]), f"{r['rate']:.1%}"] for r in rows]
    assert f"{rows[1]['low']:.1%}".removesuffix("%") + f" to {rows[1]['high']:.1%}" in first
    assert "memlens report" in ran.err


def test_experiments_run_with_a_saved_intervention_and_write_nothing(run: Run, valued: Path, tmp_path: Path) -> None:
    edits, before = tmp_path / "edits.json", checksums(valued)
    memlens.Intervention.parse("L1=0").save(edits, Index(valued).load_model())
    command = ["experiment", valued, "active", "--sample", 30, "--threads", 1, "--file", edits]
    answer = json.loads(run(*command, "--json").out)
    medians = {row["layer"]: row["median"] for row in answer["experiments"][0]["tables"]["active"]}
    assert medians[1] == 0 < medians[0] and answer["intervention"]["edits"][0]["layer"] == 1
    ran = run(*command)
    assert "random prefixes, with the edits of edits.json" in ran.out and "nothing was written" in ran.err
    assert checksums(valued) == before
    everything = json.loads(run("experiment", valued, "all", "--file", edits, "--sample", 30, "--json").out)
    on_prefixes = [name for name, experiment in EXPERIMENTS.items() if experiment.on_prefixes]
    assert [experiment["name"] for experiment in everything["experiments"]] == on_prefixes
    assert {"name": "rank", "reason": "it does not run the model on prefixes"} in everything["skipped"]


def test_interventions_that_an_experiment_cannot_use_are_refused(run: Run, valued: Path, tmp_path: Path) -> None:
    edits = tmp_path / "edits.json"
    memlens.Intervention.parse("L1N2=0", positions=[0]).save(edits)
    assert is_refused(run("experiment", valued, "active", "--file", edits), "L1N2 names positions of a prompt")
    memlens.Intervention.parse("L1N2=0").save(edits)
    assert is_refused(run("experiment", valued, "rank", "--file", edits), "--file has no effect on rank; use it with")
    refused = run("experiment", valued, "active", "--file", edits, "--workers", 2)
    assert is_refused(refused, "--workers has no effect with an intervention")
    assert is_refused(run("experiment", valued, "--file", edits), "--file has no effect without a NAME")
    assert is_refused(run("experiment", valued, "active", "--file", tmp_path / "missing.json"), "missing.json")


def test_json_has_the_rows_of_the_tables(run: Run, whole: Path) -> None:
    answer = json.loads(
        run("experiment", whole, "all", "--sample", 30, "--threads", 1, "--null-tokens", 0, "--json").out
    )
    assert [experiment["name"] for experiment in answer["experiments"]] == list(EXPERIMENTS) and answer["skipped"] == []
    assert answer["prefixes"].startswith("30 random prefixes of the scanned corpus")
    index = Index(whole)
    for experiment in answer["experiments"]:
        known = EXPERIMENTS[experiment["name"]]
        assert (experiment["seed"], experiment["sample"]) == (0, 30 if known.on_prefixes else known.sample)
        for name, rows in experiment["tables"].items():
            kept = index.table(f"experiments/{name}")
            assert len(rows) == kept.num_rows and all(list(row) == kept.column_names for row in rows)
        assert [claim["claim"] for claim in experiment["claims"]] == [claim.slug for claim in known.claims]
        assert all(claim["verdict"] in VERDICTS and claim["reason"].endswith(".") for claim in experiment["claims"])
    reported = json.loads(run("report", whole, "--json").out)["claims"]
    assert {claim["claim"]: claim for claim in reported} == {
        claim["claim"]: claim for experiment in answer["experiments"] for claim in experiment["claims"]
    }
    assert {"predictive-values", "predictive-values-bins"} == set(answer["experiments"][2]["tables"])


def test_every_experiment_has_its_picture(run: Run, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        ran = run("experiment", whole, "all", "--sample", 30, "--threads", 1, "--null-tokens", 0)
        assert ran.code == 0 and max(map(len, ran.out.splitlines())) <= columns
        for one in EXPERIMENTS.values():
            part = ran.out[ran.out.index(f"{one.name}  {one.title}") :].split("\n\n")[0]
            assert one.figure + ": " in part and any(bar in part for bar in "▁▂▃▄▅▆▇█")
            assert "…" not in part or one.name in ("last-layer", "silencing")


def test_prefixes_come_from_a_validation_text_where_one_is_given(run: Run, with_values: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("The people of the city read the news.\nThe end of the war.\n")
    options = ["--validation", tmp_path / "other.txt", "--unit", "line", "--sample", 7, "--threads", 1]
    ran = run("experiment", with_values, "refinement", *options)
    assert ran.code == 0 and "7 random prefixes of the corpus" in ran.out and "other.txt" in ran.out.replace("\n", "")
    assert Index(with_values).manifest.experiment("refinement").validation
    assert is_refused(run("experiment", with_values, "rank", *options), "takes the option 'validation'")
    missing = run("experiment", with_values, "cases", "--validation", tmp_path / "nothing.txt")
    assert is_refused(missing, "nothing.txt")
    sections = {section.name: section for section in make_sections(Tables(Index(with_values)))}
    command = shlex.split(sections["refinement"].command)
    assert command[-4:] == ["--validation", str(tmp_path / "other.txt"), "--unit", "line"]
    before = tables(with_values)
    (with_values / "experiments" / "refinement.parquet").unlink()
    assert memlens.repair(with_values) == ["experiments/refinement.parquet"]
    assert tables(with_values) == before


def test_an_unknown_experiment_is_refused_with_the_known_ones(run: Run, with_values: Path) -> None:
    before = checksums(with_values)
    for words, *messages in (
        (["rank", "rang"], "'rang'", "agreement, rank", "or all"),
        (["rank", "--sample", 0], "--sample is 0"),
        (["rank", "--seed", -1], "--seed"),
        (["cases", "--stop-words", "xx"], "'xx'", "frequent"),
    ):
        assert is_refused(run("experiment", with_values, *words), *messages)
    assert checksums(with_values) == before


def test_all_ends_with_shuffled_networks_and_prints_them_beside_the_claims(
    run: Run, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memlens.experiments.shuffled.NETWORKS", 1)
    monkeypatch.setattr("memlens.experiments.shuffled.PREFIXES", 20)
    monkeypatch.setattr("memlens.experiments.shuffled.SAMPLES", {"local-edits": 2})
    ran = run("experiment", whole, "all", "--sample", 30, "--threads", 1, "--null-tokens", 40)
    assert ran.code == 0, ran.err
    index = Index(whole)
    rows = index.table("experiments/shuffled").to_pylist()
    assert index.manifest.experiment("shuffled").sample == 40 and rows
    table = ran.out[ran.out.index("claim  ") :]
    assert "shuffled network" in table.splitlines()[0]
    judged = {one.claim.slug: one.judgement for one in Tables(index).judge()}
    assert {row["claim"] for row in rows} == {slug for slug, one in judged.items() if one and one.shuffled}
    claims = json.loads(run("report", whole, "--json").out)["claims"]
    assert {claim["claim"]: claim["shuffled"] for claim in claims} == {
        slug: one.shuffled for slug, one in judged.items() if one
    }
    page = (whole / "report.html").read_text(encoding="utf-8")
    assert '<th scope="col">shuffled network</th>' in page
    ran = run("experiment", whole, "shuffled", "--sample", 40, "--threads", 1)
    assert ran.code == 0 and "beyond the paper: 1 shuffled networks, " in ran.out
    assert is_refused(run("experiment", whole, "rank", "--null-tokens", 9), "--null-tokens has no effect without `all`")


def test_an_index_without_values_says_which_command_to_run(run: Run, plain: Path) -> None:
    before = checksums(plain)
    for names in (["agreement"], ["all"], ["local-edits", "cases"]):
        assert is_refused(run("experiment", plain, *names), f"memlens values {plain}")
    assert checksums(plain) == before
    assert run("experiment", plain, "local-edits", "--sample", 3, "--threads", 1).code == 0  # needs none


def test_what_an_index_cannot_have_is_skipped_within_all_and_refused_by_name(run, models, text, tmp_path) -> None:
    folder = tmp_path / "index"
    memlens.scan(models["plain"], text, out=folder, layers="0-1", threads=1)
    memlens.values(folder, threads=1)
    assert is_refused(run("experiment", folder, "last-layer"), "last layer, 2", "--layers")
    ran = run("experiment", folder, "all", "--sample", 9, "--threads", 1, "--null-tokens", 0)
    assert ran.code == 0 and "last-layer was skipped: the model's last layer, 2" in ran.err
    assert Index(folder).has("experiments/vetoes") and not Index(folder).has("experiments/last-layer")
    assert is_refused(run("experiment", folder, "all", "last-layer"), "last layer, 2")


def test_the_library_has_the_same_verb(with_values: Path) -> None:
    made = memlens.experiment(with_values, ["rank"], seed=2, sample=5)
    assert made["rank"].num_rows == 3 and Index(with_values).manifest.experiment("rank").seed == 2


def test_report_writes_one_page_and_says_where(run: Run, whole: Path, tmp_path: Path) -> None:
    ran = run("report", whole, "-o", tmp_path / "page.html")
    assert ran.code == 0 and ran.out == f"{tmp_path / 'page.html'}\n" and "were not run" not in ran.err
    assert (tmp_path / "page.html").read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html>")
    (whole / "report.html").unlink()
    answer = json.loads(run("report", whole, "--json").out)
    assert answer["report"] == str(whole / "report.html") and answer["missing_experiments"] == []
    assert answer["bytes"] == (whole / "report.html").stat().st_size
    assert memlens.report(whole, out=tmp_path / "again.html") == tmp_path / "again.html"


def test_report_says_what_is_missing(run: Run, plain: Path, tmp_path: Path) -> None:
    assert is_refused(run("report", tmp_path / "none"), "no index folder")
    ran = run("report", plain, "-o", tmp_path / "page.html")
    assert ran.code == 0 and f"memlens values {plain}" in ran.err
    assert f"{len(EXPERIMENTS)} of {len(EXPERIMENTS)} experiments" in ran.err
