"""Labeled texts, from a .csv or .jsonl file or from two lists, checked and split into training and test texts."""

import csv
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlens.corpus.readers import COMPRESSIONS, LINE_LIMIT, SourceFile, check_text, printable, read_lines
from memlens.errors import CorpusError, SettingError, UnknownName
from memlens.stats import generator

FEWEST = 20  # minimum number of texts
FEWEST_OF_CLASS = 5
FEWEST_TRAINED, FEWEST_TESTED = 10, 5
MOST_CLASSES = 100
_FEW_VALUES = 10  # numeric labels with at most this many distinct values are treated as classes
_LARGEST = 1e100
_LEAST_APART = 1e-100

Source = str | os.PathLike[str]


@dataclass(frozen=True, eq=False)
class LabeledTexts:
    """Texts with their labels: class numbers, or numeric values."""

    texts: tuple[str, ...]
    y: NDArray[Any]  # [n]: int64 for classes, float64 for numbers
    classes: tuple[str, ...]  # class names by class number; empty if labels are numbers
    repeats: int = 0  # number of rows that were left out because their text is repeated

    @property
    def is_binary(self) -> bool:
        return len(self.classes) == 2

    def split(self, test: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the training rows and the test rows, which are drawn from each class separately."""
        random = generator(seed, "probe")
        groups = [np.flatnonzero(self.y == place) for place in range(len(self.classes))] or [np.arange(len(self.y))]
        drawn = [random.permutation(rows) for rows in groups]
        cuts = [min(max(round(test * len(rows)), 1), len(rows) - 2) for rows in groups]
        if sum(cuts) < FEWEST_TESTED:
            raise SettingError(f"{sum(cuts)} test texts are too few; raise --test, or give more texts")
        if (trained := len(self.y) - sum(cuts)) < FEWEST_TRAINED:
            raise SettingError(f"{trained} training texts are too few; lower --test, or give more texts")
        train = np.concatenate([rows[cut:] for rows, cut in zip(drawn, cuts, strict=True)])
        return random.permutation(train), np.concatenate([rows[:cut] for rows, cut in zip(drawn, cuts, strict=True)])


def read_labels(
    source: Source | tuple[Sequence[str], Sequence[Any]], column: str, label: str, kind: str
) -> LabeledTexts:
    """Return labeled texts from a file or from (texts, labels). Raises SettingError if no probe can be fitted."""
    if not isinstance(source, (str, os.PathLike)):
        if not (isinstance(source, tuple) and len(source) == 2):
            raise SettingError("labels are neither a file nor a pair; give a path or (texts, labels)")
        texts, labels = list(source[0]), list(source[1])
        place = "the texts"
        if len(texts) != len(labels):
            raise SettingError(f"there are {len(texts)} texts but {len(labels)} labels; give one label for each text")
        for row, text in enumerate(texts):
            _refuse_empty(text, f"text {row}")
            _refuse_no_label(labels[row], f"text {row}")
    else:
        place = printable(os.fspath(source))
        rows = list(_rows(Path(source), [column, label]))
        texts, labels = [row[0] for row in rows], [row[1] for row in rows]
    rows_given = len(texts)
    texts, labels = _drop_repeats(texts, labels, place)
    if len(texts) < FEWEST:
        raise SettingError(f"{place}: {len(texts)} distinct labeled texts are too few; a probe needs {FEWEST} or more")
    numbers = [_number(label) for label in labels]
    if kind == "auto":
        are_many = None not in numbers and len(set(numbers)) > _FEW_VALUES
        kind = "number" if are_many else "classes"
    if kind == "number":
        texts_and_labels = _of_numbers(texts, labels, numbers, place)
    else:
        texts_and_labels = _of_classes(texts, [_class_name(label) for label in labels], place)
    return replace(texts_and_labels, repeats=rows_given - len(texts))


def _drop_repeats(texts: list[str], labels: list[Any], place: str) -> tuple[list[str], list[Any]]:
    """Remove repeated texts, because a text in both the training and the test part would increase the test score."""
    distinct: dict[str, tuple[str, Any]] = {}
    for text, label in zip(texts, labels, strict=True):
        _, before = distinct.setdefault(text.strip(), (text, label))
        if _class_name(before) != _class_name(label):
            first, other = (printable(_class_name(label))[:40] for label in (before, label))
            shown = printable(text.strip())[:40]
            raise SettingError(f"{place}: the text '{shown}' has two labels, '{first}' and '{other}'; keep one")
    return [text for text, _ in distinct.values()], [label for _, label in distinct.values()]


def _class_name(label: Any) -> str:
    """Return the name of the class of a label. 1 and 1.0 are the same class."""
    return str(int(label)) if isinstance(label, float) and label.is_integer() else str(label).strip()


def read_texts(source: Source, column: str) -> list[str]:
    """Return the texts of a .csv or .jsonl file without labels."""
    return [row[0] for row in _rows(Path(source), [column])]


def check_label(classes: Sequence[str], label: str | float) -> float:
    """Return the number of a class, or a numeric label as a float. Raises an error for other labels."""
    if classes:
        if str(label) not in classes:
            raise UnknownName(f"the probe has no label '{label}'; choose one of: {', '.join(classes)}")
        return list(classes).index(str(label))
    number = _number(label)
    if number is None or abs(number) > _LARGEST:
        raise SettingError(f"the labels of the probe are numbers, but '{label}' is not a number; give a number")
    return number


def _of_numbers(texts: list[str], labels: list[Any], numbers: list[float | None], place: str) -> LabeledTexts:
    for label, number in zip(labels, numbers, strict=True):
        if number is None:
            raise SettingError(f"{place}: the label '{printable(str(label))[:40]}' is not a number; use --kind classes")
    y = np.array(numbers, np.float64)
    if (largest := float(np.abs(y).max())) > _LARGEST:
        raise SettingError(
            f"{place}: a label of {largest:g} is too large to be squared; divide all labels by the same number"
        )
    if y.min() == y.max():
        raise SettingError(f"{place}: every label is {y[0]:g}; a probe needs labels that differ")
    if (apart := float(np.ptp(y))) < _LEAST_APART:
        raise SettingError(
            f"{place}: labels differ by {apart:g}, too little to be squared; multiply all labels by the same number"
        )
    return LabeledTexts(tuple(texts), y, ())


def _of_classes(texts: list[str], labels: list[str], place: str) -> LabeledTexts:
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
    return LabeledTexts(tuple(texts), y, classes)


def _number(label: Any) -> float | None:
    try:
        number = float(label)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if np.isfinite(number) and not isinstance(label, bool) else None


def _rows(path: Path, columns: Sequence[str]) -> Iterator[list[Any]]:
    """Yield the values of these columns for every record. The first column holds the text."""
    name = path.name.lower()
    compression = next((ending for ending in COMPRESSIONS if name.endswith(ending)), "")
    kind = next((ending for ending in (".csv", ".jsonl") if name.removesuffix(compression).endswith(ending)), None)
    if kind is None:
        raise CorpusError(
            f"'{printable(str(path))}' has an unknown file type; use .csv or .jsonl, optionally with .gz or .zst"
        )
    file = SourceFile(path, printable(path.name), kind, compression)
    records = _csv_records(file) if kind == ".csv" else _json_records(file)
    for place, record in records:
        for column in columns:
            if column not in record:
                option = "--column" if column == columns[0] else "--label"
                names = printable(", ".join(str(key) for key in record if key is not None))[:200] or "none"
                raise CorpusError(f"{place}: no column '{column}'; choose one of these with {option}: {names}")
        fields = [record[column] for column in columns]
        fields[0] = check_text(fields[0], columns[0], place)
        _refuse_empty(fields[0], place)
        for label in fields[1:]:
            _refuse_no_label(label, place)
        yield fields


def _refuse_empty(text: Any, place: str) -> None:
    if not isinstance(text, str) or not text.strip():
        raise CorpusError(f"{place}: the text is empty; add a text or remove the row")


def _refuse_no_label(label: Any, place: str) -> None:
    is_unknown = isinstance(label, float) and not math.isfinite(label)
    if label is None or is_unknown or (isinstance(label, str) and not label.strip()):
        raise CorpusError(f"{place}: the label is missing; add one or remove the row")
    if isinstance(label, (list, dict)):
        raise CorpusError(f"{place}: the label is a list or an object; use a word or a number")


def _csv_records(file: SourceFile) -> Iterator[tuple[str, dict[str, Any]]]:
    before = csv.field_size_limit(LINE_LIMIT)
    try:
        reader = csv.DictReader((f"{line}\n" for _, line in read_lines(file)), restval=None, strict=True)
        names = reader.fieldnames or []
        if len(set(names)) < len(names):
            raise CorpusError(f"'{file.label}': two columns have the same name; rename one of them")
        for number, record in enumerate(reader, start=1):
            place = f"'{file.label}' record {number}"
            if None in record:
                raise CorpusError(f"{place}: the row has more fields than the header; put texts with commas in quotes")
            yield place, record
    except csv.Error as problem:
        raise CorpusError(
            f"'{file.label}' is not a .csv file ({printable(str(problem))}); save it again as CSV"
        ) from None
    finally:
        csv.field_size_limit(before)


def _json_records(file: SourceFile) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in read_lines(file):
        if not line.strip():
            continue
        place = f"'{file.label}' line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise CorpusError(f"{place}: not JSON; write one object per line") from None
        if not isinstance(record, dict):
            raise CorpusError(f"{place}: not a JSON object; write one with a text and a label")
        yield place, record
