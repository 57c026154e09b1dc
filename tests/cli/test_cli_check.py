"""`memlens check` and `memlens merge` as commands."""

import json
from pathlib import Path

from cli_helpers import Paths, Run, checksums, is_refused


def test_check_prints_every_file_and_ends_with_0_and_names_a_damaged_one_and_ends_with_2(run: Run, plain: Path) -> None:
    ran, path = run("check", plain), plain / "ordinary.parquet"
    assert all(name in ran.out for name in ("manifest.json", "triggers.parquet", "corpus.parquet"))
    assert ran.code == 0 and ran.out.count("whole") == 7
    path.write_bytes(path.read_bytes()[:-1])
    ran = run("check", plain)
    assert ran.code == 2 and ran.out.count("damaged") == 1
    assert ran.err.startswith("memlens: ") and "ordinary.parquet" in ran.err and ran.err.count("\n") == 1
    as_json = run("check", plain, "--json")
    content = json.loads(as_json.out)
    assert as_json.code == 2 and content["whole"] is False
    assert [file["file"] for file in content["files"] if file["state"] == "damaged"] == ["ordinary.parquet"]
    assert is_refused(run("check", plain / "nowhere"), "there is no index folder")


def test_parts_of_a_scan_by_the_command_line(run: Run, models: Paths, text: Path, made: Paths, tmp_path: Path) -> None:
    for number in (1, 2):
        options = ("--top", 7, "--threads", 1, "--shard", f"{number}/2")
        ran = run("scan", models["plain"], text, "-o", tmp_path / str(number), *options)
        assert ran.code == 0 and f"shard {number}/2 is complete" in ran.out
    assert is_refused(run("show", tmp_path / "1", "L0N0"), "one shard of a scan", "memlens merge")
    assert is_refused(run("merge", tmp_path / "2", "-o", tmp_path / "index"), "missing: 1")
    ran = run("merge", tmp_path / "2", tmp_path / "1", "-o", tmp_path / "index", "--json")
    assert ran.code == 0 and json.loads(ran.out)["layers"] == [0, 1, 2]
    ours, theirs = checksums(tmp_path / "index"), checksums(made["plain"])
    assert {name: ours[name] for name in theirs} == theirs
