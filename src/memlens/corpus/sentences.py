"""Cuts passages into units, units into sentences of tokens, and sentences into batches. Fingerprints a corpus.

    sentence   each line of a passage, cut by sentencex. A line break always ends a sentence
    line       each line
    document   a .txt file, a .jsonl record, a .parquet row
    block:N    documents cut into N tokens each

Units are stripped of surrounding whitespace, and blank units are skipped. A Sentence is the text that the model reads
at once: a sentence, line, document or block. The id of a sentence depends only on the corpus and the corpus settings.
Batches depend only on their sentences, so a scan gives the same bytes on every machine. Rows are padded on the right
with token 0. In a causal model, earlier positions cannot attend to padding.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from memlens.corpus.readers import (
    CHUNK,
    Passage,
    SourceFile,
    hub_fingerprint,
    list_files,
    open_raw,
    read_for_blocks,
    read_hub,
    read_jsonl,
    read_paragraphs,
    read_parquet,
    read_whole,
    unreadable,
)
from memlens.errors import SettingError
from memlens.files import FileStamp, file_stamp
from memlens.memory import EncodedText
from memlens.settings import CorpusSettings, HubSpec, is_hub_source

_LINE_END = re.compile(r"\r\n|\r|\n")  # str.splitlines would also cut at form feeds and U+2028
_WIDE_SPACE = re.compile(r"[\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]")  # spaces of more than one byte
_PIECE = 1 << 18  # characters to encode at once; tokens and offsets use about 300 bytes per character


def read_passages(settings: CorpusSettings) -> Iterator[Passage]:
    """Yield every passage in reading order: sources as listed, folders sorted.

    Only one chunk of a file is in memory.
    """
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
        return read_for_blocks(file)
    return read_whole(file) if settings.unit == "document" else read_paragraphs(file)


def read_units(settings: CorpusSettings) -> Iterator[Passage]:
    """Yield every unit in reading order."""
    return cut_units(read_passages(settings), settings)


def cut_units(passages: Iterable[Passage], settings: CorpusSettings) -> Iterator[Passage]:
    """Yield the units that passages are cut into. The units of a passage depend only on that passage."""
    if settings.unit == "document" or settings.block:
        yield from passages
        return
    for passage in passages:
        for line in _LINE_END.split(passage.text):
            for text in cut_sentences(line, settings.language) if settings.unit == "sentence" else (line,):
                if text := text.strip():
                    yield Passage(text, passage.source)


def cut_sentences(line: str, language: str) -> Iterator[str]:
    """Yield the sentences of a line. The joined sentences are the unchanged line.

    sentencex 1.0 panics at a wide space between a capital letter and a full stop. Wide spaces are therefore replaced by
    plain ones, and the original line is cut at the lengths that sentencex returns.
    """
    from sentencex import segment

    begin = 0
    for sentence in segment(language, _WIDE_SPACE.sub(" ", line)):
        yield line[begin : begin + len(sentence)]
        begin += len(sentence)


@dataclass(frozen=True)
class Sentence:
    """A text that the model reads at once: a sentence, line, document or block.

    text    the unit, or the part of it that the tokens cover if tokens were dropped or the unit was cut into blocks
    ends    the offset in `text` at which each token ends, in ascending order
    cut     number of tokens that were dropped because they exceed the context
    """

    id: int
    text: str
    tokens: list[int]
    ends: list[int]
    source: str
    cut: int


def tokenize_units(
    units: Iterable[Passage],
    encode: Callable[[Sequence[str]], Sequence[EncodedText]],
    *,
    max_length: int | None,
    block: int | None = None,
    batch: int = 512,
) -> Iterator[Sentence]:
    """Return sentences with ids 0, 1, 2 … in reading order. Units without tokens are skipped and get no id.

    Args:
        units: The units to tokenize.
        encode: Function that tokenizes a list of texts.
        max_length: Maximum number of tokens of a sentence (the context without BOS). Longer sentences are cut.
        block: Number of tokens per block, if units are cut into consecutive blocks. The last block of a unit may be
            shorter.
        batch: Maximum number of units to encode at once.
    """
    check_lengths(max_length, block)
    return (Sentence(number, *part) for number, part in enumerate(_parts(units, encode, max_length, block, batch)))


def check_lengths(max_length: int | None, block: int | None) -> None:
    """Raise SettingError if the maximum length is below 1 or a block is longer than the maximum length."""
    if max_length is not None and max_length < 1:
        raise SettingError(f"max_length is {max_length}; it must be 1 or more")
    if block and max_length and block > max_length:
        raise SettingError(
            f"--unit is block:{block}, but the model reads at most {max_length} tokens; use block:{max_length} or less"
        )


_Part = tuple[str, list[int], list[int], str, int]  # the fields of a Sentence without its id


def _parts(
    units: Iterable[Passage],
    encode: Callable[[Sequence[str]], Sequence[EncodedText]],
    max_length: int | None,
    block: int | None,
    batch: int,
) -> Iterator[_Part]:
    for group in _groups(units, batch):
        texts = [unit.text for unit in group if len(unit.text) <= _PIECE]
        short = iter(encode(texts) if texts else ())
        for unit in group:
            pieces = _encode_long(unit.text, encode) if len(unit.text) > _PIECE else (next(short),)
            if block:
                yield from _cut_blocks(unit, pieces, block)
            elif part := _cut_to_length(unit, pieces, max_length):
                yield part


def _encode_long(text: str, encode: Callable[[Sequence[str]], Sequence[EncodedText]]) -> Iterator[EncodedText]:
    """Yield the tokens of a long text piece by piece.

    A piece begins at a space, where tokenizers also cut, or at any character if there is no space nearby.
    """
    begin = 0
    while begin < len(text):
        end = begin + _PIECE
        if end < len(text) and (space := text.rfind(" ", begin + _PIECE // 2, end + 1)) > 0:
            end = begin + (len(text[begin:space].rstrip()) or _PIECE)  # the end of the word before the space
        encoded = encode([text[begin:end]])[0]
        yield EncodedText(encoded.ids, [begin + offset for offset in encoded.ends])
        begin = end


def _groups(units: Iterable[Passage], batch: int) -> Iterator[list[Passage]]:
    """Yield groups of units to encode together. A group has `batch` units, or fewer if the units are long."""
    group: list[Passage] = []
    characters = 0
    for unit in units:
        group.append(unit)
        characters += len(unit.text)
        if len(group) >= batch or characters >= _PIECE:
            yield group
            group, characters = [], 0
    if group:
        yield group


def _cut_to_length(unit: Passage, pieces: Iterable[EncodedText], max_length: int | None) -> _Part | None:
    """Return the unit with at most `max_length` tokens, or None if it has no tokens."""
    ids: list[int] = []
    ends: list[int] = []
    count = 0
    for encoded in pieces:
        count += len(encoded.ids)
        room = None if max_length is None else max_length - len(ids)
        ids += encoded.ids[:room]
        ends += encoded.ends[:room]
    if count == len(ids):
        return (unit.text, ids, ends, unit.source, 0) if ids else None
    return unit.text[: ends[-1]], ids, ends, unit.source, count - len(ids)


def _cut_blocks(unit: Passage, pieces: Iterable[EncodedText], block: int) -> Iterator[_Part]:
    """Yield consecutive blocks of tokens.

    The joined texts of the blocks are the text of the unit, and no token is lost.

    If tokens are bytes, a block can end inside a character. The character's text then belongs to that block. The
    remaining tokens of the character are in the next block and end at offset 0 of that block's text.
    """
    begin = 0
    ids: list[int] = []  # tokens that are not in a block yet; the last block gets the rest of the text
    ends: list[int] = []
    for encoded in pieces:
        ids += encoded.ids
        ends += encoded.ends
        full = max(len(ids) - 1, 0) // block * block
        for first in range(0, full, block):
            finish = ends[first + block - 1]
            block_ends = [end - begin for end in ends[first : first + block]]
            yield unit.text[begin:finish], ids[first : first + block], block_ends, unit.source, 0
            begin = finish
        del ids[:full], ends[:full]
    if ids:
        yield unit.text[begin:], ids, [end - begin for end in ends], unit.source, 0


def corpus_fingerprint(settings: CorpusSettings) -> str:
    """Return a SHA-256 of the unit, column and language, and of the files' names and bytes in reading order."""
    entries: list[list[str]] = [["settings", settings.unit, settings.column, settings.language]]
    for source in settings.sources:
        if is_hub_source(source):
            spec = HubSpec.parse(source)
            entries.append(["hub", str(spec), hub_fingerprint(spec)])
        else:
            entries.extend(["file", file.name, _digest(file)] for file in list_files(source))
    # as JSON, so that different entries never give the same string
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def corpus_stamps(settings: CorpusSettings) -> dict[str, FileStamp | None]:
    """Return a stamp for every file of a corpus. A stamp changes if its file changes."""
    local = [source for source in settings.sources if not is_hub_source(source)]
    return {str(file.path): file_stamp(file.path) for source in local for file in list_files(source)}


def _digest(file: SourceFile) -> str:
    digest = hashlib.sha256()
    with open_raw(file) as stream:
        try:
            while chunk := stream.read(CHUNK):
                digest.update(chunk)
        except OSError as problem:
            raise unreadable(file, problem) from None
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class ScanSentence:
    """A sentence read from the store. Its prefixes of up to `fresh_from` tokens occurred in earlier sentences."""

    id: int
    tokens: np.ndarray  # int64
    fresh_from: int = 0


_SMALLEST = 8  # a batch may be closed early if it fills at least one eighth of `batch_tokens`
_LEAST_FILL = 0.96  # minimum share of places with tokens; a batch is closed before it falls below this share


@dataclass(frozen=True, eq=False)
class Batch:
    """The tokens of one forward pass, padded to a rectangle with one sentence per row."""

    tokens: np.ndarray  # int64 [batch, pos]; BOS if the model is fed one, then the sentence, then zeros
    sentences: np.ndarray  # int64 [batch]; ids of the sentences
    lengths: np.ndarray  # int64 [batch]; number of tokens without BOS


def cut_batches(sentences: Sequence[tuple[int, np.ndarray]], batch_tokens: int, bos: int | None) -> list[Batch]:
    """Divide sentences (id, tokens) into batches. Longer sentences come first, and equally long ones by id.

    A batch has at most `batch_tokens` places, including padding and BOS, but always at least one sentence. A batch that
    is large enough for a forward pass is closed early if the next sentence would need too much padding.
    """
    ordered = sorted(sentences, key=lambda sentence: (-len(sentence[1]), sentence[0]))
    widths = [len(tokens) + (bos is not None) for _, tokens in ordered]  # descending
    batches = []
    first = 0
    while first < len(ordered):
        rows = _count_rows(widths, first, batch_tokens)
        batches.append(_fill(ordered[first : first + rows], widths[first], bos))
        first += rows
    return batches


def _count_rows(widths: Sequence[int], first: int, batch_tokens: int) -> int:
    """Return the number of sentences in the batch that starts with sentence number `first`."""
    width = widths[first]
    filled = width
    rows = 1
    for tokens in islice(widths, first + 1, None):
        places = (rows + 1) * width
        if places > batch_tokens:
            break
        is_worth_a_pass = rows * width * _SMALLEST >= batch_tokens
        if is_worth_a_pass and filled + tokens < _LEAST_FILL * places:
            break
        filled += tokens
        rows += 1
    return rows


def _fill(sentences: Sequence[tuple[int, np.ndarray]], width: int, bos: int | None) -> Batch:
    tokens = np.zeros((len(sentences), width), dtype=np.int64)  # [batch, pos]
    start = 0
    if bos is not None:
        tokens[:, 0] = bos
        start = 1
    for row, (_, sentence) in zip(tokens, sentences, strict=True):
        row[start : start + len(sentence)] = sentence
    ids = np.array([number for number, _ in sentences], dtype=np.int64)
    return Batch(tokens, ids, np.array([len(sentence) for _, sentence in sentences], dtype=np.int64))
