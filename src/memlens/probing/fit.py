"""Fit probes with scikit-learn: rank columns by mean difference, fit a regularized linear model, and score it.

1. Standardize each column on the training part.
2. Rank columns by the difference between the mean of a class and the mean of all other texts, in standard deviations.
   With several classes, a column is ranked by its largest difference. With numeric labels, it is ranked by its
   correlation.
3. Choose the regularization strength on a held-out fifth of the training part: standardize, rank and fit on the other
   four fifths, and use the strength that gives the held-out labels the highest likelihood.
4. Fit a logistic regression (ridge regression for numeric labels) on the first k columns of the whole training part.
5. Score this model on the test part: the area under the ROC curve for two classes, accuracy for more classes, Pearson's
   correlation for numeric labels.

The best fit has the fewest columns among the fits within one standard error of the highest held-out likelihood. The
chance level is the score of the best fit when labels are permuted within the training part and within the test part.

Ranking by mean difference, and k = 1, 2, 4 ... 512, follow Gurnee et al. 2023 (https://arxiv.org/abs/2305.01610) and
Kantamneni et al. 2025 (https://arxiv.org/abs/2502.16681).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlens.probing.labels import LabeledTexts
from memlens.stats import Estimate, correlation_estimate, generator, roc_estimate, wilson

STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # values of scikit-learn's C for columns of variance 1
WORD_STRENGTHS = (1e-1, 1.0, 1e1, 1e2, 1e3)  # values of C for rows of length 1
HELD = 0.2  # share of the training part that is held out
_NUMBERS_AT_ONCE = 1 << 24  # maximum number of float64 activations in RAM
MEASURES = {"binary": "AUC", "classes": "accuracy", "number": "correlation"}


@dataclass(frozen=True, eq=False)
class Split:
    """Labeled texts, split into a training and a test part."""

    labels: LabeledTexts
    train: NDArray[np.int64]
    test: NDArray[np.int64]
    seed: int

    @property
    def kind(self) -> str:
        return "number" if not self.labels.classes else "binary" if self.labels.is_binary else "classes"

    @property
    def y(self) -> NDArray[Any]:
        """The labels of the training part."""
        return self.labels.y[self.train]

    def permuted(self, part: int = 0) -> "Split":
        """Return the same split with permuted labels.

        Labels are permuted within each part, so each part keeps its number of texts of each class. The test labels must
        be permuted as well. Otherwise, if the direction of largest variance separates the classes, a probe would score
        close to 0 or close to 1, depending on the permuted training labels.
        """
        random, y = generator(self.seed, "probe chance", part), self.labels.y.copy()
        for rows in (self.train, self.test):
            y[rows] = random.permutation(y[rows])
        return replace(self, labels=replace(self.labels, y=y))

    def held_out(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Divide the training part into rows to fit on and rows that are held out to choose the strength."""
        from sklearn.model_selection import train_test_split

        stratify = None if self.kind == "number" else self.y
        size = max(round(HELD * len(self.train)), len(self.labels.classes))
        places = np.arange(len(self.train))
        fitted, held = train_test_split(places, test_size=size, stratify=stratify, random_state=self.seed)
        return fitted, held


@dataclass(frozen=True, eq=False)
class Fit:
    """A fitted probe on selected columns."""

    columns: NDArray[np.int64]  # [k]: column numbers, best first
    weights: NDArray[np.float64]  # [1 or classes, k]: weights of standardized columns
    intercepts: NDArray[np.float64]  # [1 or classes]
    strength: float
    held: float  # mean log likelihood of held-out labels; for numbers, the negative mean squared error
    held_error: float  # standard error of `held`
    score: Estimate  # score on the test part


@dataclass(frozen=True, eq=False)
class Columns:
    """The activations of all texts, which are standardized and converted to float64 only for fitting."""

    x: NDArray[np.float32]  # [texts, columns]
    mean: NDArray[np.float64]
    scale: NDArray[np.float64]  # standard deviations; 1 for a constant column

    @classmethod
    def of(cls, x: NDArray[np.float32], rows: NDArray[np.int64]) -> "Columns":
        """Compute the mean and scale of each column over `rows`, one block of columns at a time."""
        mean, variance = np.empty(x.shape[1]), np.empty(x.shape[1])
        for block in _blocks(len(rows), x.shape[1]):
            values = x[:, block][rows].astype(np.float64)
            mean[block], variance[block] = values.mean(0), values.var(0)
        rounding = len(rows) * np.finfo(np.float64).eps
        varies = variance > rounding * variance + (rounding * mean) ** 2  # the rule of scikit-learn's StandardScaler
        return cls(x, mean, np.where(varies, np.sqrt(variance), 1.0))

    def standardized(self, rows: NDArray[np.int64], columns: Any = slice(None)) -> NDArray[np.float64]:
        z: NDArray[np.float64] = (self.x[:, columns][rows] - self.mean[columns]) / self.scale[columns]
        return z

    def order(self, rows: NDArray[np.int64], y: NDArray[Any], classes: int) -> NDArray[np.int64]:
        """Return the columns sorted by the absolute value of `differences` in these rows, then by column number."""
        blocks = _blocks(len(rows), self.x.shape[1])
        gaps = np.concatenate([differences(self.standardized(rows, block), y, classes) for block in blocks])
        return np.argsort(-np.abs(gaps), kind="stable")


def _blocks(rows: int, columns: int) -> list[slice]:
    size = max(_NUMBERS_AT_ONCE // max(rows, 1), 1)
    return [slice(first, first + size) for first in range(0, columns, size)]


def differences(z: NDArray[np.float64], y: NDArray[Any], classes: int) -> NDArray[np.float64]:
    """Return the mean difference [columns] of standardized columns z [rows, columns].

    With two classes, the difference is the mean of the second class minus the mean of the first. With several classes,
    it is the signed difference between a class and all other texts for the class with the largest absolute difference.
    With numeric labels (0 classes), it is the correlation.
    """
    if not classes:
        spread = y.std()
        difference: NDArray[np.float64] = z.T @ (y - y.mean()) / (len(y) * (spread if spread > 0 else 1.0))
        return difference
    sums = np.stack([z[y == place].sum(0) for place in range(classes)])
    counts = np.bincount(y, minlength=classes)[:, None]
    gaps = sums / counts - (sums.sum(0) - sums) / (len(y) - counts)
    if classes == 2:
        return np.asarray(gaps[1])
    return np.asarray(np.take_along_axis(gaps, np.abs(gaps).argmax(0)[None], 0)[0])


def fit_sparse(columns: Columns, split: Split, ks: Sequence[int]) -> dict[int, Fit]:
    """Return a fit for each k.

    To choose the strength, columns are ranked and standardized without the held-out fifth. Otherwise, the held-out
    labels would influence the ranking, and fits with more columns would appear better.
    """
    classes, train, width = len(split.labels.classes), split.train, columns.x.shape[1]
    fitted, held = split.held_out()
    without = Columns.of(columns.x, train[fitted])
    order, order_without = (
        columns.order(train, split.y, classes),
        without.order(train[fitted], split.y[fitted], classes),
    )
    fits = {}
    for k in sorted({min(k, width) for k in ks}):
        selected, first = order[:k], order_without[:k]
        inner = without.standardized(train[fitted], first), without.standardized(train[held], first)
        outer = columns.standardized(train, selected), columns.standardized(split.test, selected)
        fits[k] = _fit(inner, outer, selected, split, STRENGTHS)
    return fits


def fit_dense(columns: Columns, split: Split) -> Fit:
    """Return a fit on all columns."""
    train, width = split.train, columns.x.shape[1]
    fitted, held = split.held_out()
    without = Columns.of(columns.x, train[fitted])
    inner = without.standardized(train[fitted]), without.standardized(train[held])
    outer = columns.standardized(train), columns.standardized(split.test)
    return _fit(inner, outer, np.arange(width), split, STRENGTHS)


def fit_words(split: Split) -> Fit:
    """Return a fit on a bag of words, the TF-IDF of the words in the training part."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    def weigh(learned: NDArray[np.int64], read: NDArray[np.int64]) -> tuple[Any, Any]:
        words = TfidfVectorizer(token_pattern=r"\w+|[^\w\s]")
        return words.fit_transform(texts[learned]), words.transform(texts[read])

    texts, train = np.array(split.labels.texts, object), split.train
    fitted, held = split.held_out()
    outer = weigh(train, split.test)
    columns = np.arange(outer[0].shape[1])
    return _fit(weigh(train[fitted], train[held]), outer, columns, split, WORD_STRENGTHS)


def _fit(
    inner: tuple[Any, Any],  # rows to fit on and held-out rows, to choose the strength
    outer: tuple[Any, Any],  # training rows and test rows
    columns: NDArray[np.int64],
    split: Split,
    strengths: Sequence[float],
) -> Fit:
    kind = split.kind
    fitted, held = split.held_out()
    likelihoods = [
        _likelihoods(_model(kind, c).fit(inner[0], split.y[fitted]), inner[1], split.y[held]) for c in strengths
    ]
    best = int(np.argmax([each.mean() for each in likelihoods]))  # ties go to the strongest regularization
    model = _model(kind, strengths[best]).fit(outer[0], split.y)
    estimate = score(kind, split.labels.y[split.test], _outputs(model, outer[1], kind))
    weights, intercepts = np.atleast_2d(model.coef_), np.atleast_1d(model.intercept_)
    error = float(likelihoods[best].std(ddof=1)) / sqrt(len(held)) if len(held) > 1 else 0.0
    return Fit(columns, weights, intercepts, strengths[best], float(likelihoods[best].mean()), error, estimate)


def _model(kind: str, strength: float) -> Any:
    from sklearn.linear_model import LogisticRegression, Ridge

    return Ridge(alpha=1 / strength) if kind == "number" else LogisticRegression(C=strength, max_iter=1000)


def _likelihoods(model: Any, x: Any, y: NDArray[Any]) -> NDArray[np.float64]:
    """Return the log likelihood of each label under a fitted model, or the negative squared error for numbers.

    Fits are compared by likelihood, because many fits classify all held-out texts correctly.
    """
    if not hasattr(model, "predict_proba"):
        return np.asarray(-((model.predict(x) - y) ** 2))
    likelihood = (model.predict_proba(x) * (y[:, None] == model.classes_)).sum(1)
    return np.asarray(np.log(np.maximum(likelihood, 1e-300)))


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
