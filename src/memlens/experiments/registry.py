"""Which experiments there are, what each needs, and which figure of the paper it answers to.

An experiment is a module of this package, named like the experiment with underscores, with

    compute(index, model, *, seed, sample, progress) -> pyarrow.Table       chart(table) -> altair.Chart

and for every further table in `also` the pair compute_<also> and chart_<also>; that table is `<name>-<also>`. A module
is imported when it is first used. To add one: write the module, add its line here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from memlens.annotations.store import LABELS, VERDICTS
from memlens.errors import IndexFolderError, UnknownName
from memlens.index.reader import Index


@dataclass(frozen=True)
class Experiment:
    """One experiment of the paper."""

    name: str
    figure: str  # where the paper shows it
    title: str
    sample_of: str  # what `sample` counts
    sample: int | None  # how many by default; None = all
    needs: tuple[str, ...] = ()  # tables that must be in the index
    uses_model: bool = False  # must the model be loaded?
    also: tuple[str, ...] = ()  # further tables
    options: tuple[str, ...] = ()  # further keyword arguments that its compute functions take
    last_layer: bool = False  # must the model's last layer have been scanned?
    people: str = ""  # which history of people's work it reads (see index/history)

    @property
    def on_prefixes(self) -> bool:
        """Is it read from the pass over sampled prefixes?"""
        return self.sample_of == "prefixes"

    @property
    def module(self) -> Any:
        return import_module(f"memlens.experiments.{self.name.replace('-', '_')}")

    @property
    def table_names(self) -> tuple[str, ...]:
        """The tables that the experiment makes; nothing is imported for that."""
        return (self.name, *(f"{self.name}-{part}" for part in self.also))

    def obstacle(self, index: Index) -> str | None:
        """Why this index cannot have the experiment, and what to do about it; None where nothing is in the way."""
        for table in self.needs:
            try:
                index.path(table)
            except IndexFolderError as error:
                return str(error)
        last = len(index.manifest.model.memories) - 1
        if self.last_layer and last not in index.layers:
            return f"the model's last layer, {last}, was not scanned into {index.folder}; scan with it in --layers"
        return None

    def tables(self) -> Iterator[tuple[str, Any, Any]]:
        """Name, compute and chart of each table that the experiment makes."""
        yield self.name, self.module.compute, self.module.chart
        for part in self.also:
            yield f"{self.name}-{part}", getattr(self.module, f"compute_{part}"), getattr(self.module, f"chart_{part}")


def _on_prefixes(name: str, figure: str, title: str, last_layer: bool = False, people: str = "") -> Experiment:
    """An experiment that reads the one pass over sampled prefixes (see aggregate)."""
    return Experiment(
        name,
        figure,
        title,
        "prefixes",
        4000,
        needs=("values",),
        uses_model=True,
        options=("validation", "stop_words"),
        last_layer=last_layer,
        people=people,
    )


_KNOWN = (
    Experiment("agreement", "Figure 4", "Values that promote what follows their top trigger",
               "memories a layer", None, needs=("values",)),
    Experiment("rank", "Figure 5", "Rank of the top trigger's next token in the value's distribution",
               "memories a layer", None, needs=("values",)),
    Experiment("predictive-values", "Figure 6 and Table 2", "The most confident values, and agreement by confidence",
               "most confident values", 100, needs=("values",), also=("bins",)),
    Experiment("local-edits", "Figure 3", "How a coefficient changes when one token of the prefix is removed",
               "memories a layer", 100, uses_model=True),
    Experiment("patterns", "Figure 2", "Kinds of pattern among trigger prefixes",
               "memories a layer", None, needs=("patterns",), also=("people",), people=LABELS),
    _on_prefixes("active", "Figure 7", "Memories that are active for a prefix"),
    _on_prefixes("composition", "Figure 8", "Layers that predict what none of their memories predicts"),
    _on_prefixes("refinement", "Figure 9", "Residual streams that already predict the final token"),
    _on_prefixes("confidence", "Figure 10", "Probability of the final token in the residual stream"),
    _on_prefixes("cases", "Figure 11", "Whose token a layer's output has"),
    _on_prefixes("last-layer", "Section 5.2", "Compositions of the last layer, for people to judge", last_layer=True,
                 people=VERDICTS),
    _on_prefixes("contributions", "beyond the paper", "What attention, layers and memories put into the final logit"),
    _on_prefixes("vetoes", "beyond the paper", "Memories that push the residual's token down"),
)  # fmt: skip

EXPERIMENTS: dict[str, Experiment] = {experiment.name: experiment for experiment in _KNOWN}


def find_experiments(names: Sequence[str]) -> list[Experiment]:
    """Experiments by name, each once, in the registry's order; `all` stands for every one. Unknown ones are refused."""
    for name in names:
        if name not in EXPERIMENTS and name != "all":
            raise UnknownName(f"there is no experiment '{name}'; known: {', '.join(EXPERIMENTS)}, or all")
    return [experiment for experiment in _KNOWN if experiment.name in names or "all" in names]
