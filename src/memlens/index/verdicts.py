"""People's verdicts on changes of the last layer, as events of the history of an index (see history).

    verdict   one person says that a change leads to a related or to a distant word; the last one counts
    undo      takes that person's last verdict on an example back; the one before counts again

An example is a prefix and the two words; its name is made from them, so that a verdict stays true whatever sample the
example is drawn into again. Knows events; which examples there are is the experiment's business.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from memlens.errors import SettingError
from memlens.index.history import VERDICTS, History, check_annotator, standing

RELATED, DISTANT = "related", "distant"
CHOICES = (RELATED, DISTANT)


@dataclass(frozen=True)
class Example:
    """A prediction that the last layer turned into another."""

    layer: int
    text: str  # the prefix
    residual: int  # token before
    residual_text: str
    output: int  # token after
    output_text: str

    @property
    def name(self) -> str:
        told = json.dumps([self.layer, self.text, self.residual, self.output])
        return hashlib.sha256(told.encode()).hexdigest()[:12]

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Example:
        """From whatever has these columns; a KeyError, TypeError or ValueError where one is missing or of no use."""
        return cls(
            int(row["layer"]),
            str(row["text"] or ""),
            int(row["residual"]),
            str(row["residual_text"]),
            int(row["output"]),
            str(row["output_text"]),
        )


@dataclass(frozen=True)
class Verdict:
    """What one person says about one example."""

    annotator: str
    example: Example
    verdict: str


class Verdicts(History):
    """The verdicts of one index. Use as a context manager, or close()."""

    table = VERDICTS

    def save(self, annotator: str, example: Example, verdict: str) -> None:
        """One person's verdict on one example; takes the place of what they said before."""
        self.save_all([Verdict(annotator, example, verdict)])

    def save_all(self, verdicts: Sequence[Verdict]) -> int:
        """Several verdicts, all or none; how many there were."""
        for one in verdicts:
            check_annotator(one.annotator)
            check_verdict(one.verdict)
        with self._writing() as database:
            for one in verdicts:
                content = {"verdict": one.verdict, **asdict(one.example)}
                self._append(database, "verdict", one.annotator, {"example": one.example.name}, content)
        return len(verdicts)

    def undo(self, annotator: str, example: str) -> Verdict | None:
        """Take the last verdict back; the one that counts now comes back, None for none."""
        with self._writing() as database:
            said = standing(self._events(annotator, example))
            if not said:
                raise SettingError(f"{annotator} has no verdict on example {example} to take back")
            self._append(database, "undo", annotator, {"example": example}, {"undoes": said[-1]["key"]})
            return _verdict(said[-2]) if len(said) > 1 else None

    def annotators(self) -> list[str]:
        """Who has ever judged anything."""
        return sorted({row["annotator"] for row in self._read("SELECT annotator FROM verdicts")})

    def verdicts(self, annotator: str | None = None) -> list[Verdict]:
        """What holds now, of everybody or of one person: by person, then by example's name."""
        people = self.annotators() if annotator is None else [annotator]
        return [verdict for person in people for verdict in self._verdicts_of(person)]

    def _verdicts_of(self, annotator: str) -> list[Verdict]:
        by_example: dict[str, list[dict[str, Any]]] = {}
        for event in self._events(annotator):
            by_example.setdefault(event["example"], []).append(event)
        said = [standing(events) for _, events in sorted(by_example.items())]
        return [_verdict(events[-1]) for events in said if events]

    def _events(self, annotator: str, example: str | None = None) -> list[dict[str, Any]]:
        where, parameters = ("", (annotator,)) if example is None else (" AND example = ?", (annotator, example))
        return self._decoded(f"SELECT * FROM verdicts WHERE annotator = ?{where} ORDER BY id", parameters)


def check_verdict(verdict: str) -> None:
    if verdict not in CHOICES:
        raise SettingError(f"'{verdict}' is not a verdict; choose {' or '.join(CHOICES)}")


def _verdict(event: Mapping[str, Any]) -> Verdict:
    return Verdict(event["annotator"], Example.of(event["content"]), event["content"]["verdict"])
