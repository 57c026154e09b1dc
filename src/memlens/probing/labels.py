"""Labelled texts: a .csv or .jsonl file with a text and a label in every row, or two lists, checked and divided."""

import csv
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlens.corpus.files import COMPRESSIONS, LINE_LIMIT, SourceFile, printable, read_lines
from memlens.corpus.readers import check_text
from memlens.errors import CorpusError, SettingError
from memlens.stats import generator

FEWEST = 20  # texts
FEWEST_OF_CLASS = 5
MOST_CLASSES = 100
_FEW_VALUES = 10  # of numbers that are still taken for names of classes

Source = str | os.PathLike[str]


@dataclass(frozen=True, eq=False)
class LabelledTexts:
    """Texts, and what is said of each: the number of its class, or a number itself."""

    texts: tuple[str, ...]
    y: NDArray[Any]  # [n] int64 of classes, float64 of numbers
    classes: tuple[str, ...]  # empty where labels are numbers

    @property
    def is_binary(self) -> bool:
        return len(self.classes) == 2

    def divided(self, test: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows to learn from and rows to test on, drawn class by class."""
        random = generator(seed, "probe")
        groups = [np.flatnonzero(self.y == place) for place in range(len(self.classes))] or [np.arange(len(self.y))]
        drawn = [random.permutation(rows) for rows in groups]
        cuts = [min(max(round(test * len(rows)), 1), len(rows) - 2) for rows in groups]
        train = np.concatenate([rows[cut:] for rows, cut in zip(drawn, cuts, strict=True)])
        return random.permutation(train), np.concatenate([rows[:cut] for rows, cut in zip(drawn, cuts, strict=True)])


def read_labels(
    source: Source | tuple[Sequence[str], Sequence[Any]], column: str, label: str, kind: str
) -> LabelledTexts:
    """From a file, or from (texts, labels); refused where no probe could be learnt."""
    if isinstance(source, tuple):
        texts, labels = list(source[0]), list(source[1])
        place = "the texts"
        if len(texts) != len(labels):
            raise SettingError(f"there are {len(texts)} texts but {len(labels)} labels; give one label for each text")
        for row, text in enumerate(texts):
            _refuse_empty(text, f"text {row}")
    else:
        place = printable(os.fspath(source))
        rows = list(_rows(Path(source), [column, label]))
        texts, labels = [row[0] for row in rows], [row[1] for row in rows]
    if len(texts) < FEWEST:
        raise SettingError(f"{place}: {len(texts)} labelled texts; a probe needs {FEWEST} or more")
    numbers = [_number(one) for one in labels]
    if kind == "auto":
        are_many = None not in numbers and len(set(numbers)) > _FEW_VALUES
        kind = "number" if are_many else "classes"
    if kind == "number":
        return _of_numbers(texts, labels, numbers, place)
    return _of_classes(texts, [str(one).strip() for one in labels], place)


def read_texts(source: Source, column: str) -> list[str]:
    """The texts alone, from a file of the same kinds."""
    return [row[0] for row in _rows(Path(source), [column])]


def _of_numbers(texts: list[str], labels: list[Any], numbers: list[float | None], place: str) -> LabelledTexts:
    for label, number in zip(labels, numbers, strict=True):
        if number is None:
            raise SettingError(f"{place}: the label '{printable(str(label))[:40]}' is not a number; use --kind classes")
    y = np.array(numbers, np.float64)
    if y.min() == y.max():
        raise SettingError(f"{place}: every label is {y[0]:g}; a probe needs labels that differ")
    return LabelledTexts(tuple(texts), y, ())


def _of_classes(texts: list[str], labels: list[str], place: str) -> LabelledTexts:
    classes = tuple(sorted(set(labels)))
    if len(classes) < 2:
        raise SettingError(f"{place}: every label is '{printable(classes[0])[:40]}'; a probe needs two classes or more")
    if len(classes) > MOST_CLASSES:
        raise SettingError(f"{place}: {len(classes)} different labels; a probe takes at most {MOST_CLASSES} classes")
    y = np.array([classes.index(label) for label in labels])
    counts = np.bincount(y)
    if counts.min() < FEWEST_OF_CLASS:
        rare = printable(classes[int(counts.argmin())])[:40]
        raise SettingError(f"{place}: '{rare}' has {counts.min()} texts; a class needs {FEWEST_OF_CLASS} or more")
    return LabelledTexts(tuple(texts), y, classes)


def _number(label: Any) -> float | None:
    try:
        number = float(label)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if np.isfinite(number) and not isinstance(label, bool) else None


def _rows(path: Path, columns: Sequence[str]) -> Iterator[list[Any]]:
    """The columns of every record, the first of them a text."""
    name = path.name.lower()
    compression = next((ending for ending in COMPRESSIONS if name.endswith(ending)), "")
    kind = next((one for one in (".csv", ".jsonl") if name.removesuffix(compression).endswith(one)), None)
    if kind is None:
        raise CorpusError(f"'{printable(str(path))}' is of an unknown kind; give .csv or .jsonl, also .gz or .zst")
    file = SourceFile(path, printable(path.name), kind, compression)
    records = _csv_records(file) if kind == ".csv" else _json_records(file)
    for place, record in records:
        for column in columns:
            if column not in record:
                option = "--column" if column == columns[0] else "--label"
                known = printable(", ".join(str(key) for key in record if key is not None))[:200] or "none"
                raise CorpusError(f"{place}: no column '{column}'; choose one of these with {option}: {known}")
        found = [record[column] for column in columns]
        found[0] = check_text(found[0], columns[0], place)
        _refuse_empty(found[0], place)
        if any(one is None or (isinstance(one, str) and not one.strip()) for one in found[1:]):
            raise CorpusError(f"{place}: it has no label; give it one or leave the row out")
        if any(isinstance(one, (list, dict)) for one in found[1:]):
            raise CorpusError(f"{place}: its label is a list or an object; write one word or number")
        yield found


def _refuse_empty(text: Any, place: str) -> None:
    if not isinstance(text, str) or not text.strip():
        raise CorpusError(f"{place}: the text is empty; give it one or leave the row out")


def _csv_records(file: SourceFile) -> Iterator[tuple[str, dict[str, Any]]]:
    before = csv.field_size_limit(LINE_LIMIT)
    try:
        reader = csv.DictReader((f"{line}\n" for _, line in read_lines(file)), restval=None, strict=True)
        for number, record in enumerate(reader, start=1):
            place = f"'{file.shown}' record {number}"
            if None in record:
                raise CorpusError(f"{place}: more fields than the head has; put texts with commas into quotes")
            yield place, record
    except csv.Error as problem:
        raise CorpusError(f"'{file.shown}' is not a .csv file ({printable(str(problem))}); write it again") from None
    finally:
        csv.field_size_limit(before)


def _json_records(file: SourceFile) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in read_lines(file):
        if not line.strip():
            continue
        place = f"'{file.shown}' line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise CorpusError(f"{place}: not JSON; write one object a line") from None
        if not isinstance(record, dict):
            raise CorpusError(f"{place}: not a JSON object; write one with a text and a label")
        yield place, record
