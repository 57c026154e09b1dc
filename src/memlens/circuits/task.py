"""The circuit of a task: the memories that make a model prefer the right answer, measured on held-out pairs.

A task is a list of pairs. A pair is a clean prompt and a patch prompt with the same number of tokens, and one token as
the answer of each prompt. The metric is logit(clean answer) - logit(patch answer) at the last position of the clean
prompt.

1. Split the pairs into training and held-out pairs.
2. Score every memory on the training pairs. The score is the change of its coefficient from the patch prompt to the
   clean prompt, times the gradient of the metric with respect to the coefficient, summed over positions. The methods
   differ in the gradient. `integrated` (default) takes the mean gradient along the line from the input of the patch
   prompt to the input of the clean prompt. `relevance` takes the gradient in the frozen network of the clean prompt,
   where half of a gated memory is attributed to each of its factors (RelP). `patching` (attribution patching) takes the
   gradient at the clean prompt. The score of `ablation` is the mean gradient of the metric with respect to a mask that
   moves all memories together from their means (see step 3) to their own coefficients. The scores of `ablation` sum to
   m(all) - m(none), the denominator of the faithfulness, and `ablation` also finds memories that both prompts need.
3. Rank memories by the absolute score. For each size k, keep the first k memories and set all other memories to their
   means over the patch prompts of the training pairs, at each position.
4. With `refine`, learn a mask over the 2% of memories with the largest absolute scores. A coefficient m becomes
   mean + mask (m - mean). Gradient descent minimizes the sum of three parts: the squared error of the metric if all
   other memories have their means, the squared difference from the metric without any memory if the mask is ablated and
   all other memories are kept, and a cost per memory. Errors are relative to the difference that all memories make.
   Memories with a mask above 0.5 are then ranked first.
5. Measure the faithfulness F = (m(C) - m(none)) / (m(all) - m(none)) of a circuit C on held-out pairs, where m(S) is
   the mean metric if only the memories in S are kept. The complement is the faithfulness of all memories outside of the
   circuit. Random sets contain the same number of memories of each layer as the circuit.

References: Marks et al. 2024, "Sparse feature circuits"; Hanna et al. 2024, EAP-IG; MIB, where the area under the curve
is called CPR.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from memlens.circuits.frozen import check_conservation, frozen_pass
from memlens.circuits.graph import check_length
from memlens.errors import FilesError, SettingError, UnknownName
from memlens.files import read_limited
from memlens.memory import MemoryId
from memlens.models.blocks import with_first_input
from memlens.models.groups import MemoryGroup
from memlens.models.lens import to_float64
from memlens.models.memory_model import MemoryModel
from memlens.progress import Progress, no_progress
from memlens.settings import TaskSettings, split_options
from memlens.tracer.intervention import Edit, Intervention
from memlens.tracer.prompt import Source, open_model, read_prompt, read_token

_FILE_LIMIT = 64 << 20  # bytes
_NAMES = ("clean_prefix", "patch_prefix", "clean_answer", "patch_answer")
_LEAST_PAIRS = 8
_LEAST_ACCURACY = 0.6  # minimum share of pairs in which the model prefers the clean answer
_RESAMPLES = 1000
_BATCH_TOKENS = 1024
_CANDIDATES, _LEAST_CANDIDATES = 0.02, 50  # share of memories for which a mask is learned, and their minimum number
_MASK_STEPS, _MASK_RATE = 60, 0.2
_MASK_COST = 5e-4  # cost of a memory: 100 memories cost as much as a squared relative error of 0.05
_MASK_TOKENS = 128  # tokens per step
FAITHFUL = (0.9, 1.1)
_SHARE_WITHOUT_FAITHFUL = 0.01  # share of memories in the circuit if no size is faithful
SHARES = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


@dataclass(frozen=True)
class Pair:
    """Two prompts that differ in the fact that the task tests, each with its answer."""

    clean_prefix: str
    patch_prefix: str
    clean_answer: str
    patch_answer: str


def read_pairs(path: str | Path) -> list[Pair]:
    """Read pairs from a .jsonl, .json or .csv file.

    The columns are clean_prefix, patch_prefix, clean_answer and patch_answer.

    Raises:
        FilesError: The file cannot be read.
        SettingError: A row lacks a column, or a field is not text.
    """
    path = Path(path)
    text = _read_text(path)
    pairs = []
    for number, row in enumerate(_rows(path, text), 1):
        fields = [row.get(name) if isinstance(row, dict) else None for name in _NAMES]
        for name, field in zip(_NAMES, fields, strict=True):
            if not isinstance(field, str) or not field:
                raise SettingError(f"{path}, row {number}: '{name}' is missing; each row needs {', '.join(_NAMES)}")
        pairs.append(Pair(*fields))  # type: ignore[arg-type]
    return pairs


def _read_text(path: Path) -> str:
    try:
        return read_limited(path, _FILE_LIMIT).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FilesError(f"{path} is not UTF-8 text ({error}); save it as UTF-8") from error


def _rows(path: Path, text: str) -> Iterator[Any]:
    try:
        if path.suffix == ".csv":
            yield from csv.DictReader(text.splitlines())
        elif text.lstrip().startswith("["):
            yield from json.loads(text)
        else:
            yield from (json.loads(line) for line in text.splitlines() if line.strip())
    except (ValueError, csv.Error) as error:
        raise FilesError(f"{path} is neither JSON, JSON Lines nor CSV ({error})") from error


@dataclass(frozen=True)
class CurvePoint:
    """Faithfulness and complement of the first `size` memories on held-out pairs, with 95% intervals."""

    size: int
    share: float
    faithfulness: float
    low: float
    high: float
    complement: float
    complement_low: float
    complement_high: float
    random: float  # mean faithfulness of random sets


@dataclass(frozen=True)
class TaskCircuit:
    """The circuit of a task: ranked memories, and the faithfulness by size."""

    pairs: int
    held_out: int
    accuracy: float  # share of all pairs with a positive metric
    metric: float  # mean metric on held-out pairs with all memories
    ablated: float  # mean metric on held-out pairs with every memory at its mean over patch prompts
    method: str
    scores: dict[MemoryId, float]  # sorted by absolute score, largest first
    curve: tuple[CurvePoint, ...]
    smallest: CurvePoint | None  # the smallest size with a faithfulness between 0.9 and 1.1
    area: float  # area under the curve of faithfulness against the share of memories from 0 to 1 (CPR)
    means: dict[MemoryId, float]  # memories of the circuit -> mean over patch prompts and positions after the first

    @property
    def memories(self) -> list[MemoryId]:
        """The memories of the smallest faithful circuit, or about 1% of all memories if no size is faithful."""
        return list(self.means)

    def ablation(self) -> Intervention:
        """Return an intervention that sets the memories of the circuit to their means over patch prompts."""
        edits = (Edit((memory,), coefficient=float(f"{mean:.6g}")) for memory, mean in self.means.items())
        return Intervention(tuple(edits))

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {
            **{
                name: getattr(self, name)
                for name in ("pairs", "held_out", "accuracy", "metric", "ablated", "method", "area")
            },
            "smallest": None if self.smallest is None else vars(self.smallest),
            "curve": [vars(point) for point in self.curve],
            "scores": {str(memory): self.scores[memory] for memory in self.memories},
        }


@dataclass(frozen=True, eq=False)
class _Batch:
    """Tokens of pairs that have the same length."""

    clean: Tensor  # [n, pos]
    patch: Tensor  # [n, pos]
    answers: Tensor  # [n, 2]: clean answer, patch answer

    def metric(self, logits: Tensor) -> Tensor:
        """Return the metric [n] from logits [n, vocabulary] at the last position."""
        answers = logits.gather(1, self.answers)
        return answers[:, 0] - answers[:, 1]


def task_circuit(
    model: Source,
    pairs: Sequence[Pair] | str | Path,
    *,
    held_out: Sequence[Pair] | str | Path | None = None,
    progress: Progress = no_progress,
    **options: Any,
) -> TaskCircuit:
    """Find the memories on which a task depends, and measure their faithfulness on held-out pairs.

    Args:
        model: A model or an index.
        pairs: Pairs, or a file that `read_pairs` reads.
        held_out: Pairs for measuring the circuit, or a file. Default: a part of the pairs.
        progress: Called with the number of finished pairs and evaluated sizes.
        **options: Fields of TaskSettings.

    Returns:
        The ranked memories, the faithfulness by size, and the smallest faithful circuit.

    Raises:
        FilesError: A file cannot be read.
        SettingError: Prompts of a pair differ in length, an answer is not one token, there are too few pairs, or the
            model does not do the task.

    Example:
        >>> result = memlens.task_circuit(model, pairs, steps=1, random_sets=1)
        >>> len(result.memories) == len(result.ablation().edits)
        True
    """
    (task_options,) = split_options("circuit", options, TaskSettings)
    settings = TaskSettings(**task_options)
    loaded, _ = open_model(model)
    training = _encode_pairs(loaded, pairs, "pair")
    if held_out is not None:
        measured = _encode_pairs(loaded, held_out, "held-out pair")
    else:
        order = np.random.default_rng(settings.seed).permutation(len(training)).tolist()
        count = max(2, round(settings.test * len(training)))
        training, measured = [training[i] for i in order[count:]], [training[i] for i in order[:count]]
    train, test = _batches(loaded, training), _batches(loaded, measured)
    accuracy = _check_ability(loaded, [*test, *train])
    means = _mean_coefficients(loaded, train)
    points = [(step + 0.5) / settings.steps for step in range(settings.steps)]
    scorers: dict[str, Callable[[MemoryModel, _Batch], dict[int, Tensor]]] = {
        "ablation": partial(_ablation_scores, means=means, points=points),
        "integrated": partial(_integrated_scores, points=points),
        "patching": partial(_integrated_scores, points=[1.0]),
        "relevance": _relevance_scores,
    }
    by_layer = _mean_scores(loaded, train, scorers[settings.method], progress)
    scores = torch.cat([amount.cpu() for amount in by_layer.values()])
    ranking = torch.argsort(scores.abs(), descending=True, stable=True)
    if settings.refine:
        count = max(min(_LEAST_CANDIDATES, len(scores)), round(_CANDIDATES * len(scores)))
        mask = _learn_mask(loaded, train, ranking[:count], means, progress)
        ranking[:count] = ranking[:count][torch.argsort(mask <= 0.5, stable=True)]  # kept memories first, by score
    held = _HeldOut(loaded, test, means, settings.seed)
    curve, smallest = _measure_sizes(held, ranking, settings, progress)
    names = [loaded.names.name(layer, number) for layer, mean in means.items() for number in range(mean.shape[1])]
    ranked = ranking[: curve[-1].size].tolist()
    size = (smallest or min(curve, key=lambda point: abs(point.share - _SHARE_WITHOUT_FAITHFUL))).size
    # leave out the first token: it has no context, and some memories have large coefficients only there
    averages = torch.cat([to_float64(mean[1:]).mean(0).cpu() for mean in means.values()])
    return TaskCircuit(
        pairs=len(training) + len(measured),
        held_out=len(measured),
        accuracy=accuracy,
        metric=float(held.everything.mean()),
        ablated=float(held.nothing.mean()),
        method=settings.method,
        scores={names[number]: float(scores[number]) for number in ranked},
        curve=curve,
        smallest=smallest,
        area=_area(curve),
        means={names[number]: float(averages[number]) for number in ranked[:size]},
    )


_Encoded = tuple[list[int], list[int], list[int]]  # tokens of the clean prompt, the patch prompt and both answers


def _encode_pairs(model: MemoryModel, pairs: Sequence[Pair] | str | Path, name: str) -> list[_Encoded]:
    """Return the tokens of all pairs, given as records or as a file. Raises SettingError if there are too few."""
    rows = read_pairs(pairs) if isinstance(pairs, str | Path) else pairs
    if len(rows) < _LEAST_PAIRS:
        raise SettingError(f"{len(rows)} {name}s are too few; give at least {_LEAST_PAIRS}")
    return [_encode(model, pair, f"{name} {number}") for number, pair in enumerate(rows, 1)]


def _encode(model: MemoryModel, pair: Pair, name: str) -> _Encoded:
    """Return the tokens of both prompts, BOS included, and of both answers."""
    clean, patch = (read_prompt(model, text).fed()[0].tolist() for text in (pair.clean_prefix, pair.patch_prefix))
    if len(clean) != len(patch):
        raise SettingError(
            f"{name}: the clean prompt has {len(clean)} tokens and the patch prompt {len(patch)}; "
            "both need the same number"
        )
    check_length(len(clean), f"{name}: the clean prompt")
    answers = []
    for answer in (pair.clean_answer, pair.patch_answer):
        try:
            answers.append(read_token(model, answer))
        except UnknownName as error:
            raise SettingError(f"{name}: the answer {error}") from error
    if answers[0] == answers[1]:
        raise SettingError(f"{name}: both answers are {pair.clean_answer!r}; they must differ")
    return clean, patch, answers


def _batches(model: MemoryModel, encoded: Sequence[_Encoded]) -> list[_Batch]:
    """Group pairs by length, with at most _BATCH_TOKENS tokens at a time."""
    by_length: dict[int, list[_Encoded]] = defaultdict(list)
    for row in encoded:
        by_length[len(row[0])].append(row)
    batches = []
    for length, rows in sorted(by_length.items()):
        size = max(1, _BATCH_TOKENS // length)
        for first in range(0, len(rows), size):
            clean, patch, answers = zip(*rows[first : first + size], strict=True)
            tensors = (torch.tensor(part, device=model.device) for part in (clean, patch, answers))
            batches.append(_Batch(*tensors))
    return batches


def _check_ability(model: MemoryModel, batches: Sequence[_Batch]) -> float:
    """Return the share of pairs with a positive metric. Raises SettingError if the model cannot do the task."""
    metrics = torch.cat([batch.metric(_last_logits(model, batch.clean)) for batch in batches])
    accuracy = int((metrics > 0).sum()) / len(metrics)
    if accuracy < _LEAST_ACCURACY or float(metrics.mean()) <= 0:
        raise SettingError(
            f"{model.name} prefers the clean answer in {accuracy:.0%} of {len(metrics)} pairs, so it cannot do this "
            f"task; a circuit needs at least {_LEAST_ACCURACY:.0%}"
        )
    return accuracy


def _last_logits(model: MemoryModel, tokens: Tensor, gradients: bool = False) -> Tensor:
    """Return the logits [n, vocabulary] after the last token."""
    return model.lens.state_logits(model.run_body(tokens, gradients)[:, -1], gradients)


def _mean_coefficients(model: MemoryModel, batches: Sequence[_Batch]) -> dict[int, Tensor]:
    """Return the mean coefficients over patch prompts at every position, layer -> [longest prompt, memories]."""
    longest = max(batch.patch.shape[1] for batch in batches)
    sums: dict[int, Tensor] = {}
    counts = torch.zeros(longest, 1, dtype=torch.float64)
    for batch in batches:
        length = batch.patch.shape[1]
        counts[:length] += len(batch.patch)
        with model.record(states=False) as recording:
            model.run_body(batch.patch)
        for layer, m in recording.coefficients.items():
            total = sums.setdefault(layer, torch.zeros(longest, m.shape[2], dtype=torch.float64))
            total[:length] += to_float64(m).sum(0).cpu()
    return {layer: (total / counts).to(model.device, model.dtype) for layer, total in sums.items()}


def _at_positions(means: Tensor, m: Tensor, group: MemoryGroup) -> Tensor:
    """Return the means [pos, size] for coefficients [n, pos, size]. Positions without means use the last means."""
    rows = torch.arange(m.shape[1], device=means.device).clamp(max=len(means) - 1)
    return means[rows][:, group.columns].to(m.dtype)


def _mean_scores(
    model: MemoryModel,
    batches: Sequence[_Batch],
    score: Callable[[MemoryModel, _Batch], dict[int, Tensor]],
    progress: Progress,
) -> dict[int, Tensor]:
    """Return the mean score of every memory over training pairs, layer -> [memories]."""
    sums: dict[int, Tensor] = {}
    total, done = sum(len(batch.clean) for batch in batches), 0
    for batch in batches:
        progress("scores", done, total)
        for layer, amount in score(model, batch).items():
            sums[layer] = sums.get(layer, torch.zeros_like(amount)) + amount
        done += len(batch.clean)
    progress("scores", total, total)
    return {layer: amount / total for layer, amount in sums.items()}


def _integrated_scores(model: MemoryModel, batch: _Batch, *, points: Sequence[float]) -> dict[int, Tensor]:
    """Return mean gradients times coefficient changes, summed over pairs, layer -> [memories].

    Gradients are taken at `points` on the line from the patch input (0) to the clean input (1).
    """
    inputs = [_first_inputs(model, tokens) for tokens in (batch.patch, batch.clean)]
    changes = _changes(model, batch)
    gradients = {layer: torch.zeros_like(change) for layer, change in changes.items()}
    for at in points:
        states = inputs[0] + at * (inputs[1] - inputs[0])
        for layer, gradient in _gradients(model, batch, states).items():
            gradients[layer] += gradient / len(points)
    return {layer: to_float64((gradients[layer] * change).sum((0, 1))).cpu() for layer, change in changes.items()}


def _changes(model: MemoryModel, batch: _Batch) -> dict[int, Tensor]:
    """Return the coefficients of the clean prompts minus those of the patch prompts, layer -> [n, pos, memories]."""
    changes: dict[int, Tensor] = {}
    for tokens, sign in ((batch.patch, -1), (batch.clean, 1)):
        with model.record(states=False) as recording:
            model.run_body(tokens)
        for layer, m in recording.coefficients.items():
            changes[layer] = changes.get(layer, torch.zeros_like(m)) + sign * m
    return changes


def _first_inputs(model: MemoryModel, tokens: Tensor) -> Tensor:
    with model.record([0], coefficients=False) as recording:
        model.run_to(0, tokens)
    assert recording.embedding is not None
    return recording.embedding.to(model.dtype)


def _gradients(model: MemoryModel, batch: _Batch, states: Tensor) -> dict[int, Tensor]:
    """Return the gradient of the summed metric with respect to coefficients, layer -> [n, pos, memories].

    `states` [n, pos, d] replace the input of the first block.
    """
    used: dict[int, list[Tensor]] = defaultdict(list)

    def keep(m: Tensor, _group: MemoryGroup, layer: int) -> Tensor:
        # adding a leaf makes the tensor part of the graph, even if no earlier tensor requires gradients
        kept = m + torch.zeros((), dtype=m.dtype, device=m.device, requires_grad=True)
        used[layer].append(kept)
        return kept

    def replace_input(_module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return with_first_input(arguments, named, states)

    edits = {layer: partial(keep, layer=layer) for layer in range(len(model.layers))}
    with model.layers[0].block.register_forward_pre_hook(replace_input, with_kwargs=True), model.edit(edits):
        metric = batch.metric(_last_logits(model, batch.clean, gradients=True)).sum()
    flat = [tensor for tensors in used.values() for tensor in tensors]
    gradients = iter(torch.autograd.grad(metric, flat, allow_unused=True, materialize_grads=True))
    return {layer: torch.cat([next(gradients) for _ in tensors], 2) for layer, tensors in used.items()}


def _relevance_scores(model: MemoryModel, batch: _Batch) -> dict[int, Tensor]:
    """Return the scores of method `relevance`, summed over pairs: the relevance of the coefficient changes."""
    changes = _changes(model, batch)
    sums = {layer: torch.zeros(change.shape[2], dtype=torch.float64) for layer, change in changes.items()}
    for row, (tokens, (answer, other)) in enumerate(zip(batch.clean, batch.answers.tolist(), strict=True)):
        target = partial(_difference, answer=answer, other=other)
        with frozen_pass(model, tokens[None], target, gate="half") as frozen:
            gradients = frozen.gradients([frozen.target])
            check_conservation(model, frozen, gradients)
        for layer, change in changes.items():
            sums[layer] += to_float64((change[row] * gradients.coefficients[layer]).sum(0)).cpu()
    return sums


def _difference(logits: Tensor, answer: int, other: int) -> Tensor:
    return logits[answer] - logits[other]


def _ablation_scores(
    model: MemoryModel, batch: _Batch, *, means: dict[int, Tensor], points: Sequence[float]
) -> dict[int, Tensor]:
    """Return the mean gradient of the metric at `points` of the mask, summed over pairs, layer -> [memories]."""
    sizes = [mean.shape[1] for mean in means.values()]
    scores = torch.zeros(sum(sizes), dtype=torch.float64)
    for point in points:
        mask = torch.full((sum(sizes),), point, dtype=model.dtype, requires_grad=True)
        metric = _masked_metric(model, batch, mask, means, gradients=True).sum()
        scores += torch.autograd.grad(metric, mask)[0].double() / len(points)
    return dict(zip(means, torch.split(scores, sizes), strict=True))


def _learn_mask(
    model: MemoryModel, batches: Sequence[_Batch], candidates: Tensor, means: dict[int, Tensor], progress: Progress
) -> Tensor:
    """Return a mask from 0 to 1 for the candidates, learned as in step 4. Candidates are numbered over all layers."""
    logits = torch.full((len(candidates),), 1.0, dtype=model.dtype, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=_MASK_RATE)
    parts = _split(batches, _MASK_TOKENS)
    size = sum(mean.shape[1] for mean in means.values())
    whole = [_masked_metric(model, batch, torch.ones(size), means) for batch in parts]
    none = [_masked_metric(model, batch, torch.zeros(size), means) for batch in parts]
    for step in range(_MASK_STEPS):
        progress("mask", step, _MASK_STEPS)
        mask = torch.sigmoid(logits)
        part = step % len(parts)
        _, gradient = _mask_objective(model, parts[part], whole[part], none[part], candidates, mask.detach(), means)
        optimizer.zero_grad()
        mask.backward(gradient)
        optimizer.step()
    progress("mask", _MASK_STEPS, _MASK_STEPS)
    return torch.sigmoid(logits).detach()


def _split(batches: Sequence[_Batch], tokens: int) -> list[_Batch]:
    """Cut batches into smaller batches of at most `tokens` tokens."""
    parts = []
    for batch in batches:
        size = max(1, tokens // batch.clean.shape[1])
        pieces = (part.split(size) for part in (batch.clean, batch.patch, batch.answers))
        parts += [_Batch(*piece) for piece in zip(*pieces, strict=True)]
    return parts


def _mask_objective(
    model: MemoryModel,
    batch: _Batch,
    everything: Tensor,
    nothing: Tensor,
    candidates: Tensor,
    mask: Tensor,
    means: dict[int, Tensor],
) -> tuple[float, Tensor]:
    """Return the value and the gradient of the objective of step 4."""
    scale = (everything - nothing).square().mean()
    value, gradient = _MASK_COST * float(mask.sum()), torch.full_like(mask, _MASK_COST)
    size = sum(mean.shape[1] for mean in means.values())
    for rest, target, sign in ((0.0, everything, 1.0), (1.0, nothing, -1.0)):
        whole = torch.full((size,), rest, dtype=model.dtype)
        whole[candidates] = rest + sign * mask
        leaf = whole.to(model.device).requires_grad_()
        metric = _masked_metric(model, batch, leaf, means, gradients=True)
        error = (metric - target).square().mean() / scale
        value += float(error.detach())
        gradient += sign * torch.autograd.grad(error, leaf)[0].cpu()[candidates]
    return value, gradient


def _masked_metric(
    model: MemoryModel, batch: _Batch, mask: Tensor, means: dict[int, Tensor], gradients: bool = False
) -> Tensor:
    """Return the metric [n] with every memory between its mean (mask 0) and its own coefficient (mask 1).

    The mask [memories] covers the memories of all layers, in order.
    """

    def change(m: Tensor, group: MemoryGroup, layer: int, part: Tensor) -> Tensor:
        return torch.lerp(_at_positions(means[layer], m, group), m, part[group.columns])

    parts = torch.split(mask.to(model.device, model.dtype), [mean.shape[1] for mean in means.values()])
    with model.edit({layer: partial(change, layer=layer, part=part) for layer, part in zip(means, parts, strict=True)}):
        return batch.metric(_last_logits(model, batch.clean, gradients))


class _HeldOut:
    """The metric on held-out pairs if some memories are kept and all other memories have their means."""

    def __init__(self, model: MemoryModel, batches: Sequence[_Batch], means: dict[int, Tensor], seed: int) -> None:
        self.model, self.batches, self.means = model, batches, means
        self.sizes = [mean.shape[1] for mean in means.values()]
        self.everything, self.nothing = self.metrics(torch.arange(sum(self.sizes))), self.metrics(torch.arange(0))
        self.resamples = np.random.default_rng(seed).integers(0, len(self.nothing), (_RESAMPLES, len(self.nothing)))

    def metrics(self, kept: Tensor) -> Tensor:
        """Return the metric of every pair. `kept` holds the numbers of memories, counted over all layers."""
        mask = torch.zeros(sum(self.sizes))
        mask[kept] = 1
        metrics = [_masked_metric(self.model, batch, mask, self.means) for batch in self.batches]
        return to_float64(torch.cat(metrics)).cpu()

    def faithfulness(self, kept: Tensor) -> tuple[float, float, float]:
        """Return the faithfulness of a set of memories and its 95% interval from a percentile bootstrap over pairs."""
        parts = [metrics.numpy() for metrics in (self.metrics(kept), self.everything, self.nothing)]
        part, whole, none = (metrics[self.resamples].mean(1) for metrics in parts)
        low, high = np.quantile((part - none) / (whole - none), (0.025, 0.975))
        part, whole, none = (metrics.mean() for metrics in parts)
        return float((part - none) / (whole - none)), float(low), float(high)

    def random_set(self, memories: Tensor, draw: np.random.Generator) -> Tensor:
        """Return a random set with as many memories of each layer as `memories`."""
        starts = np.cumsum([0, *self.sizes])
        counts = np.histogram(memories.numpy(), bins=starts)[0]
        parts = [
            start + draw.choice(size, count, replace=False)
            for start, size, count in zip(starts, self.sizes, counts, strict=False)
        ]
        return torch.from_numpy(np.concatenate(parts))


def _measure_sizes(
    held: _HeldOut, ranking: Tensor, settings: TaskSettings, progress: Progress
) -> tuple[tuple[CurvePoint, ...], CurvePoint | None]:
    """Return the curve of faithfulness by size, and its point at the smallest faithful size, if there is one."""
    draw = np.random.default_rng(settings.seed)

    @cache
    def first(size: int) -> tuple[float, float, float]:
        return held.faithfulness(ranking[:size])

    @cache
    def measure(size: int) -> CurvePoint:
        at_random = [held.faithfulness(held.random_set(ranking[:size], draw))[0] for _ in range(settings.random_sets)]
        complement = held.faithfulness(ranking[size:])
        return CurvePoint(size, size / len(ranking), *first(size), *complement, float(np.mean(at_random)))

    sizes = sorted({max(1, round(share * len(ranking))) for share in SHARES})
    points = []
    for done, size in enumerate(sizes):
        progress("sizes", done, len(sizes))
        points.append(measure(size))
    best = _smallest_faithful(lambda size: first(size)[0], sizes)
    smallest = None if best is None else measure(best)
    progress("sizes", len(sizes), len(sizes))
    return tuple(sorted({*points, *([smallest] if smallest else [])}, key=lambda point: point.size)), smallest


def _smallest_faithful(faithfulness: Callable[[int], float], sizes: Sequence[int]) -> int | None:
    """Return the smallest size whose faithfulness is in FAITHFUL, found by bisection between two sizes."""
    low, high = FAITHFUL
    for below, size in zip([0, *sizes], sizes, strict=False):
        if low <= faithfulness(size) <= high:
            best = size
            while best - below > max(1, best // 20):
                middle = (below + best) // 2
                if low <= faithfulness(middle) <= high:
                    best = middle
                else:
                    below = middle
            return best
    return None


def _area(curve: Sequence[CurvePoint]) -> float:
    """Return the area under the curve of faithfulness by share of memories, from (0, 0) to (1, 1)."""
    shares = [0.0, *(point.share for point in curve), 1.0]
    values = [0.0, *(point.faithfulness for point in curve), 1.0]
    return float(np.trapezoid(values, shares))
