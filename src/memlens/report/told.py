"""What a finding is, and what findings are read from: an index, its experiments, the verdicts on the paper's claims.

Knows no single finding; those are in findings and memory_findings.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from memlens.experiments.stop_words import frequent_tokens
from memlens.index.reader import Index
from memlens.report.claims import Claim
from memlens.report.evidence import Finding
from memlens.report.page import judge
from memlens.report.sections import Section, make_sections
from memlens.report.tables import Row, Tables


@dataclass(frozen=True)
class Told:
    """One finding: a sentence, what it rests on, and how to see it."""

    name: str
    title: str
    lines: tuple[str, ...]
    command: str


class Material:
    """An index with everything that findings are read from, each part read once."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.tables = Tables(index)

    @cached_property
    def sections(self) -> dict[str, Section]:
        return {section.topic.name: section for section in make_sections(self.tables) if section.is_present}

    @cached_property
    def claims(self) -> dict[str, tuple[Claim, Finding]]:
        """The paper's claims that this index can be held against, with their verdicts."""
        judged = judge(self.index, self.tables, list(self.sections.values()))
        return {claim.slug: (claim, finding) for claim, finding in judged if finding is not None}

    def rows(self, name: str) -> list[Row]:
        """The rows of an experiment; none where it was not run."""
        section = self.sections.get(name)
        return [] if section is None or section.data is None else list(section.data.to_pylist())

    @cached_property
    def _frequent(self) -> Collection[int]:
        return frequent_tokens(self.index)

    @cached_property
    def _read(self) -> Collection[int]:
        """Tokens that the corpus contains: values promote half-words, too, that a model has hardly ever seen."""
        rows = self.index.sql("SELECT DISTINCT unnest(tokens) AS token FROM {corpus}")
        return {row["token"] for row in rows}

    @cached_property
    def _marks_words(self) -> bool:
        """Does a space in front tell a word's first piece from the others?"""
        return any(text[:1] == " " and text.strip() for text in self.index.vocabulary)

    def is_word(self, token: int) -> bool:
        """Is the token the beginning of a word of the corpus, and none of its most frequent ones?"""
        text = self.index.vocabulary[token]
        begins = text[:1] == " " or not self._marks_words
        looks_so = begins and len(text.strip()) >= 3 and text.strip().isalpha()
        return looks_so and token not in self._frequent and token in self._read

    def first_word(self, rows: Sequence[Row], token_of: Callable[[Row], int]) -> Row | None:
        """The first row whose token is a word; the first of all where no row has one, None where there is none."""
        return next((row for row in rows if self.is_word(token_of(row))), rows[0] if rows else None)

    def command(self, verb: str, *words: str) -> str:
        """A command line that can be pasted."""
        return shlex.join(["memlens", verb, str(self.index.folder), *words])

    def command_of(self, name: str) -> str:
        """The command that makes and prints the table of an experiment, with the sample it was made with."""
        words = self.sections[name].command.split()  # memlens VERB INDEX ..., as the page has it
        return self.command(words[1], *words[3:])


Finder = Callable[[Material], Told | None]
