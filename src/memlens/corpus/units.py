"""Passages of a whole corpus, and the units they are cut into.

    sentence   each line of a passage cut by sentencex; a line break always ends a sentence, in every kind of file
    line       each line
    document   a .txt file, a .jsonl record, a .parquet row
    block:N    documents too: only a tokenizer can count to N, so `tokenize_units` cuts them

Every unit is stripped of surrounding whitespace; blank ones are passed over. This module knows nothing of tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from memlens.corpus.hub import read_hub
from memlens.corpus.readers import Passage, read_jsonl, read_paragraphs, read_parquet, read_pieces, read_whole
from memlens.corpus.settings import CorpusSettings, HubSpec, is_hub_source
from memlens.corpus.sources import SourceFile, list_files

_LINE_END = re.compile(r"\r\n|\r|\n")  # not str.splitlines, which also cuts at form feeds and U+2028

_WIDE_SPACE = re.compile(r"[\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]")  # spaces of several bytes


@dataclass(frozen=True)
class TextUnit:
    """One sentence, line or document, and the passage it comes from."""

    text: str
    source: str


def read_passages(settings: CorpusSettings) -> Iterator[Passage]:
    """Every passage: sources as given, folders in sorted order, a chunk of one file in memory at a time."""
    for source in settings.sources:
        if is_hub_source(source):
            yield from read_hub(HubSpec.parse(source), settings.column)
        else:
            for file in list_files(source):
                yield from _read_file(file, settings)


def _read_file(file: SourceFile, settings: CorpusSettings) -> Iterator[Passage]:
    if file.kind == ".jsonl":
        return read_jsonl(file, settings.column)
    if file.kind == ".parquet":
        return read_parquet(file, settings.column)
    if settings.block:
        return read_pieces(file)
    return read_whole(file) if settings.unit == "document" else read_paragraphs(file)


def read_units(settings: CorpusSettings) -> Iterator[TextUnit]:
    """Every unit, in reading order."""
    if settings.unit == "document" or settings.block:
        for passage in read_passages(settings):
            yield TextUnit(passage.text, passage.source)
        return
    for passage in read_passages(settings):
        for line in _LINE_END.split(passage.text):
            for text in cut_sentences(line, settings.language) if settings.unit == "sentence" else (line,):
                if text := text.strip():
                    yield TextUnit(text, passage.source)


def cut_sentences(line: str, language: str) -> Iterator[str]:
    """The line's sentences; joined they are the line.

    sentencex 1.0 panics where a wide space stands between a capital letter and a full stop, so it is shown plain
    spaces in their place, and the line is cut at the lengths it finds.
    """
    from sentencex import segment

    begin = 0
    for sentence in segment(language, _WIDE_SPACE.sub(" ", line)):
        yield line[begin : begin + len(sentence)]
        begin += len(sentence)
