"""Settings of a scan, the same for the command line, the library and the saved index; presets; --layers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from memlens.errors import SettingError, UnknownName
from memlens.settings import KEPT, RUN, TEXT, check_limits, divide, option

WINDOW = 4096  # sentences that are sorted by length together; also the row group of corpus.parquet

PRESETS: dict[str, dict[str, Any]] = {
    # The paper's text: every prefix of every sentence, as often as it occurs.
    "paper": {"per_sentence": "all", "dedup": "none"},
    # The candidates of the authors' released program.
    "released": {"per_sentence": "best", "dedup": "none", "bos_prefix": True, "whole_sentence": False},
}


@dataclass(frozen=True)
class ScanSettings:
    """Options of a scan; two scans with equal settings, model and corpus give the same bytes."""

    top: int = option(50, "Triggers to keep per memory.", metavar="N", panel=KEPT, least=1, most=100_000)
    per_sentence: str = option(
        "best", "Keep one prefix of a sentence per memory, or all of them.", panel=KEPT, choices=("best", "all")
    )
    dedup: str = option(
        "prefix",
        "List an equal prefix once, drop repeated sentences only, or neither.",
        panel=KEPT,
        choices=("prefix", "sentence", "none"),
    )
    bottom: str = option(
        "auto",
        "Keep the most negative triggers too.",
        panel=KEPT,
        otherwise="auto, for gated blocks",
        choices=("auto", "yes", "no"),
    )
    bos: str = option(
        "auto",
        "Feed BOS before a sentence.",
        panel=TEXT,
        otherwise="auto, as the tokenizer does",
        choices=("auto", "yes", "no"),
    )
    bos_prefix: bool = False  # is BOS alone a candidate prefix (position -1)?
    whole_sentence: bool = True  # is the whole sentence a candidate prefix?
    layers: tuple[int, ...] | None = option(
        None, "Layers to scan, from 0.", metavar="0-5,11", panel=KEPT, otherwise="all"
    )
    max_tokens: int | None = option(
        None, "Stop reading after N tokens.", metavar="N", panel=TEXT, otherwise="all", least=1
    )
    max_length: int | None = option(
        None,
        "Cut sentences after N tokens.",
        metavar="N",
        panel=TEXT,
        otherwise="what the model can read",
        least=1,
    )
    batch_tokens: int = option(4096, "Tokens in one batch.", metavar="N", panel=RUN, least=1, most=2**24)
    threads: int = option(1, least=1, most=512)  # changes last bits, therefore recorded
    seed: int = option(0, "Seed of the sample of ordinary prefixes.", metavar="N", panel=KEPT, least=0, most=2**31 - 1)
    sample_every: int = option(64, least=1, most=2**31 - 1)  # one prefix in so many feeds histogram and examples
    preset: str | None = option(
        None,
        "Settings of the paper's text or of its released program; other options overrule it.",
        panel=KEPT,
        choices=tuple(PRESETS),
    )

    def __post_init__(self) -> None:
        check_limits(self)
        if self.bos_prefix and self.dedup == "prefix":
            raise SettingError("--dedup prefix leaves nothing of the preset's BOS-only prefixes; use sentence or none")
        if self.layers is not None and not self.layers:
            raise SettingError("--layers names no layer; give layers like 0-5,11 or leave it out for all")

    @classmethod
    def with_preset(cls, preset: str | None = None, **given: Any) -> ScanSettings:
        """The preset's values, overruled by what is given explicitly; None means not given."""
        (explicit,) = divide("scan", given, cls)
        return cls(**{**PRESETS.get(preset or "", {}), "preset": preset, **explicit})

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "layers": None if self.layers is None else list(self.layers)}


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
