"""Fitting of probes with scikit-learn: columns ranked by mean difference, a regularized linear model, its score.

On the training part only: each column is centred and divided by its standard deviation; columns are ranked by the
difference of their means between a class and all others (the largest over classes; for numbers by the correlation);
the first k go into a logistic regression (ridge regression for numbers). Its strength of regularisation is the one that
makes a held-out fifth of the training part most likely when scaling, ranking and fit see the other four fifths only;
with it all is done again on the whole training part. The score on the test part is the area under the ROC curve for two
classes, the share that is right for several, and Pearson's correlation for numbers.

Ranking by mean difference, and k = 1, 2, 4 ... 512, follow Gurnee et al. 2023 (https://arxiv.org/abs/2305.01610) and
Kantamneni et al. 2025 (https://arxiv.org/abs/2502.16681).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlens.probing.labels import LabelledTexts
from memlens.stats import Estimate, correlation_estimate, generator, roc_estimate, wilson

STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # C of scikit-learn, for columns of variance 1
WORD_STRENGTHS = (1e-1, 1.0, 1e1, 1e2, 1e3)  # for rows of length 1
HELD = 0.2  # of the training part, to choose the strength by
_NUMBERS_AT_ONCE = 1 << 24  # of activations that are float64 at a time
MEASURES = {"binary": "AUC", "classes": "accuracy", "number": "correlation"}


@dataclass(frozen=True, eq=False)
class Division:
    """Labeled texts, split into a training and a test part."""

    labels: LabelledTexts
    train: NDArray[np.int64]
    test: NDArray[np.int64]
    seed: int

    @property
    def kind(self) -> str:
        return "number" if not self.labels.classes else "binary" if self.labels.is_binary else "classes"

    @property
    def y(self) -> NDArray[Any]:
        """[train]"""
        return self.labels.y[self.train]

    def shuffled_y(self, part: int = 0) -> NDArray[Any]:
        """Return the training labels in random order, for a chance level."""
        shuffled: NDArray[Any] = generator(self.seed, "probe chance", part).permutation(self.y)
        return shuffled

    def held_out(self, y: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Places in the training part to fit on, and to choose the strength on; `y` [train] are the labels in use."""
        from sklearn.model_selection import train_test_split

        stratify = None if self.kind == "number" else y
        size = max(round(HELD * len(self.train)), len(self.labels.classes))
        fitted, held = train_test_split(np.arange(len(y)), test_size=size, stratify=stratify, random_state=self.seed)
        return fitted, held


@dataclass(frozen=True, eq=False)
class Fit:
    """A fitted probe on selected columns."""

    columns: NDArray[np.int64]  # [k], which of the input, best ranked first
    weights: NDArray[np.float64]  # [1 or classes, k], for standardised columns
    intercepts: NDArray[np.float64]  # [1 or classes]
    strength: float
    held: float  # mean log likelihood (of numbers less the squared error) of the held-out fifth: fits are chosen by it
    score: Estimate  # on the test part


@dataclass(frozen=True, eq=False)
class Columns:
    """Activations of all texts as standardised columns, float64 only where they are fitted."""

    x: NDArray[np.float32]  # [texts, columns]
    mean: NDArray[np.float64]
    scale: NDArray[np.float64]  # 1 where a column never varies

    @classmethod
    def of(cls, x: NDArray[np.float32], rows: NDArray[np.int64]) -> "Columns":
        """Mean and scale are those of some rows, a block of columns at a time."""
        mean, variance = np.empty(x.shape[1]), np.empty(x.shape[1])
        for block in _blocks(len(rows), x.shape[1]):
            part = x[:, block][rows].astype(np.float64)
            mean[block], variance[block] = part.mean(0), part.var(0)
        rounding = len(rows) * np.finfo(np.float64).eps
        varies = variance > rounding * variance + (rounding * mean) ** 2  # as scikit-learn's StandardScaler has it
        return cls(x, mean, np.where(varies, np.sqrt(variance), 1.0))

    def standardized(self, rows: NDArray[np.int64], columns: Any = slice(None)) -> NDArray[np.float64]:
        z: NDArray[np.float64] = (self.x[:, columns][rows] - self.mean[columns]) / self.scale[columns]
        return z

    def order(self, rows: NDArray[np.int64], y: NDArray[Any], classes: int) -> NDArray[np.int64]:
        """Columns by the size of their difference in these rows, equal ones by number."""
        blocks = _blocks(len(rows), self.x.shape[1])
        apart = np.concatenate([differences(self.standardized(rows, block), y, classes) for block in blocks])
        return np.argsort(-np.abs(apart), kind="stable")


def _blocks(rows: int, columns: int) -> list[slice]:
    size = max(_NUMBERS_AT_ONCE // max(rows, 1), 1)
    return [slice(first, first + size) for first in range(0, columns, size)]


def differences(z: NDArray[np.float64], y: NDArray[Any], classes: int) -> NDArray[np.float64]:
    """[columns]: of each column the mean difference that is largest in size, in standard deviations.

    Of two classes it is the second's mean less the first's; of several a class's less that of all others; of numbers
    (0 classes) the correlation.
    """
    if not classes:
        spread = y.std()
        difference: NDArray[np.float64] = z.T @ (y - y.mean()) / (len(y) * (spread if spread > 0 else 1.0))
        return difference
    sums = np.stack([z[y == place].sum(0) for place in range(classes)])
    counts = np.bincount(y, minlength=classes)[:, None]
    apart = sums / counts - (sums.sum(0) - sums) / (len(y) - counts)
    if classes == 2:
        return np.asarray(apart[1])
    return np.asarray(np.take_along_axis(apart, np.abs(apart).argmax(0)[None], 0)[0])


def fit_sparse(columns: Columns, division: Division, ks: Sequence[int], y: NDArray[Any]) -> dict[int, Fit]:
    """A fit for each k; `y` [train] are the labels, or shuffled ones.

    The strength is chosen with columns ranked and scaled without the held-out fifth, which would else be told better
    the more columns its own labels had chosen.
    """
    classes, train, width = len(division.labels.classes), division.train, columns.x.shape[1]
    fitted, held = division.held_out(y)
    without = Columns.of(columns.x, train[fitted])
    order, order_without = columns.order(train, y, classes), without.order(train[fitted], y[fitted], classes)
    fits = {}
    for k in sorted({min(k, width) for k in ks}):
        chosen, first = order[:k], order_without[:k]
        inner = without.standardized(train[fitted], first), without.standardized(train[held], first)
        outer = columns.standardized(train, chosen), columns.standardized(division.test, chosen)
        fits[k] = _fit(inner, outer, chosen, division, y, STRENGTHS)
    return fits


def fit_dense(columns: Columns, division: Division, y: NDArray[Any]) -> Fit:
    """Return a fit on all columns."""
    train, width = division.train, columns.x.shape[1]
    fitted, held = division.held_out(y)
    without = Columns.of(columns.x, train[fitted])
    inner = without.standardized(train[fitted]), without.standardized(train[held])
    outer = columns.standardized(train), columns.standardized(division.test)
    return _fit(inner, outer, np.arange(width), division, y, STRENGTHS)


def fit_words(division: Division, y: NDArray[Any]) -> Fit:
    """A bag of words: term frequencies by inverse document frequency, of the words that are learnt from."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    def weighed(learnt: NDArray[np.int64], read: NDArray[np.int64]) -> tuple[Any, Any]:
        words = TfidfVectorizer(token_pattern=r"\w+|[^\w\s]")
        return words.fit_transform(texts[learnt]), words.transform(texts[read])

    texts, train = np.array(division.labels.texts, object), division.train
    fitted, held = division.held_out(y)
    outer = weighed(train, division.test)
    columns = np.arange(outer[0].shape[1])
    return _fit(weighed(train[fitted], train[held]), outer, columns, division, y, WORD_STRENGTHS)


def _fit(
    inner: tuple[Any, Any],  # what the strength is chosen by: rows to fit on, the held-out ones
    outer: tuple[Any, Any],  # all rows to learn from, rows to test on
    columns: NDArray[np.int64],
    division: Division,
    y: NDArray[Any],
    strengths: Sequence[float],
) -> Fit:
    kind = division.kind
    fitted, held = division.held_out(y)
    chosen = [_likelihood(_model(kind, c).fit(inner[0], y[fitted]), inner[1], y[held]) for c in strengths]
    strength = strengths[int(np.argmax(chosen))]  # of equals the strongest regularisation
    model = _model(kind, strength).fit(outer[0], y)
    estimate = score(kind, division.labels.y[division.test], _outputs(model, outer[1], kind))
    weights, intercepts = np.atleast_2d(model.coef_), np.atleast_1d(model.intercept_)
    return Fit(columns, weights, intercepts, strength, max(chosen), estimate)


def _model(kind: str, strength: float) -> Any:
    from sklearn.linear_model import LogisticRegression, Ridge

    return Ridge(alpha=1 / strength) if kind == "number" else LogisticRegression(C=strength, max_iter=1000)


def _likelihood(model: Any, x: Any, y: NDArray[Any]) -> float:
    """The mean log-likelihood of labels under a fitted model; of numbers, minus the mean squared error.

    It tells fits apart that all get the few held-out texts right, as a score does not.
    """
    if not hasattr(model, "predict_proba"):
        return -float(np.mean((model.predict(x) - y) ** 2))
    likelihood = (model.predict_proba(x) * (y[:, None] == model.classes_)).sum(1)
    return float(np.log(np.maximum(likelihood, 1e-300)).mean())


def _outputs(model: Any, x: Any, kind: str) -> NDArray[Any]:
    outputs: NDArray[Any] = model.decision_function(x) if kind == "binary" else model.predict(x)
    return outputs


def score(kind: str, y: NDArray[Any], outputs: NDArray[Any]) -> Estimate:
    """Return the score of a probe's outputs against the labels, with its confidence interval."""
    if kind == "binary":
        return roc_estimate(outputs[y == 1], outputs[y == 0])
    if kind == "number":
        return correlation_estimate(y, outputs)
    right = int((y == outputs).sum())
    return Estimate(right / len(y), *wilson(right, len(y)))
