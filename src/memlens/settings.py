"""Settings of a corpus, a scan and every later stage as frozen dataclasses: an option's default, limits and help, once.

    @dataclass(frozen=True)
    class ValueSettings:
        top: int = option(50, "Tokens to list at each end of a value.", metavar="N", least=1)

The command line makes its options from these fields (cli/options.py), `divide` checks those of a Python call, and the
index records them. A field without help can be set from Python only.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

from memlens.errors import SettingError, UnknownName

# Panels of --help.
KEPT, TEXT, RUN = "What is kept", "How the text is cut", "How it runs"
SCALE = "Many cores, many machines, large models"

MOST_TRIGGERS = 64  # of a memory that patterns look at: a set of prefixes is a word of so many bits
MOST_WORKERS = 1024
MOST_TOKENS = 100_000  # listed at each end of a value
MOST_SEED = 2**31 - 1
MOST_SAMPLE = 10**9


def option(
    default: Any,
    help: str = "",
    *,
    metavar: str = "",
    panel: str | None = None,
    otherwise: str = "",
    least: float | None = None,
    most: float | None = None,
    choices: Sequence[str] = (),
) -> Any:
    """A field of settings; `otherwise` says in words what happens where the option is not given."""
    described = {"help": help, "metavar": metavar or "|".join(choices), "panel": panel, "otherwise": otherwise}
    return field(default=default, metadata=described | {"least": least, "most": most, "choices": choices})


def option_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_limits(settings: Any) -> None:
    """Refuse a field that is outside its limits or choices, by the name of its option."""
    for known in fields(settings):
        value, limits, name = getattr(settings, known.name), known.metadata, option_name(known.name)
        if value is None or not limits:
            continue
        if limits["choices"] and value not in limits["choices"]:
            raise SettingError(f"{name} is '{value}'; choose one of: {', '.join(limits['choices'])}")
        if limits["least"] is not None and not value >= limits["least"]:  # no number at all is refused, too
            raise SettingError(f"{name} is {value}; it must be {limits['least']} or more")
        if limits["most"] is not None and value > limits["most"]:
            raise SettingError(f"{name} is {value}; it must be {limits['most']:,} or less")


def check_rate(rate: float) -> None:
    """Refuse what is no rate of false discoveries; both ends, where nothing or everything is found, are no rate."""
    if not 0 < rate < 1:
        raise SettingError(f"--rate is {rate}; it is a share of false discoveries between 0 and 1, like 0.01")


def divide(verb: str, given: Mapping[str, Any], *settings: type) -> list[dict[str, Any]]:
    """The options of a Python call, for each of the settings those that are its fields; an unknown one is refused.

    None means not given.
    """
    known = [{field.name for field in fields(kind) if field.default is not MISSING} for kind in settings]
    names = set[str]().union(*known)
    unknown = sorted(given.keys() - names)
    if unknown:
        raise SettingError(f"unknown {verb} option '{unknown[0]}'; known: {', '.join(sorted(names))}")
    return [{name: value for name, value in given.items() if name in taken and value is not None} for taken in known]


@dataclass(frozen=True)
class RunSettings:
    """Threads and workers of a stage; only the number of threads changes the result, in its last bits."""

    threads: int | None = option(
        None, "Threads to compute with.", metavar="N", panel=RUN, otherwise="all usable cores", least=1, most=512
    )
    workers: int | None = option(
        None,
        "Processes that share the work.",
        metavar="N",
        panel=SCALE,
        otherwise="1; in a long scan one per core",
        least=1,
        most=MOST_WORKERS,
    )
    executor: str = option(
        "local", "Where workers run: here, or on a Ray cluster.", panel=SCALE, choices=("local", "ray")
    )
    ray_address: str | None = option(
        None, "The Ray cluster to use.", metavar="A", panel=SCALE, otherwise="$RAY_ADDRESS, or one on this machine"
    )
    gpus_per_worker: float = option(
        0, "GPUs for each Ray worker; 0 runs on processors.", metavar="N", panel=SCALE, least=0, most=64
    )

    def __post_init__(self) -> None:
        check_limits(self)
        if self.ray_address is not None and not self.ray_address.strip():
            raise SettingError("--ray-address is empty; write one like 10.0.0.1:6379, or leave it out")
        if self.executor != "ray":
            for name in ("ray_address", "gpus_per_worker"):
                if getattr(self, name):
                    raise SettingError(f"{option_name(name)} counts for --executor ray only; add that or leave it out")


@dataclass(frozen=True)
class ScanRunSettings(RunSettings):
    """Run settings of a scan, and its division into shards, passes and devices."""

    shard: str | None = option(
        None, "Do shard I of N only, from 1; `memlens merge` joins them.", metavar="I/N", panel=SCALE
    )
    layer_budget: int | None = option(
        None,
        "Scan at most N layers in one pass, in several passes.",
        metavar="N",
        panel=SCALE,
        otherwise="all in one",
        least=1,
        most=100_000,
    )
    device_map: str | None = option(
        None,
        "Spread the layers of a large model over several GPUs, as accelerate does.",
        metavar="auto|balanced|sequential",
        panel=SCALE,
    )


@dataclass(frozen=True)
class ValueSettings:
    """The tokens listed for each value; `reading` None is the model's own, but raw with a preset of the paper."""

    top: int = option(50, "Tokens to list at each end of a value.", metavar="N", least=1, most=MOST_TOKENS)
    reading: str | None = option(
        None,
        "With the final norm's gain folded in, or plain v E.",
        metavar="folded|raw",
        otherwise="folded where there is a final norm",
    )
    vocabulary: str = option(
        "all", "Read values over all tokens, or leave out those that were hardly trained.", choices=("all", "trained")
    )

    def __post_init__(self) -> None:
        check_limits(self)


@dataclass(frozen=True)
class PatternSettings:
    """The triggers to search for patterns, and the chance to compare them with."""

    top: int = option(25, "Triggers of a memory to look at, 3 to 64.", metavar="N")
    rate: float = option(0.01, "Expected share of chance among all patterns that are reported.", metavar="SHARE")
    background: int = option(
        150_000, "Random prefixes of the corpus to compare triggers with.", metavar="N", most=MOST_SAMPLE
    )
    seed: int = option(0, "Seed of the random prefixes.", metavar="N", least=0, most=MOST_SEED)

    def __post_init__(self) -> None:
        check_limits(self)
        if not 3 <= self.top <= MOST_TRIGGERS:
            raise SettingError(f"--top is {self.top}; a pattern needs 3 triggers and memlens looks at most at 64")
        check_rate(self.rate)
        if self.background < 1000:
            raise SettingError(f"--background is {self.background}; fewer than 1000 random prefixes tell nothing")


@dataclass(frozen=True)
class RoleSettings:
    """The rate of false discoveries among roles, and the seed of the random directions."""

    rate: float = option(0.01, "Expected share of chance among the memories that have a role.", metavar="SHARE")
    seed: int = option(0, "Seed of the random directions to compare values with.", metavar="N", least=0, most=MOST_SEED)

    def __post_init__(self) -> None:
        check_limits(self)
        check_rate(self.rate)


@dataclass(frozen=True)
class SampleSettings:
    """The sample that experiments look at; None is each experiment's own."""

    seed: int = option(0, "Of everything that is drawn at random.", metavar="N", least=0, most=MOST_SEED)
    sample: int | None = option(
        None,
        "Prefixes to look at; for one named experiment, what it counts.",
        metavar="N",
        otherwise="each one's own",
        least=1,
        most=MOST_SAMPLE,
    )
    stop_words: str | None = option(
        None, "Stop words: a language's list, or the most frequent tokens.", metavar="en|frequent", otherwise="en"
    )

    def __post_init__(self) -> None:
        check_limits(self)


@dataclass(frozen=True)
class LiveSettings:
    """Limits of a request to a workbench's model, and of the queue before it, which is served one by one."""

    waiting: int = option(
        4, "Live requests that may wait while one is computed; others are told so.", metavar="N", least=0, most=1000
    )
    seconds: float = option(60, "Time that one live request may take.", metavar="S", least=0.1, most=86_400)
    prompt_tokens: int = option(512, "Tokens of a prompt on live pages.", metavar="N", least=1, most=100_000)

    def __post_init__(self) -> None:
        check_limits(self)


@dataclass(frozen=True)
class ProbeSettings:
    """The columns of labelled texts, the positions to read, and the probes to fit."""

    column: str = option("text", "The column that holds the text.", metavar="NAME")
    label: str = option("label", "The column that holds the label.", metavar="NAME")
    kind: str = option(
        "auto", "What labels are; auto: a number where there are more than 10 different ones.",
        choices=("auto", "classes", "number"),
    )  # fmt: skip
    at: str = option(
        "last", "Where a text is read: at its last token, or pooled over its tokens.", choices=("last", "mean", "max")
    )
    layers: str | None = option(None, "Layers to probe.", metavar="0-5,11", otherwise="all")
    k: str = option("1,2,4,8,16,32,64,128,256,512", "Numbers of memories that a probe reads.", metavar="1,2,4")
    test: float = option(0.3, "The share of the texts that probes are tested on.", metavar="SHARE")
    max_length: int | None = option(
        None, "Tokens to read of a text, counted from its end.", metavar="N", otherwise="the model's context", least=1
    )
    top: int = option(20, "Memories of the best probe to list.", metavar="N", least=1, most=1000)
    shuffles: int = option(20, "Times that labels are shuffled for the chance line.", metavar="N", least=0, most=10_000)
    seed: int = option(0, "Of the division into training and test.", metavar="N", least=0, most=MOST_SEED)

    def __post_init__(self) -> None:
        check_limits(self)
        if not 0 < self.test < 1:
            raise SettingError(f"--test is {self.test}; it is a share between 0 and 1, like 0.3")
        if not self.sizes:
            raise SettingError(f"--k is '{self.k}'; write numbers of at most 9 digits with commas, like 1,2,4")

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of memories; empty where they cannot be read."""
        parts = [part.strip() for part in self.k.split(",")]
        known = all(part.isascii() and part.isdecimal() and len(part) < 10 and int(part) > 0 for part in parts)
        return tuple(sorted({int(part) for part in parts})) if known else ()


BUNDLED = "bundled"  # the model and the text that come with memlens
HUB = "hf:"  # before the name of a repository of the Hugging Face Hub
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
    def parse(cls, source: str) -> "HubSpec":
        name, *rest = source.removeprefix(HUB).split(":")
        if not name or len(rest) > 2:
            raise SettingError(f"corpus {source!r} is not a Hub dataset; write hf:NAME[:CONFIG[:SPLIT]]")
        config, split = (*rest, "", "")[:2]
        return cls(name, config or None, split or "train")

    def __str__(self) -> str:
        return f"{HUB}{self.name}:{self.config or ''}:{self.split}"


def is_hub_source(source: str) -> bool:
    return source.startswith(HUB)


@dataclass(frozen=True)
class CorpusSettings:
    """The sources of the text, and the units into which it is cut.

    sources   files or folders of .txt, .jsonl, .parquet (each also .gz, .zst), `hf:NAME[:CONFIG[:SPLIT]]`, or a bundled
              text: `bundled:train` (also `bundled`), `bundled:held-out`, `bundled:prose`
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
    seed: int = option(0, "Seed of the sample of ordinary prefixes.", metavar="N", panel=KEPT, least=0, most=MOST_SEED)
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
    def with_preset(cls, preset: str | None = None, **given: Any) -> "ScanSettings":
        """The preset's values, overruled by what is given explicitly (layers also as text); None means not given."""
        (explicit,) = divide("scan", given, cls)
        if (layers := explicit.get("layers")) is not None:
            explicit["layers"] = parse_layers(layers) if isinstance(layers, str) else tuple(layers)
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
    last = available - 1
    if missing := [layer for layer in wanted if not 0 <= layer <= last]:
        raise UnknownName(f"layer {missing[0]} does not exist: the model has layers 0 to {last}; mend --layers")
    return tuple(sorted(set(wanted)))
