"""Settings of the corpus, the scan and every later stage, one dataclass for each. Every field has a default, limits and
a help text.

    @dataclass(frozen=True)
    class ValueSettings(Settings):
        top: int = option(50, "Number of top and of bottom tokens to list per value.", metavar="N", minimum=1)

The command line generates its options from these fields (cli/options.py). `split_options` checks the keyword arguments
of a Python call. The index records the settings. A field without a help text can be set only from Python.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, get_args, get_type_hints

from memlens.errors import SettingError, UnknownName

# Headings of groups of options in `--help`
KEPT, TEXT, RUN = "What to keep", "Text", "Execution"
SAMPLES, LIVE = "Samples of experiments", "Live pages"
SCALE = "Scale: processes, machines, large models"
TASK = "Circuit of a task"

MOST_TRIGGERS = 64  # maximum number of triggers in a search for patterns, which stores a set of triggers in 64 bits
MOST_SEED = 2**31 - 1
MOST_SAMPLE = 10**9


def option(
    default: Any,
    help: str = "",
    *,
    metavar: str = "",
    panel: str | None = None,
    default_text: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str] = (),
) -> Any:
    """Return a dataclass field that is also an option of the command line.

    Args:
        default: The default value. None means that memlens chooses the value.
        help: One sentence for `--help`. If empty, the field is not an option of the command line.
        metavar: Placeholder for the value in `--help`. The default is the list of choices.
        panel: Heading of the group of options in `--help`.
        default_text: Description of the default in `--help`, for values that are not self-explanatory.
        minimum: Smallest valid number.
        maximum: Largest valid number.
        choices: Valid strings.
    """
    metadata = {"help": help, "metavar": metavar or "|".join(choices), "panel": panel, "default_text": default_text}
    return field(default=default, metadata=metadata | {"minimum": minimum, "maximum": maximum, "choices": choices})


def option_name(name: str) -> str:
    """Return the name of the option that sets a field: "--batch-tokens" for "batch_tokens"."""
    return "--" + name.replace("_", "-")


_TYPES = {int: (Integral, "a whole number"), float: (Real, "a number"), str: (str, "a string"), bool: (bool, "a bool")}


class Settings:
    """Base class of settings. It checks the type, the limits and the choices of every field."""

    def __post_init__(self) -> None:
        self.check_fields()

    def check_fields(self) -> None:
        """Raise SettingError if a field is invalid. The message names the option of the first invalid field."""
        hints = get_type_hints(type(self))
        for setting in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            value, limits, name = getattr(self, setting.name), setting.metadata, option_name(setting.name)
            hint = hints[setting.name]
            alternatives = get_args(hint) if isinstance(hint, UnionType) else (hint,)
            if value is None and NoneType in alternatives:
                continue
            kinds = [_TYPES[kind] for kind in alternatives if kind in _TYPES]
            if kinds and not _is_any_of(value, [kind for kind, _ in kinds]):
                raise SettingError(f"{name} is {value!r}; it must be {' or '.join(words for _, words in kinds)}")
            if not limits:
                continue
            if limits["choices"] and value not in limits["choices"]:
                raise SettingError(f"{name} is '{value}'; choose one of: {', '.join(limits['choices'])}")
            if limits["minimum"] is not None and not value >= limits["minimum"]:  # also rejects NaN
                raise SettingError(f"{name} is {value}; it must be {limits['minimum']:,} or more")
            if limits["maximum"] is not None and value > limits["maximum"]:
                raise SettingError(f"{name} is {value}; it must be {limits['maximum']:,} or less")


def _is_any_of(value: Any, kinds: Sequence[type]) -> bool:
    return any(isinstance(value, kind) for kind in kinds) and (not isinstance(value, bool) or bool in kinds)


def _check_rate(rate: float) -> None:
    """Raise SettingError unless the false discovery rate is greater than 0 and less than 1."""
    if not 0 < rate < 1:
        raise SettingError(f"--rate is {rate}; it must be a false discovery rate between 0 and 1, like 0.01")


def _check_test_share(share: float) -> None:
    """Raise SettingError unless the share of held-out items is greater than 0 and less than 1."""
    if not 0 < share < 1:
        raise SettingError(f"--test is {share}; it must be a share between 0 and 1, like 0.3")


def split_options(verb: str, options: Mapping[str, Any], *settings: type) -> list[dict[str, Any]]:
    """Split keyword options by settings class. Options that are None are left out.

    Returns:
        The options of each class, in the order of the classes. Classes that share an option all receive it.

    Raises:
        SettingError: No class has a field with this name.
    """
    names_by_class = [{field.name for field in fields(kind) if field.default is not MISSING} for kind in settings]
    known_names = set[str]().union(*names_by_class)
    unknown = sorted(options.keys() - known_names)
    if unknown:
        raise SettingError(f"unknown {verb} option '{unknown[0]}'; known: {', '.join(sorted(known_names))}")
    explicit = {name: value for name, value in options.items() if value is not None}
    return [{name: explicit[name] for name in explicit if name in names} for names in names_by_class]


@dataclass(frozen=True)
class RunSettings(Settings):
    """Threads and workers of a stage. Only the number of threads affects results, and only their last bits."""

    threads: int | None = option(
        None,
        "Number of threads per worker.",
        metavar="N",
        panel=RUN,
        default_text="an equal share of the usable cores",
        minimum=1,
        maximum=512,
    )
    workers: int | None = option(
        None,
        "Number of worker processes.",
        metavar="N",
        panel=SCALE,
        default_text="1; a scan uses one per GPU, and a long scan without GPUs one per core",
        minimum=1,
        maximum=1024,
    )
    executor: str = option(
        "local", "Where to run workers: on this machine or on a Ray cluster.", panel=SCALE, choices=("local", "ray")
    )
    ray_address: str | None = option(
        None,
        "Address of the Ray cluster for --executor ray.",
        metavar="A",
        panel=SCALE,
        default_text="$RAY_ADDRESS, or a new local cluster",
    )
    gpus_per_worker: float = option(
        0, "Number of GPUs per Ray worker. 0 runs workers on CPUs.", metavar="N", panel=SCALE, minimum=0, maximum=64
    )

    def __post_init__(self) -> None:
        self.check_fields()
        if self.ray_address is not None and not self.ray_address.strip():
            raise SettingError("--ray-address is empty; write an address like 10.0.0.1:6379, or leave it out")
        if self.executor != "ray":
            for name in ("ray_address", "gpus_per_worker"):
                if getattr(self, name):
                    raise SettingError(f"{option_name(name)} has no effect without --executor ray; leave it out")


@dataclass(frozen=True)
class ScanRunSettings(RunSettings):
    """Settings for running a scan: threads and workers, shards, passes and devices."""

    shard: str | None = option(
        None,
        "Scan only shard I of N, with I from 1 to N. Combine the shards with `memlens merge`.",
        metavar="I/N",
        panel=SCALE,
    )
    layer_budget: int | None = option(
        None,
        "Scan at most N layers per pass over the text, to use less memory.",
        metavar="N",
        panel=SCALE,
        default_text="all layers",
        minimum=1,
        maximum=100_000,
    )
    device_map: str | None = option(
        None,
        "Strategy by which the package accelerate distributes the layers of a large model over several GPUs.",
        metavar="auto|balanced|sequential",
        panel=SCALE,
    )


@dataclass(frozen=True)
class ValueSettings(Settings):
    """Settings of the values stage.

    By default, `reading` is "raw" if the scan used a preset of the paper or if the model has no final norm, and
    "folded" otherwise.
    """

    top: int = option(
        50,
        "Number of promoted tokens and of demoted tokens to store per value.",
        metavar="N",
        minimum=1,
        maximum=100_000,
    )
    reading: str | None = option(
        None,
        "Whether to multiply values by the gain of the final norm before projecting them onto the vocabulary (folded) "
        "or not (raw).",
        metavar="folded|raw",
        default_text="folded if the model has a final norm",
    )
    vocabulary: str = option(
        "all",
        "Tokens to rank: all tokens (all), or all except undertrained tokens (trained).",
        choices=("all", "trained"),
    )
    untrained: bool = option(False, "Include undertrained tokens in the lists of top tokens.")


@dataclass(frozen=True)
class PatternSettings(Settings):
    """Settings of the patterns stage."""

    top: int = option(25, "Number of triggers per memory to search for patterns, 3 to 64.", metavar="N")
    rate: float = option(0.01, "False discovery rate among reported patterns.", metavar="RATE")
    background: int = option(
        150_000, "Number of random prefixes that triggers are compared with.", metavar="N", maximum=MOST_SAMPLE
    )
    seed: int = option(0, "Random seed for drawing the random prefixes.", metavar="N", minimum=0, maximum=MOST_SEED)

    def __post_init__(self) -> None:
        self.check_fields()
        if not 3 <= self.top <= MOST_TRIGGERS:
            raise SettingError(f"--top is {self.top}; it must be between 3 and {MOST_TRIGGERS}")
        _check_rate(self.rate)
        if self.background < 1000:
            raise SettingError(f"--background is {self.background}; it must be 1,000 or more")


@dataclass(frozen=True)
class RoleSettings(Settings):
    """Settings of the roles stage."""

    rate: float = option(0.01, "False discovery rate among memories with a role.", metavar="RATE")
    seed: int = option(
        0,
        "Random seed for drawing the random directions that values are compared with.",
        metavar="N",
        minimum=0,
        maximum=MOST_SEED,
    )

    def __post_init__(self) -> None:
        self.check_fields()
        _check_rate(self.rate)


@dataclass(frozen=True)
class SampleSettings(Settings):
    """Settings of the samples that experiments draw. If `sample` is None, each experiment uses its default size."""

    seed: int = option(0, "Random seed for drawing samples.", metavar="N", panel=SAMPLES, minimum=0, maximum=MOST_SEED)
    sample: int | None = option(
        None,
        "Number of prefixes to sample. For a single experiment that samples other items, such as memories, the number "
        "of these items.",
        metavar="N",
        panel=SAMPLES,
        default_text="depends on the experiment",
        minimum=1,
        maximum=MOST_SAMPLE,
    )
    stop_words: str | None = option(
        None,
        "Which words are stop words: the list of a language (en), or the most frequent tokens (frequent).",
        metavar="en|frequent",
        panel=SAMPLES,
        default_text="en",
    )
    null_tokens: int | None = option(
        None,
        "Number of tokens to run through shuffled networks, the baseline for claims. 0 skips this comparison.",
        metavar="N",
        panel=SAMPLES,
        default_text="10000",
        minimum=0,
        maximum=MOST_SAMPLE,
    )


@dataclass(frozen=True)
class LiveSettings(Settings):
    """Limits on workbench requests that run the model. Such requests are computed one at a time."""

    waiting: int = option(
        4,
        "Maximum number of requests that wait for the model. Further requests are rejected.",
        metavar="N",
        panel=LIVE,
        minimum=0,
        maximum=1000,
    )
    seconds: float = option(
        60,
        "Maximum number of seconds that a request waits for the model.",
        metavar="S",
        panel=LIVE,
        minimum=0.1,
        maximum=86_400,
    )
    prompt_tokens: int = option(
        512, "Maximum length of a prompt, in tokens.", metavar="N", panel=LIVE, minimum=1, maximum=100_000
    )


@dataclass(frozen=True)
class ProbeSettings(Settings):
    """Settings of a probe: columns of the labeled texts, coefficients to read, and numbers of memories to try."""

    column: str = option("text", "Column that contains the text.", metavar="NAME")
    label: str = option("label", "Column that contains the label.", metavar="NAME")
    kind: str = option(
        "auto",
        "Kind of labels. auto selects number if the labels are more than 10 different numbers.",
        choices=("auto", "classes", "number"),
    )
    at: str = option(
        "last",
        "Coefficients to read: at the last token, or the mean or maximum over all tokens.",
        choices=("last", "mean", "max"),
    )
    layers: str | None = option(None, "Layers to probe, counted from 0.", metavar="0-5,11", default_text="all")
    k: str = option("1,2,4,8,16,32,64,128,256,512", "Probe sizes to try: numbers of memories.", metavar="1,2,4")
    test: float = option(0.3, "Share of the texts to hold out for testing.", metavar="SHARE")
    max_length: int | None = option(
        None,
        "Maximum number of tokens to read from the end of a text.",
        metavar="N",
        default_text="the model's context",
        minimum=1,
    )
    top: int = option(20, "Number of memories to list for the best probe.", metavar="N", minimum=1, maximum=1000)
    shuffles: int = option(
        20,
        "Number of permutations of the labels for estimating the chance score.",
        metavar="N",
        minimum=0,
        maximum=10_000,
    )
    seed: int = option(0, "Random seed for the train-test split.", metavar="N", minimum=0, maximum=MOST_SEED)

    def __post_init__(self) -> None:
        self.check_fields()
        _check_test_share(self.test)
        if not self.sizes:
            raise SettingError(
                f"--k is '{self.k}'; separate the numbers with commas, like 1,2,4 (at most 9 digits each)"
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers in `k` in ascending order, or an empty tuple if `k` is invalid."""
        parts = [part.strip() for part in self.k.split(",")]
        is_valid = all(_is_number(part) and int(part) > 0 for part in parts)
        return tuple(sorted({int(part) for part in parts})) if is_valid else ()


@dataclass(frozen=True)
class TaskSettings(Settings):
    """Settings of the circuit of a task: how memories are scored, and how the circuit is measured."""

    method: str = option(
        "integrated",
        "How to score memories: integrated, ablation, relevance or patching, which docs/circuits.md describes.",
        metavar="NAME",
        panel=TASK,
        choices=("integrated", "ablation", "relevance", "patching"),
    )
    steps: int = option(
        10,
        "Number of points over which gradients are averaged. With fewer than 10, the ranking changes.",
        metavar="N",
        panel=TASK,
        minimum=1,
        maximum=1000,
    )
    refine: bool = option(
        False,
        "Learn a mask over the memories with the largest scores, and rank the memories that it keeps first.",
        panel=TASK,
    )
    test: float = option(0.4, "Share of --pairs to hold out if --held-out is not given.", metavar="SHARE", panel=TASK)
    random_sets: int = option(
        5,
        "Number of random sets to compare with the circuit of each size. A random set has as many memories of each "
        "layer as the circuit.",
        metavar="N",
        panel=TASK,
        minimum=1,
        maximum=1000,
    )
    seed: int = option(
        0,
        "Random seed for drawing held-out pairs and random sets of memories.",
        metavar="N",
        panel=TASK,
        minimum=0,
        maximum=MOST_SEED,
    )

    def __post_init__(self) -> None:
        self.check_fields()
        _check_test_share(self.test)


BUNDLED = "bundled"  # name of the bundled model and of the bundled text
HUB = "hf:"  # prefix of repositories on the Hugging Face Hub
_BLOCK = re.compile(r"block:([1-9][0-9]{0,8})", re.ASCII)
_LANGUAGE = re.compile(r"[a-z]{2,3}(-[a-z0-9]+)*")


@dataclass(frozen=True)
class HubSpec:
    """A dataset on the Hub, written `hf:NAME[:CONFIG[:SPLIT]]`. An empty CONFIG means the dataset's default."""

    name: str
    config: str | None = None
    split: str = "train"

    @classmethod
    def parse(cls, source: str) -> "HubSpec":
        name, *parts = source.removeprefix(HUB).split(":")
        if not name or len(parts) > 2:
            raise SettingError(f"corpus {source!r} is not a Hub dataset; write hf:NAME[:CONFIG[:SPLIT]]")
        config, split = (*parts, "", "")[:2]
        return cls(name, config or None, split or "train")

    def __str__(self) -> str:
        return f"{HUB}{self.name}:{self.config or ''}:{self.split}"


def is_hub_source(source: str) -> bool:
    return source.startswith(HUB)


@dataclass(frozen=True)
class CorpusSettings(Settings):
    """Sources of the text, and how the text is split.

    sources   files or folders of .txt, .jsonl, .parquet (each also .gz, .zst), `hf:NAME[:CONFIG[:SPLIT]]`, or a bundled
              text: `bundled:train` (also `bundled`), `bundled:held-out`, `bundled:prose`
    unit      sentence | line | document | block:N (N tokens)
    column    the field of .jsonl, .parquet and hf: sources that holds the text
    language  a lowercase language code, which determines the abbreviations that sentencex knows
    """

    sources: tuple[str, ...]
    unit: str = option(
        "sentence", "Unit of text that the model reads at once.", metavar="sentence|line|document|block:N", panel=TEXT
    )
    column: str = option(
        "text", "Name of the field that holds the text in .jsonl, .parquet and hf: sources.", metavar="NAME", panel=TEXT
    )
    language: str = "en"

    def __post_init__(self) -> None:
        if isinstance(self.sources, str):
            raise SettingError(f"sources is the string {self.sources!r}; it must be a tuple of files, folders or names")
        object.__setattr__(self, "sources", tuple(str(source) for source in self.sources))
        self.check_fields()
        if not self.sources:
            raise SettingError("the list of corpora is empty; pass a file, a folder, hf:NAME or bundled")
        for source in self.sources:
            if not source.strip() or "\0" in source:
                raise SettingError(f"corpus {source!r} is not a valid name; pass a file, a folder, hf:NAME or bundled")
            if is_hub_source(source):
                HubSpec.parse(source)
        if self.unit not in ("sentence", "line", "document") and not _BLOCK.fullmatch(self.unit):
            raise SettingError(f"--unit is '{self.unit}'; choose sentence, line, document or block:N (N tokens)")
        if not self.column:
            raise SettingError("--column is empty; name the field that holds the text")
        if not _LANGUAGE.fullmatch(self.language):
            raise SettingError(f"language {self.language!r} is not a language code; write it like en, de or pt-br")

    @property
    def block(self) -> int | None:
        """The N of the unit `block:N`, or None if the unit is not a block."""
        match = _BLOCK.fullmatch(self.unit)
        return int(match[1]) if match else None


WINDOW = 4096  # sentences per window (the scan sorts a window by length) and per row group of corpus.parquet

PRESETS: dict[str, dict[str, Any]] = {
    # The method as described in the paper: every prefix of every sentence, including repetitions
    "paper": {"per_sentence": "all", "dedup": "none"},
    # The method of the program that the authors released
    "released": {"per_sentence": "best", "dedup": "none", "bos_prefix": True, "whole_sentence": False},
}


@dataclass(frozen=True)
class ScanSettings(Settings):
    """Settings of a scan. Two scans with equal settings, model and corpus write the same bytes."""

    top: int = option(
        50, "Number of top triggers to keep per memory.", metavar="N", panel=KEPT, minimum=1, maximum=100_000
    )
    layers: tuple[int, ...] | None = option(
        None, "Layers to scan, counted from 0.", metavar="0-5,11", panel=KEPT, default_text="all"
    )
    bottom: str = option(
        "auto",
        "Whether to also keep the triggers with the most negative coefficients.",
        panel=KEPT,
        default_text="auto (yes for gated blocks)",
        choices=("auto", "yes", "no"),
    )
    per_sentence: str = option(
        "best",
        "Which prefixes of a sentence can be triggers of a memory: only the one with the largest coefficient (best), "
        "or all.",
        panel=KEPT,
        choices=("best", "all"),
    )
    dedup: str = option(
        "prefix",
        "Repetitions to leave out: repeated prefixes, repeated sentences or none.",
        panel=KEPT,
        choices=("prefix", "sentence", "none"),
    )
    preset: str | None = option(
        None,
        "Use the settings of the paper or of its released program. Other options override them.",
        panel=KEPT,
        choices=tuple(PRESETS),
    )
    seed: int = option(
        0,
        "Random seed for sampling the prefixes in histograms and examples.",
        metavar="N",
        panel=KEPT,
        minimum=0,
        maximum=MOST_SEED,
    )
    max_tokens: int | None = option(
        None, "Stop after N tokens of text.", metavar="N", panel=TEXT, default_text="all", minimum=1
    )
    max_length: int | None = option(
        None,
        "Truncate each sentence after N tokens.",
        metavar="N",
        panel=TEXT,
        default_text="the model's context",
        minimum=1,
    )
    bos: str = option(
        "auto",
        "Whether to add the BOS token before each sentence.",
        panel=TEXT,
        default_text="auto (as the tokenizer does)",
        choices=("auto", "yes", "no"),
    )
    batch_tokens: int = option(
        4096,
        "Maximum number of tokens per batch.",
        metavar="N",
        panel=RUN,
        default_text="4096 on a CPU, 16384 on an NVIDIA GPU, 8192 on the GPU of a Mac",
        minimum=1,
        maximum=2**24,
    )
    bos_prefix: bool = False  # True if the BOS token alone counts as a prefix, at position -1
    whole_sentence: bool = True  # True if the whole sentence counts as a prefix
    threads: int = option(1, minimum=1, maximum=512)  # recorded, because it affects the last bits of results
    sample_every: int = option(64, minimum=1, maximum=2**31 - 1)  # histograms use every Nth prefix

    def __post_init__(self) -> None:
        self.check_fields()
        if self.bos_prefix and self.dedup == "prefix":
            raise SettingError(
                "--dedup prefix cannot be combined with this preset, which counts the BOS token alone as a prefix; "
                "leave out --dedup"
            )
        if self.layers is not None and not self.layers:
            raise SettingError("--layers is empty; write layers like 0-5,11, or leave it out for all")

    @classmethod
    def with_preset(cls, preset: str | None = None, **options: Any) -> "ScanSettings":
        """Return the settings of a preset, overridden by options that are not None. `layers` may be a string."""
        (explicit,) = split_options("scan", options, cls)
        if (layers := explicit.get("layers")) is not None:
            explicit["layers"] = parse_layers(layers) if isinstance(layers, str) else tuple(layers)
        return cls(**{**PRESETS.get(preset or "", {}), "preset": preset, **explicit})

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "layers": None if self.layers is None else list(self.layers)}


def parse_layers(text: str) -> tuple[int, ...]:
    """Parse a list of layers such as "0-5,11". Returns the layers in ascending order without duplicates.

    >>> parse_layers("0-2,11")
    (0, 1, 2, 11)
    """
    layers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not _is_number(first) or (dash and not _is_number(last)):
            raise SettingError(f"--layers is '{text}'; write numbers and ranges from 0, like 0-5,11")
        low, high = int(first), int(last) if dash else int(first)
        if high < low or high > 100_000:
            raise SettingError(f"--layers is '{text}'; the range {part.strip()} is empty or too large")
        layers.update(range(low, high + 1))
    return tuple(sorted(layers))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10


def choose_layers(layers: tuple[int, ...] | None, available: int) -> tuple[int, ...]:
    """Return the layers to scan. None means all layers. Raises UnknownName for a layer that the model does not have."""
    if layers is None:
        return tuple(range(available))
    last = available - 1
    for layer in layers:
        if not 0 <= layer <= last:
            raise UnknownName(f"layer {layer} does not exist: the model has layers 0 to {last}; change --layers")
    return tuple(sorted(set(layers)))
