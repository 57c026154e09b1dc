"""The experiments by name, in the order in which they run; a new one is named here."""

import re
from collections.abc import Iterator, Sequence
from importlib import import_module

from memlens.errors import UnknownName
from memlens.experiments.experiment import Experiment, ResultTable

_MODULES = (
    "agreement", "rank", "predictive_values", "local_edits", "patterns", "active", "composition", "refinement",
    "confidence", "cases", "last_layer", "contributions", "vetoes", "promotion", "suppression",
)  # fmt: skip


def _load(module: str) -> Experiment:
    experiment: Experiment = import_module(f"memlens.experiments.{module}").EXPERIMENT
    return experiment


EXPERIMENTS: dict[str, Experiment] = {experiment.name: experiment for experiment in map(_load, _MODULES)}


def find_experiments(names: Sequence[str]) -> list[Experiment]:
    """Experiments by name, each once, in the registry's order; `all` stands for every one. Unknown ones are refused."""
    for name in names:
        if name not in EXPERIMENTS and name != "all":
            raise UnknownName(f"there is no experiment '{name}'; known: {', '.join(EXPERIMENTS)}, or all")
    return [experiment for experiment in EXPERIMENTS.values() if experiment.name in names or "all" in names]


def in_paper_order() -> list[Experiment]:
    """The experiments by the number of their first figure, then those that have none."""

    def figure(experiment: Experiment) -> float:
        match = re.match(r"Figure (\d+)", experiment.figure)
        return int(match[1]) if match else float("inf")

    return sorted(EXPERIMENTS.values(), key=figure)


def all_tables() -> Iterator[tuple[Experiment, ResultTable]]:
    """Every table of every experiment, in the order of the paper."""
    for experiment in in_paper_order():
        for table in experiment.tables:
            yield experiment, table
