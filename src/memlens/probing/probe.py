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
from memlens.probing.fit import MEASURES, Columns, Fit, Split, differences, fit_dense, fit_sparse, fit_words, score
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

_PROMOTED = 5  # number of promoted tokens to list with a memory


@dataclass(frozen=True)
class ProbeScore:
    """The input and the test score of one probe."""

    input: str  # "memories", "residual" (the stream after the layer) or "words"
    layer: int | None  # None for "words"
    k: int | None  # number of columns; None for all columns
    score: float
    low: float
    high: float
    held: float  # mean log likelihood of held-out labels; for numbers, the negative mean squared error
    held_error: float  # standard error of `held`
    strength: float  # regularization strength, C in scikit-learn


@dataclass(frozen=True)
class ProbedMemory:
    """A memory of the best probe."""

    memory: MemoryId
    difference: float  # difference of class means in standard deviations; for numbers, the correlation with the label
    typical: float  # mean coefficient for texts of the last class, or its change per unit of a numeric label
    alone: float  # test score of this coefficient alone, as AUC or correlation
    promotes: tuple[str, ...]
    summary: str | None  # summary in one line, if an index was given
    trigger: Trigger | None  # first trigger, if an index was given


@dataclass(frozen=True)
class ProbeResult:
    """The scores of all probes, and the best probe with its memories and its chance level."""

    model: str
    kind: str  # binary, classes or number
    classes: tuple[str, ...]
    measure: str  # AUC, accuracy or correlation
    train: int
    test: int
    cut: int  # number of texts that were truncated at the start
    repeats: int  # number of rows that were left out because their text is repeated
    scores: tuple[ProbeScore, ...]
    best: SparseProbe  # the fit with the fewest memories within one standard error of the highest `held`
    chance: Estimate | None  # mean score of the best probe with permuted labels, and the range of 95% of the scores
    memories: tuple[ProbedMemory, ...]
    verdict: str  # the result in one sentence

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

    Args:
        model: A model, an argument of `load`, or an index. With an index, memories are listed with their triggers.
        labels: A .csv or .jsonl file with a text and a label in every row, or a pair (texts, labels).
        where: The current location of the index's model, if it has moved.
        device: The device.
        dtype: The weight dtype.
        progress: Called with the stage, the number done and the total.
        **options: Fields of ProbeSettings.

    Returns:
        The scores of all probes, and the best probe with its memories.

    Raises:
        SettingError: An option is not valid, or no probe can be fitted to the labels.
        CorpusError: The file of labels cannot be read.

    Example:
        >>> texts = [f"The river runs {n}" for n in range(20)] + [f"A stone lies {n}" for n in range(20)]
        >>> result = memlens.probe(model, (texts, ["water"] * 20 + ["stone"] * 20), k="1,2", shuffles=0)
        >>> result.best.classes
        ('stone', 'water')
    """
    with needing("probe", "memlens probe"):
        import sklearn  # noqa: F401
    (probe_options,) = split_options("probe", options, ProbeSettings)
    settings = ProbeSettings(**probe_options)
    texts = read_labels(labels, settings.column, settings.label, settings.kind)
    loaded, index = open_model(model, where=where, device=device, dtype=dtype)
    split = Split(texts, *texts.split(settings.test, settings.seed), settings.seed)
    return _Run(loaded, split, settings, progress).result(index)


class _Run:
    """A run that fits all probes for one set of labels."""

    def __init__(self, model: MemoryModel, split: Split, settings: ProbeSettings, progress: Progress) -> None:
        self.model, self.split, self.settings, self.progress = model, split, settings, progress
        self.scores: list[ProbeScore] = []
        self.fits: list[tuple[int, Fit]] = []  # layer and fit of each probe of memories

    def result(self, index: Index | None) -> ProbeResult:
        split, settings = self.split, self.settings
        encoded, cut = encode_texts(self.model, split.labels.texts, settings.max_length)
        numbers = None if settings.layers is None else parse_layers(settings.layers)
        selected = choose_layers(numbers, len(self.model.layers))
        with fitting():
            self._add("words", None, None, fit_words(split))
        layers = read_activations(self.model, encoded, settings.at, selected, self.progress)
        for done, (layer, m, states) in enumerate(layers):
            self.progress("probes", done, len(selected))
            with fitting():
                for k, fit in fit_sparse(Columns.of(m, split.train), split, settings.sizes).items():
                    self._add("memories", layer, k, fit)
                    self.fits.append((layer, fit))
                self._add("residual", layer, None, fit_dense(Columns.of(states, split.train), split))
        layer, fit = select_best(self.fits)
        # read this layer again, because the coefficients of all layers may not fit in RAM
        ((_, m, _),) = read_activations(self.model, encoded, settings.at, [layer], self.progress)
        columns = Columns.of(m, split.train)
        probe = self._saved(layer, fit, columns)
        with fitting():
            chance = self._chance(len(fit.columns), columns)
        memories = self._memories(layer, fit, columns, probe, index)
        sizes = len(split.train), len(split.test), cut, split.labels.repeats
        measure, classes, scores = MEASURES[split.kind], split.labels.classes, tuple(self.scores)
        verdict = write_verdict(probe, scores, chance)
        return ProbeResult(
            self.model.name, split.kind, classes, measure, *sizes, scores, probe, chance, memories, verdict
        )

    def _chance(self, k: int, columns: Columns) -> Estimate | None:
        """Return the mean score with permuted labels and the range that contains 95% of the scores."""
        splits = [self.split.permuted(part) for part in range(self.settings.shuffles)]
        scores = [fit_sparse(columns, split, [k])[k].score.value for split in splits]
        return Estimate(float(np.mean(scores)), *np.quantile(scores, [0.025, 0.975]).tolist()) if scores else None

    def _add(self, source: str, layer: int | None, k: int | None, fit: Fit) -> None:
        self.scores.append(ProbeScore(source, layer, k, *fit.score, fit.held, fit.held_error, fit.strength))

    def _saved(self, layer: int, fit: Fit, columns: Columns) -> SparseProbe:
        split, memories = self.split, fit.columns
        m, y = columns.x[split.train][:, memories].astype(np.float64), split.y
        classes = split.labels.classes
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
            MEASURES[split.kind], fit.score,
        )  # fmt: skip

    def _memories(
        self, layer: int, fit: Fit, columns: Columns, probe: SparseProbe, index: Index | None
    ) -> tuple[ProbedMemory, ...]:
        split, memories = self.split, fit.columns[: self.settings.top]
        gaps = differences(columns.standardized(split.train, memories), split.y, len(split.labels.classes))
        names = [self.model.names.name(layer, int(number)) for number in memories]
        has_layer = index is not None and layer in index.layers
        summaries = read_summaries(index, names) if index is not None and has_layer else {}
        triggers = index.triggers_of(names, limit=1) if index is not None and has_layer else {}
        tokens = self._promoted(layer, memories)
        return tuple(
            ProbedMemory(name, float(gaps[place]), probe.typical[-1][place], self._alone(columns.x[:, number]),
                         tokens[place], summaries.get(name), next(iter(triggers.get(name, ())), None))
            for place, (name, number) in enumerate(zip(names, memories, strict=True))
        )  # fmt: skip

    def _promoted(self, layer: int, memories: Any) -> list[tuple[str, ...]]:
        scores = self.model.lens.value_scores(self.model.layers[layer].values_of(memories.tolist()), layer)
        best = scores.topk(min(_PROMOTED, self.model.vocabulary), dim=1).indices.tolist()
        return [tuple(self.model.tokenizer.token_text(token) for token in row) for row in best]

    def _alone(self, m: Any) -> float:
        """Return the test score of one memory's coefficients `m` alone.

        With several classes, return the score for the class that the coefficients separate best.
        """
        labels, test = self.split.labels, self.split.test
        if not labels.classes:
            return score("number", labels.y[test], m[test]).value
        classes = [1] if labels.is_binary else range(len(labels.classes))
        areas = [score("binary", (labels.y[test] == place).astype(int), m[test]).value for place in classes]
        return max(areas, key=lambda area: abs(area - 0.5))


def select_best(fits: Sequence[tuple[int, Fit]]) -> tuple[int, Fit]:
    """Return the layer and fit with the fewest columns within one standard error of the highest held-out likelihood.

    Ties in the number of columns go to the highest likelihood.
    """
    _, highest = max(fits, key=lambda pair: pair[1].held)
    close = [pair for pair in fits if pair[1].held >= highest.held - highest.held_error]
    return min(close, key=lambda pair: (len(pair[1].columns), -pair[1].held, pair[0]))


def write_verdict(best: SparseProbe, scores: Sequence[ProbeScore], chance: Estimate | None) -> str:
    """Return one sentence that compares the best probe with chance and with a bag of words.

    The probe is above chance if its score exceeds the range of scores with permuted labels. Without permutations, the
    lower end of its interval must exceed 0 (correlation) or 0.5 (AUC). The probe differs from the bag of words if the
    score of the bag of words is outside the interval of the probe.
    """
    count = len(best.memories)
    memories = f"{count} {'memory' if count == 1 else 'memories'} of layer {best.layer}"
    floor = {"AUC": 0.5, "correlation": 0.0}.get(best.measure)
    if chance is not None:
        is_above = best.score.value > chance.high
        reference = f"chance ({chance.low:.2f} to {chance.high:.2f})"
    elif floor is not None:
        is_above, reference = best.score.low > floor, f"chance ({floor:g})"
    else:
        return f"{memories} reach {best.measure} {best.score.value:.2f}, which was not compared with chance."
    if not is_above:
        return (
            f"These texts do not show that memories predict the label: the best probe reaches {best.measure} "
            f"{best.score.value:.2f}, which is within {reference}."
        )
    words = next(one.score for one in scores if one.input == "words")
    relation = (
        "better than" if words < best.score.low else "worse than" if words > best.score.high else "about as well as"
    )
    return (
        f"{memories} {'predicts' if count == 1 else 'predict'} the label with {best.measure} {best.score.value:.2f}: "
        f"above {reference} and {relation} a bag of words ({words:.2f})."
    )


def _floats(numbers: Any) -> tuple[float, ...]:
    return tuple(np.asarray(numbers, np.float64).tolist())


@contextmanager
def fitting() -> Iterator[None]:
    """Turn off convergence warnings and use one thread, which makes small fits 20 times faster."""
    from threadpoolctl import threadpool_limits

    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore")
        yield
