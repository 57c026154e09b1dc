"""Settings of the stages as frozen dataclasses: name, default, limits and help of an option are written once.

    @dataclass(frozen=True)
    class ValueSettings:
        top: int = option(50, "Tokens to list at each end of a value.", metavar="N", least=1)

The command line makes its options from these fields (cli/options.py), `divide` checks those of a Python call, and the
index records them. A field without help can be set from Python only. ScanSettings and CorpusSettings, which check more
than limits, are in scanner/settings.py and corpus/settings.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from memlens.errors import SettingError

# Panels of --help.
KEPT, TEXT, RUN = "What is kept", "How the text is cut", "How it runs"
SCALE = "Many cores, many machines, large models"

MOST_TRIGGERS = 64  # of a memory that patterns look at: a set of prefixes is a word of so many bits
MOST_WORKERS = 1024


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
    for one in fields(settings):
        value, limits, name = getattr(settings, one.name), one.metadata, option_name(one.name)
        if value is None or not limits:
            continue
        if limits["choices"] and value not in limits["choices"]:
            raise SettingError(f"{name} is '{value}'; choose one of: {', '.join(limits['choices'])}")
        if limits["least"] is not None and value < limits["least"]:
            raise SettingError(f"{name} is {value}; it must be {limits['least']} or more")
        if limits["most"] is not None and value > limits["most"]:
            raise SettingError(f"{name} is {value}; it must be {limits['most']:,} or less")


def divide(verb: str, given: Mapping[str, Any], *settings: type) -> list[dict[str, Any]]:
    """The options of a Python call, for each of the settings those that are its fields; an unknown one is refused.

    None means not given.
    """
    known = [{one.name for one in fields(kind) if one.default is not MISSING} for kind in settings]
    names = set[str]().union(*known)
    unknown = sorted(given.keys() - names)
    if unknown:
        raise SettingError(f"unknown {verb} option '{unknown[0]}'; known: {', '.join(sorted(names))}")
    return [{name: value for name, value in given.items() if name in own and value is not None} for own in known]


@dataclass(frozen=True)
class RunSettings:
    """Where a stage is computed; only the number of threads changes the result, in its last bits."""

    threads: int | None = option(
        None, "Threads to compute with.", metavar="N", panel=RUN, otherwise="all usable cores", least=1
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
        if self.executor != "ray":
            for name in ("ray_address", "gpus_per_worker"):
                if getattr(self, name):
                    raise SettingError(f"{option_name(name)} counts for --executor ray only; add that or leave it out")


@dataclass(frozen=True)
class ScanRunSettings(RunSettings):
    """Where a scan is computed, and how it is divided."""

    workers: int | None = option(
        None,
        "Processes that share the work.",
        metavar="N",
        panel=SCALE,
        otherwise="the fastest split of the cores, if the scan is long",
        least=1,
        most=MOST_WORKERS,
    )
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
    )
    device_map: str | None = option(
        None,
        "Spread the layers of a large model over several GPUs, as accelerate does.",
        metavar="auto|balanced|sequential",
        panel=SCALE,
    )


@dataclass(frozen=True)
class ValueSettings:
    """Which tokens of each value are listed; `reading` None is the model's own, but raw with a preset of the paper."""

    top: int = option(50, "Tokens to list at each end of a value.", metavar="N", least=1)
    reading: str | None = option(
        None,
        "With the final norm's gain folded in, or plain v E.",
        metavar="folded|raw",
        otherwise="folded where there is a final norm",
    )

    def __post_init__(self) -> None:
        check_limits(self)


@dataclass(frozen=True)
class PatternSettings:
    """Which triggers are searched for patterns, and against what chance."""

    top: int = option(25, "Triggers of a memory to look at, 3 to 64.", metavar="N")
    rate: float = option(0.01, "Expected share of chance among all patterns that are reported.", metavar="SHARE")
    background: int = option(150_000, "Random prefixes of the corpus to compare triggers with.", metavar="N")
    seed: int = option(0, "Seed of the random prefixes.", metavar="N", least=0)

    def __post_init__(self) -> None:
        check_limits(self)
        if not 3 <= self.top <= MOST_TRIGGERS:
            raise SettingError(f"--top is {self.top}; a pattern needs 3 triggers and memlens looks at most at 64")
        if not 0 < self.rate < 1:
            raise SettingError(f"--rate is {self.rate}; it is a share of false discoveries between 0 and 1, like 0.01")
        if self.background < 1000:
            raise SettingError(f"--background is {self.background}; fewer than 1000 random prefixes tell nothing")


@dataclass(frozen=True)
class SampleSettings:
    """Which sample the experiments look at; None is each experiment's own."""

    seed: int = option(0, "Of everything that is drawn at random.", metavar="N", least=0)
    sample: int | None = option(
        None,
        "Prefixes to look at; for one named experiment, what it counts.",
        metavar="N",
        otherwise="each one's own",
        least=1,
    )
    stop_words: str | None = option(
        None, "Stop words: a language's list, or the most frequent tokens.", metavar="en|frequent", otherwise="en"
    )

    def __post_init__(self) -> None:
        check_limits(self)
