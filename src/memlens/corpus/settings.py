"""Settings of a corpus: the sources to read, and the units they are cut into."""

from __future__ import annotations

import re
from dataclasses import dataclass

from memlens.errors import SettingError
from memlens.settings import TEXT, option

BUNDLED = "bundled"
_HUB = "hf:"
_UNITS = "sentence, line, document or block:N"
_BLOCK = re.compile(r"block:([1-9][0-9]{0,8})", re.ASCII)
_LANGUAGE = re.compile(r"[a-z]{2,3}(-[a-z0-9]+)*")


@dataclass(frozen=True)
class HubSpec:
    """A Hub dataset written `hf:NAME[:CONFIG[:SPLIT]]`; an empty CONFIG means the dataset's default one."""

    name: str
    config: str | None = None
    split: str = "train"

    @classmethod
    def parse(cls, source: str) -> HubSpec:
        name, *rest = source.removeprefix(_HUB).split(":")
        if not name or len(rest) > 2:
            raise SettingError(f"corpus {source!r} is not a Hub dataset; write hf:NAME[:CONFIG[:SPLIT]]")
        config, split = (*rest, "", "")[:2]
        return cls(name, config or None, split or "train")

    def __str__(self) -> str:
        return f"{_HUB}{self.name}:{self.config or ''}:{self.split}"


def is_hub_source(source: str) -> bool:
    return source.startswith(_HUB)


@dataclass(frozen=True)
class CorpusSettings:
    """Where the text is and into which units it is cut.

    sources   files or folders of .txt, .jsonl, .parquet (each also .gz, .zst), `hf:NAME[:CONFIG[:SPLIT]]`, `bundled`
    unit      sentence | line | document | block:N (N tokens)
    column    the field of .jsonl, .parquet and hf: that holds the text
    language  a lower-case language code, by which sentencex knows abbreviations
    """

    sources: tuple[str, ...]
    unit: str = option("sentence", "What is read in one piece.", metavar="sentence|line|document|block:N", panel=TEXT)
    column: str = option(
        "text", "The field of .jsonl, .parquet and hf: that holds the text.", metavar="NAME", panel=TEXT
    )
    language: str = "en"

    def __post_init__(self) -> None:
        if isinstance(self.sources, str):
            raise SettingError(f"sources is the string {self.sources!r}; give a tuple of files, folders or names")
        object.__setattr__(self, "sources", tuple(str(source) for source in self.sources))
        if not self.sources:
            raise SettingError("no corpus was given; name a file, a folder, hf:NAME or bundled")
        for source in self.sources:
            if not source.strip() or "\0" in source:
                raise SettingError(f"corpus {source!r} is not a name; name a file, a folder, hf:NAME or bundled")
            if is_hub_source(source):
                HubSpec.parse(source)
        if self.unit not in ("sentence", "line", "document") and not _BLOCK.fullmatch(self.unit):
            raise SettingError(f"unit {self.unit!r} is unknown; choose {_UNITS} (N tokens, from 1)")
        if not self.column:
            raise SettingError("the column's name is empty; name the field that holds the text")
        if not _LANGUAGE.fullmatch(self.language):
            raise SettingError(f"language {self.language!r} is not a language code; write it like en, de or pt-br")

    @property
    def block(self) -> int | None:
        """The N of `block:N`, else None."""
        match = _BLOCK.fullmatch(self.unit)
        return int(match[1]) if match else None
