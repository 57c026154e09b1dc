"""The paper's experiments on an index: one module each; see registry for how one is added.

run(index, ["agreement", "rank"])      their tables, kept in INDEX/experiments/
"""

from memlens.experiments.registry import EXPERIMENTS, Experiment, find_experiments
from memlens.experiments.running import is_made, is_outdated, origin, run

__all__ = ["EXPERIMENTS", "Experiment", "find_experiments", "is_made", "is_outdated", "origin", "run"]
