"""One flipped bit in any file: the same answer as before or one clear line, never another answer."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from nursery import Nursery, Outcome, contents, flip, places

FLIPS, SAMPLE, AT_ONCE = 1000, 24, 20
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


def flip_somewhere(path: Path, draw: random.Random) -> str:
    """Flip one random bit of a file; where, in words."""
    place, bit = draw.randrange(path.stat().st_size), draw.randrange(8)
    flip(path, place, bit)
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

    def asked(commands: Sequence[Sequence[str]]) -> list[list[str]]:
        return [["memlens", *(part.format(folder) for part in command)] for command in commands]

    expected = dict(zip(READ, nursery.steps(*asked(READ)), strict=True))
    assert all(outcome.code == 0 for outcome in expected.values()), [o.err for o in expected.values() if o.code]
    files = [path.relative_to(whole) for path in flipped_files(whole) if path.name != ".lock"]
    numbers = places(FLIPS, SAMPLE, seed=1)
    refused = 0
    for first in range(0, len(numbers), AT_ONCE):
        steps: list[Sequence[Any]] = []
        tried: list[tuple[str, tuple[str, ...]]] = []
        for number in numbers[first : first + AT_ONCE]:
            draw, name = random.Random(number), files[number % len(files)]
            place, bit = draw.randrange((whole / name).stat().st_size), draw.randrange(8)
            commands = draw.sample(READ, 3)
            steps += [["flip", folder / name, place, bit], *asked(commands), ["copy", whole / name, folder / name]]
            tried += [(f"bit {bit} of byte {place} of {name}, {' '.join(command)}", command) for command in commands]
        for (where, command), outcome in zip(tried, nursery.steps(*steps), strict=True):
            if not same_answer(outcome, expected[command]):
                assert_one_line(outcome, where)
                refused += 1
    print(f"index: {len(numbers)} flips, {3 * len(numbers)} reads, {refused} refused, none wrong")


def test_a_flipped_bit_is_never_sealed_into_a_new_table(whole: Path, nursery: Nursery, tmp_path: Path) -> None:
    folder, expected = tmp_path / "index", contents(whole)
    shutil.copytree(whole, folder)
    for number, name in enumerate(("triggers", "corpus", "values", "memories", "vocabulary", "keys")):
        where = flip_somewhere(folder / f"{name}.parquet", random.Random(number))
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
    refused, numbers = 0, places(FLIPS // 4, SAMPLE // 2, seed=2)
    for number in numbers:
        draw, work = random.Random(number), tmp_path / f"flip{number}"
        shutil.copytree(before, work)
        where = flip_somewhere(work / files[number % len(files)], draw)
        outcome = nursery.run([str(part).format(work) for part in command], work)
        if outcome.code:
            assert_one_line(outcome, where)
            refused += 1
        else:
            found = contents(work / "index")
            assert [name for name in whole if found.get(name) != whole[name]] == [], where
        shutil.rmtree(work)
    print(f"{kind} scan: {len(numbers)} flips, {refused} refused, none wrong")


def test_the_answers_that_are_compared_are_not_empty(whole: Path, nursery: Nursery) -> None:
    outcome = nursery.run(["show", whole, "L1N3", "--json"], whole)
    assert json.loads(outcome.out)
