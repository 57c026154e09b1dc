"""SparseProbe: a fitted probe of one layer, which can be saved, applied to texts, and converted to an intervention."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np

from memlens.errors import FilesError, ModelError, SettingError
from memlens.files import is_sealed, read_json, refuse_output, write_sealed
from memlens.memory import MemoryId
from memlens.probing.labels import check_label
from memlens.stats import Estimate
from memlens.tracer.intervention import Edit, Intervention

if TYPE_CHECKING:
    from memlens.models.memory_model import MemoryModel

KIND = "memlens probe"
SCHEMA = 1
_BEGINNING = re.compile(rb'\{\n "at": "(last|mean|max)",\n "centre": [-+.0-9e]+,\n "classes": \[')


@dataclass(frozen=True)
class Prediction:
    """A probe's prediction for one text."""

    text: str
    label: str | float  # most likely class, or predicted number
    p: dict[str, float] | None  # probability of each class; None for numbers


@dataclass(frozen=True)
class SparseProbe:
    """A fitted probe: its memories with means, scales and weights. Applying it needs only the model.

    `memlens.probe` returns such a probe as `best`.

    Example:
        >>> texts = [f"The river runs {n}" for n in range(20)] + [f"A stone lies {n}" for n in range(20)]
        >>> best = memlens.probe(model, (texts, ["water"] * 20 + ["stone"] * 20), k="1", shuffles=0).best
        >>> best.save(folder.with_name("probe.json"))
        >>> saved = memlens.SparseProbe.load(folder.with_name("probe.json"))
        >>> len(saved.apply(model, ["The river"])), len(saved.steer("water").edits)
        (1, 1)
    """

    model: str
    fingerprint: str
    dtype: str
    at: Annotated[str, msgspec.Meta(pattern="^(last|mean|max)$")]
    max_length: Annotated[int, msgspec.Meta(gt=0)] | None
    layer: int
    memories: tuple[str, ...]
    classes: tuple[str, ...]  # class names; empty if labels are numbers
    mean: tuple[float, ...]  # mean coefficients over the training texts
    scale: tuple[float, ...]
    weights: tuple[tuple[float, ...], ...]  # [1 or classes][memories]
    intercepts: tuple[float, ...]
    typical: tuple[tuple[float, ...], ...]  # [classes or 1][memories]: class means, or changes per unit of a label
    centre: float  # mean of numeric labels; 0 for classes
    measure: str
    score: Estimate  # score on the test part with its interval

    def __post_init__(self) -> None:
        memories, classes = len(self.memories), len(self.classes)
        outputs = classes if classes > 2 else 1
        shapes = {
            "mean": (memories,), "scale": (memories,), "weights": (outputs, memories), "intercepts": (outputs,),
            "typical": (max(classes, 1), memories), "centre": (),
        }  # fmt: skip
        for name, shape in shapes.items():
            numbers = np.array(getattr(self, name), np.float64)
            if numbers.shape != shape or not np.isfinite(numbers).all():
                raise ValueError(f"`{name}` must be {shape} finite numbers")
        if any(MemoryId.parse(name).layer != self.layer for name in self.memories):
            raise ValueError("`memories` must all be in `layer`")
        if not all(self.scale):
            raise ValueError("`scale` must not be 0")

    def check(self, model: MemoryModel) -> None:
        """Raise ModelError if the probe was fitted on another model.

        Args:
            model: A loaded model.

        Raises:
            ModelError: The fingerprint of the model differs.
        """
        if model.fingerprint() != self.fingerprint:
            raise ModelError(
                f"the probe is for {self.model} in {self.dtype}, but {model.name} is a different model or has a "
                "different dtype (the fingerprint differs); use the probe with its own model"
            )

    def apply(self, model: MemoryModel, texts: Sequence[str]) -> list[Prediction]:
        """Predict the label of each text with the model that the probe was fitted on.

        Args:
            model: The loaded model.
            texts: The texts.

        Returns:
            One prediction per text.

        Raises:
            ModelError: The probe was fitted on another model.
        """
        from memlens.probing.activations import encode_texts, read_activations

        self.check(model)
        numbers = [model.names.number(MemoryId.parse(name)) for name in self.memories]
        encoded, _ = encode_texts(model, texts, self.max_length)
        ((_, m, _),) = read_activations(model, encoded, self.at, [self.layer])
        z = (m[:, numbers] - np.array(self.mean)) / np.array(self.scale)
        outputs = z @ np.array(self.weights).T + np.array(self.intercepts)  # [texts, 1 or classes]
        if not self.classes:
            return [Prediction(text, float(row[0]), None) for text, row in zip(texts, outputs, strict=True)]
        if len(self.classes) == 2:
            outputs = np.concatenate([np.zeros_like(outputs), outputs], 1)
        odds = np.exp(outputs - outputs.max(1, keepdims=True))
        return [
            Prediction(text, self.classes[int(row.argmax())], dict(zip(self.classes, row.tolist(), strict=True)))
            for text, row in zip(texts, odds / odds.sum(1, keepdims=True), strict=True)
        ]

    def steer(self, towards: str | float, strength: float = 1.0) -> Intervention:
        """Return an intervention that moves the model towards a label.

        The intervention sets each memory of the probe to its mean coefficient among the texts with the label. For
        numeric labels, it sets each coefficient to the value that a linear fit predicts for the label.

        Args:
            towards: The label.
            strength: Factor of the change. With 2, coefficients move twice as far from their mean over all texts.

        Returns:
            The intervention, bound to the model of the probe.

        Raises:
            SettingError: The strength is not finite, or the probe has no such label.
        """
        if not math.isfinite(strength):
            raise SettingError(f"the strength is {strength}; it must be a finite number")
        mean = np.array(self.mean)
        number = check_label(self.classes, towards)
        if self.classes:
            away = np.array(self.typical[int(number)]) - mean
        else:
            away = (number - self.centre) * np.array(self.typical[0])
        amounts = (mean + strength * away).tolist()
        edits = tuple(
            Edit(memories=(MemoryId.parse(name),), coefficient=amount or None)
            for name, amount in zip(self.memories, amounts, strict=True)
        )
        return Intervention(edits, self.model, self.fingerprint, self.dtype)

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write the probe to a file.

        Args:
            path: The file.
            force: Overwrite the file even if memlens did not write it.

        Raises:
            OutputError: The file exists and is not a probe.
        """
        refuse_output(Path(path), is_probe, force=force)
        write_sealed(Path(path), {"kind": KIND, "schema": SCHEMA, **asdict(self)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SparseProbe:
        """Read a probe that `save` wrote.

        Args:
            path: The file.

        Returns:
            The probe.

        Raises:
            SettingError: The file is not a probe, or was changed after it was written.
        """
        advice = "name a file written by `memlens probe --save`"
        try:
            content = read_json(Path(path), advice)
        except FilesError as error:
            raise SettingError(str(error)) from error
        if content.get("kind") != KIND or content.get("schema") != SCHEMA:
            raise SettingError(f"{path} is not a probe of this version of memlens; {advice}")
        if not is_sealed(content):
            raise SettingError(f"{path} was changed after it was written; {advice}")
        try:
            return msgspec.convert(content, cls)
        except msgspec.ValidationError as error:
            raise SettingError(f"{path} is not a valid probe ({error}); {advice}") from error


def is_probe(head: bytes) -> bool:
    """Return True if `head` is the beginning of a saved probe, whose keys are sorted."""
    return _BEGINNING.match(head) is not None
