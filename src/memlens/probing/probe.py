"""probe(): k-sparse probes of every layer's memories, with baselines on the residual stream and on words."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from memlens.errors import needing
from memlens.index.memory import read_summaries
from memlens.memory import MemoryId
from memlens.probing.activations import encode_texts, read_activations
from memlens.probing.fit import MEASURES, Columns, Division, Fit, differences, fit_dense, fit_sparse, fit_words, score
from memlens.probing.labels import Source as Labels, read_labels
from memlens.probing.saved import SparseProbe
from memlens.progress import Progress, no_progress
from memlens.settings import ProbeSettings, choose_layers, parse_layers, split_options
from memlens.stats import Estimate
from memlens.text import plain
from memlens.tracer.prompt import Source, open_model

if TYPE_CHECKING:
    from memlens.index.reader import Index
    from memlens.memory import Trigger
    from memlens.models.memory_model import MemoryModel

_PROMOTED = 5  # tokens listed with a memory


@dataclass(frozen=True)
class ProbeScore:
    """The input and the test score of one probe."""

    input: str  # "memories", "residual" (the stream behind the layer) or "words"
    layer: int | None  # None for words
    k: int | None  # memories that it reads; None for all there is
    score: float
    low: float
    high: float
    held: float  # mean log likelihood (of numbers less the squared error) of the fifth that layer and k are chosen by
    strength: float  # C of scikit-learn


@dataclass(frozen=True)
class ProbedMemory:
    """A memory of the selected probe, with its trigger and pattern."""

    memory: MemoryId
    difference: float  # of means, in standard deviations of the training part; of numbers the correlation
    typical: float  # its mean coefficient among texts of the last class; of numbers the change per unit
    alone: float  # how well its coefficient alone tells the labels of the test part, by AUC or correlation
    promotes: tuple[str, ...]
    summary: str | None  # in one line, where an index was given
    trigger: Trigger | None  # the first, where an index was given


@dataclass(frozen=True)
class ProbeResult:
    """All probes, and the one with the best fit on the held-out part of the training texts."""

    model: str
    kind: str  # binary, classes or number
    classes: tuple[str, ...]
    measure: str  # AUC, accuracy or correlation
    train: int
    test: int
    cut: int  # texts of which only the end was read
    repeats: int  # rows that were left out, as their text was there before
    scores: tuple[ProbeScore, ...]
    best: SparseProbe
    chance: Estimate | None  # of that probe learnt from shuffled labels: the mean, and where 95% of them lie
    memories: tuple[ProbedMemory, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain data for json.dumps."""
        return plain(self)


def probe(
    model: Source,
    labels: Labels | tuple[Sequence[str], Sequence[Any]],
    *,
    where: str | None = None,
    device: str = "auto",
    dtype: str | None = None,
    progress: Progress = no_progress,
    **options: Any,
) -> ProbeResult:
    """Find the memories that predict labels, with k-sparse probes of every layer.

        memlens.probe("gpt2-index", "labels.csv").best.save("probe.json")

    `labels` is a .csv or .jsonl file with a text and a label in every row, or a pair (texts, labels). `options` are
    fields of ProbeSettings. Given an index, its model is loaded (from `where`, if it has moved), and the memories are
    listed with their triggers.
    """
    with needing("probe", "memlens probe"):
        import sklearn  # noqa: F401
    (given,) = split_options("probe", options, ProbeSettings)
    settings = ProbeSettings(**given)
    texts = read_labels(labels, settings.column, settings.label, settings.kind)
    loaded, index = open_model(model, where=where, device=device, dtype=dtype)
    division = Division(texts, *texts.divided(settings.test, settings.seed), settings.seed)
    return _Run(loaded, division, settings, progress).result(index)


class _Run:
    """The probes for one set of labels, and the best one so far."""

    def __init__(self, model: MemoryModel, division: Division, settings: ProbeSettings, progress: Progress) -> None:
        self.model, self.division, self.settings, self.progress = model, division, settings, progress
        self.scores: list[ProbeScore] = []
        self.best: tuple[float, int, Fit, Columns] | None = None

    def result(self, index: Index | None) -> ProbeResult:
        division, settings = self.division, self.settings
        encoded, cut = encode_texts(self.model, division.labels.texts, settings.max_length)
        wanted = None if settings.layers is None else parse_layers(settings.layers)
        chosen = choose_layers(wanted, len(self.model.layers))
        with fitting():
            self._add("words", None, None, fit_words(division, division.y))
        layers = read_activations(self.model, encoded, settings.at, chosen, self.progress)
        for done, (layer, m, states) in enumerate(layers):
            self.progress("probes", done, len(chosen))
            with fitting():
                self._probe_layer(layer, Columns.of(m, division.train), Columns.of(states, division.train))
        assert self.best is not None  # a model has a layer, and there is a k
        _, layer, fit, columns = self.best
        probe = self._saved(layer, fit, columns)
        with fitting():
            chance = self._chance(len(fit.columns), columns)
        memories = self._memories(layer, fit, columns, probe, index)
        sizes = len(division.train), len(division.test), cut, division.labels.repeats
        measure, classes = MEASURES[division.kind], division.labels.classes
        scores = tuple(self.scores)
        return ProbeResult(self.model.name, division.kind, classes, measure, *sizes, scores, probe, chance, memories)

    def _probe_layer(self, layer: int, columns: Columns, states: Columns) -> None:
        division, ks = self.division, self.settings.sizes
        true = fit_sparse(columns, division, ks, division.y)
        for k, fit in true.items():
            self._add("memories", layer, k, fit)
            if self.best is None or fit.held > self.best[0]:  # of equals the fewest memories of the first layer
                self.best = fit.held, layer, fit, columns
        self._add("residual", layer, None, fit_dense(states, division, division.y))

    def _chance(self, k: int, columns: Columns) -> Estimate | None:
        """Labels are shuffled again and again, as one shuffle says little about how far chance goes."""
        division, times = self.division, self.settings.shuffles
        ys = [division.shuffled_y(part) for part in range(times)]
        scores = [fit_sparse(columns, division, [k], y)[k].score.value for y in ys]
        return Estimate(float(np.mean(scores)), *np.quantile(scores, [0.025, 0.975]).tolist()) if scores else None

    def _add(self, read: str, layer: int | None, k: int | None, fit: Fit) -> None:
        self.scores.append(ProbeScore(read, layer, k, *fit.score, fit.held, fit.strength))

    def _saved(self, layer: int, fit: Fit, columns: Columns) -> SparseProbe:
        division, memories = self.division, fit.columns
        m, y = columns.x[division.train][:, memories].astype(np.float64), division.y
        classes = division.labels.classes
        if classes:
            typical = [m[y == place].mean(0) for place in range(len(classes))]
        else:
            typical = [(m - m.mean(0)).T @ (y - y.mean()) / ((y - y.mean()) ** 2).sum()]
        model = self.model
        return SparseProbe(
            model.name, model.fingerprint(), str(model.dtype).removeprefix("torch."), self.settings.at,
            self.settings.max_length, layer, tuple(str(model.names.name(layer, int(i))) for i in memories), classes,
            _floats(columns.mean[memories]), _floats(columns.scale[memories]), tuple(map(_floats, fit.weights)),
            _floats(fit.intercepts), tuple(map(_floats, typical)), 0.0 if classes else float(y.mean()),
            MEASURES[division.kind], fit.score,
        )  # fmt: skip

    def _memories(
        self, layer: int, fit: Fit, columns: Columns, probe: SparseProbe, index: Index | None
    ) -> tuple[ProbedMemory, ...]:
        division, memories = self.division, fit.columns[: self.settings.top]
        apart = differences(columns.standardized(division.train, memories), division.y, len(division.labels.classes))
        names = [self.model.names.name(layer, int(number)) for number in memories]
        known = index if index is not None and layer in index.layers else None
        summaries = {} if known is None else read_summaries(known, names)
        triggers = {} if known is None else known.triggers_of(names, limit=1)
        tokens = self._promoted(layer, memories)
        return tuple(
            ProbedMemory(name, float(apart[place]), probe.typical[-1][place], self._alone(columns.x[:, number]),
                         tokens[place], summaries.get(name), next(iter(triggers.get(name, ())), None))
            for place, (name, number) in enumerate(zip(names, memories, strict=True))
        )  # fmt: skip

    def _promoted(self, layer: int, memories: Any) -> list[tuple[str, ...]]:
        scores = self.model.lens.value_scores(self.model.layers[layer].values_of(memories.tolist()), layer)
        best = scores.topk(min(_PROMOTED, self.model.vocabulary), dim=1).indices.tolist()
        return [tuple(self.model.tokenizer.token_text(token) for token in row) for row in best]

    def _alone(self, m: Any) -> float:
        """The score of the memory alone; of several classes, that of the one that it tells best."""
        labels, test = self.division.labels, self.division.test
        if not labels.classes:
            return score("number", labels.y[test], m[test]).value
        asked = [1] if labels.is_binary else range(len(labels.classes))
        areas = [score("binary", (labels.y[test] == place).astype(int), m[test]).value for place in asked]
        return max(areas, key=lambda area: abs(area - 0.5))


def _floats(numbers: Any) -> tuple[float, ...]:
    return tuple(np.asarray(numbers, np.float64).tolist())


@contextmanager
def fitting() -> Iterator[None]:
    """Around many small fits: on one thread, 20 times faster, and without warnings of those that stop early."""
    from threadpoolctl import threadpool_limits

    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore")
        yield
