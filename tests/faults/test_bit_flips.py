"""One flipped bit in any file: the same answer as before or one clear line, never another answer."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from nursery import Nursery, Outcome, contents, places

FLIPS, SAMPLE = 1000, 24
READ: tuple[tuple[str, ...], ...] = (
    ("show", "{}", "L1N3", "--json"),
    ("search", "{}", "river", "--json"),
    ("search", "{}", " river", "--in", "values", "--json"),
    ("search", "{}", "ends", "--in", "patterns", "--json"),
    ("export", "{}", "--format", "jsonl"),
    ("experiment", "{}", "agreement", "--json"),
    ("annotate", "{}", "status", "--json"),
    ("compare", "{}", "{}", "--json"),
)


def flip(path: Path, draw: random.Random) -> str:
    """Flip one random bit of a file; where, in words."""
    content = bytearray(path.read_bytes())
    place, bit = draw.randrange(len(content)), draw.randrange(8)
    content[place] ^= 1 << bit
    path.write_bytes(content)
    return f"bit {bit} of byte {place} of {path.name}"


def flipped_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size]


def assert_one_line(outcome: Outcome, where: str) -> None:
    lines = [line for line in outcome.err.splitlines() if line.strip()]
    assert outcome.code == 2 and "Traceback" not in outcome.err, f"{where}: {outcome.code} {outcome.err}"
    assert len(lines) <= 2, f"{where}: {outcome.err}"


def same_answer(outcome: Outcome, expected: Outcome) -> bool:
    return outcome.code == expected.code and outcome.out == expected.out


@pytest.fixture(scope="module")
def whole(nursery: Nursery, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete index with all its tables and a label."""
    folder = tmp_path_factory.mktemp("whole") / "index"
    texts = (inputs / "one.txt", inputs / "two.txt")
    steps: Sequence[Sequence[Any]] = (
        ("scan", inputs / "model", *texts, "-o", folder, "--threads", "1", "--top", "5"),
        ("values", folder, "--threads", "1"),
        ("patterns", folder),
        ("experiment", folder, "agreement", "--threads", "1"),
        ("annotate", folder, "sample"),
    )
    for step in steps:
        outcome = nursery.run(step, folder)
        assert outcome.code == 0, outcome.err
    return folder


def test_a_flipped_bit_of_an_index_gives_the_same_answer_or_one_line(
    whole: Path, nursery: Nursery, tmp_path: Path
) -> None:
    folder = tmp_path / "index"  # every copy has the same name, since answers name it
    shutil.copytree(whole, folder)

    def ask(command: Sequence[str]) -> Outcome:
        return nursery.run([part.format(folder) for part in command], tmp_path)

    expected = {command: ask(command) for command in READ}
    assert all(outcome.code == 0 for outcome in expected.values()), [o.err for o in expected.values() if o.code]
    files = [path.relative_to(whole) for path in flipped_files(whole) if path.name != ".lock"]
    for number in places(FLIPS, SAMPLE, seed=1):
        draw = random.Random(number)
        name = files[number % len(files)]
        where = flip(folder / name, draw)
        for command in draw.sample(READ, 3):
            outcome = ask(command)
            if not same_answer(outcome, expected[command]):
                assert_one_line(outcome, f"{where}, {command[0]}")
        shutil.copyfile(whole / name, folder / name)


def test_a_flipped_bit_is_never_sealed_into_a_new_table(whole: Path, nursery: Nursery, tmp_path: Path) -> None:
    folder, expected = tmp_path / "index", contents(whole)
    shutil.copytree(whole, folder)
    for number, name in enumerate(("triggers", "corpus", "values", "memories", "vocabulary", "keys")):
        where = flip(folder / f"{name}.parquet", random.Random(number))
        for verb in ("patterns", "experiment"):
            extra = ["rank"] if verb == "experiment" else []
            outcome = nursery.run([verb, folder, *extra], tmp_path)
            if outcome.code:
                assert_one_line(outcome, f"{where}, {verb}")
        shutil.copyfile(whole / f"{name}.parquet", folder / f"{name}.parquet")
        found = contents(folder)
        for table in ("patterns.parquet", "names.parquet"):
            assert found[table] == expected[table], where


@pytest.mark.parametrize("kind", ["stopped", "shard"])
def test_a_flipped_bit_of_an_unfinished_scan_is_refused_or_harmless(
    nursery: Nursery, inputs: Path, tmp_path: Path, kind: str
) -> None:
    scan = ["scan", inputs / "model", inputs / "one.txt", inputs / "two.txt", "--threads", "1", "--top", "5"]
    expected = nursery.run([*scan, "-o", tmp_path / "expected"], tmp_path)
    before = tmp_path / "before"
    before.mkdir()
    if kind == "stopped":
        events = expected.events
        written = next(i for i, event in enumerate(events) if "triggers.parquet" in event)
        last = max(i for i, event in enumerate(events[:written]) if "parts" in event)
        assert nursery.run([*scan, "-o", before / "index"], tmp_path, last).code == -9
        command = [*scan, "-o", "{}/index"]
    else:
        for i in (1, 2):
            outcome = nursery.run([*scan, "-o", before / f"part{i}", "--shard", f"{i}/2"], tmp_path)
            assert outcome.code == 0, outcome.err
        command = ["merge", "{}/part1", "{}/part2", "-o", "{}/index"]
    files = [path.relative_to(before) for path in flipped_files(before)]
    assert len(files) >= 3
    whole = contents(tmp_path / "expected")
    for number in places(FLIPS // 4, SAMPLE // 2, seed=2):
        draw, work = random.Random(number), tmp_path / f"flip{number}"
        shutil.copytree(before, work)
        where = flip(work / files[number % len(files)], draw)
        outcome = nursery.run([str(part).format(work) for part in command], work)
        if outcome.code:
            assert_one_line(outcome, where)
        else:
            found = contents(work / "index")
            assert [name for name in whole if found.get(name) != whole[name]] == [], where
        shutil.rmtree(work)


def test_the_answers_that_are_compared_are_not_empty(whole: Path, nursery: Nursery) -> None:
    outcome = nursery.run(["show", whole, "L1N3", "--json"], whole)
    assert json.loads(outcome.out)
