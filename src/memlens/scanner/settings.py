"""What a scan does, as one frozen value that feeds the command line, the library and the saved index.

This module knows nothing of models or files; whether a layer exists is checked where the model is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from memlens.errors import SettingError, UnknownName

WINDOW = 4096  # sentences that are sorted by length together; also the row group of corpus.parquet

_CHOICES = {
    "per_sentence": ("best", "all"),
    "dedup": ("prefix", "sentence", "none"),
    "bottom": ("auto", "yes", "no"),
    "bos": ("auto", "yes", "no"),
}

_MOST = {"top": 100_000, "threads": 512, "seed": 2**31 - 1, "batch_tokens": 2**24, "sample_every": 2**31 - 1}

PRESETS: dict[str, dict[str, Any]] = {
    # The paper's text: every prefix of every sentence, as often as it occurs.
    "paper": {"per_sentence": "all", "dedup": "none"},
    # The candidates of the authors' released program.
    "released": {"per_sentence": "best", "dedup": "none", "bos_prefix": True, "whole_sentence": False},
}


@dataclass(frozen=True)
class ScanSettings:
    """Options of a scan; two scans with equal settings, model and corpus give the same bytes."""

    top: int = 50
    per_sentence: str = "best"  # one prefix a sentence for a memory, or all of them
    dedup: str = "prefix"  # the same prefix once; the same sentence once; or everything
    bottom: str = "auto"  # keep the most negative triggers; auto = for gated blocks
    bos: str = "auto"  # feed BOS; auto = as the checkpoint's own tokenizer does
    bos_prefix: bool = False  # is BOS alone a candidate prefix (position -1)?
    whole_sentence: bool = True  # is the whole sentence a candidate prefix?
    layers: tuple[int, ...] | None = None  # None = all
    max_tokens: int | None = None
    max_length: int | None = None  # tokens a sentence; None = what the model's context holds
    batch_tokens: int = 4096
    threads: int = 1
    seed: int = 0
    sample_every: int = 64  # one prefix in so many feeds the histogram and the ordinary examples
    preset: str | None = None

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise SettingError(f"{_option(name)} is '{getattr(self, name)}'; choose one of: {', '.join(allowed)}")
        for name in ("top", "batch_tokens", "threads", "sample_every", "max_tokens", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingError(f"{_option(name)} is {value}; it must be 1 or more")
        for name, most in _MOST.items():
            if getattr(self, name) > most:
                raise SettingError(f"{_option(name)} is {getattr(self, name)}; it must be {most:,} or less")
        if self.seed < 0:
            raise SettingError(f"--seed is {self.seed}; it must be 0 or more")
        if self.bos_prefix and self.dedup == "prefix":
            raise SettingError("--dedup prefix leaves nothing of the preset's BOS-only prefixes; use sentence or none")
        if self.layers is not None and not self.layers:
            raise SettingError("--layers names no layer; give layers like 0-5,11 or leave it out for all")

    @classmethod
    def with_preset(cls, preset: str | None = None, **given: Any) -> ScanSettings:
        """The preset's values, overruled by what is given explicitly; None means not given."""
        if preset is not None and preset not in PRESETS:
            raise SettingError(f"--preset is '{preset}'; choose one of: {', '.join(PRESETS)}")
        refuse_unknown("scan", cls, given)
        explicit = {name: value for name, value in given.items() if value is not None}
        return cls(**{**(PRESETS[preset] if preset else {}), "preset": preset, **explicit})

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "layers": None if self.layers is None else list(self.layers)}


def refuse_unknown(verb: str, settings: type, given: Mapping[str, Any]) -> None:
    """Options of a verb are the fields of its settings."""
    known = {field.name for field in fields(settings)}
    unknown = sorted(set(given) - known)
    if unknown:
        raise SettingError(f"unknown {verb} option '{unknown[0]}'; known: {', '.join(sorted(known))}")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def parse_layers(text: str) -> tuple[int, ...]:
    """`0-5,11` -> (0, 1, 2, 3, 4, 5, 11), sorted, each once."""
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not _is_number(first) or (dash and not _is_number(last)):
            raise SettingError(f"--layers is '{text}'; write numbers and ranges from 0, like 0-5,11")
        low, high = int(first), int(last) if dash else int(first)
        if high < low or high > 100_000:
            raise SettingError(f"--layers is '{text}'; the range {part.strip()} is empty or far too large")
        chosen.update(range(low, high + 1))
    return tuple(sorted(chosen))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10


def choose_layers(wanted: tuple[int, ...] | None, available: int) -> tuple[int, ...]:
    """The layers to scan, refused by name if the model does not have them."""
    if wanted is None:
        return tuple(range(available))
    missing = [layer for layer in wanted if not 0 <= layer < available]
    if missing:
        raise UnknownName(
            f"layer {missing[0]} does not exist: the model has layers 0 to {available - 1}; mend --layers"
        )
    return tuple(sorted(set(wanted)))
