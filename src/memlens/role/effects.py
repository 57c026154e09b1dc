"""Effects of roles: what changes if the memories of a role are silenced, compared with silencing random groups.

    entropy          absolute change of the entropy of the output
    token-frequency  absolute change of the divergence of the output from the frequency of tokens
    token            change of log p of the token on which a memory is active, if the memory's value demotes this token

In a random group, each memory is replaced by a memory of the same layer that is active on some prefix. Replacements are
drawn from the unused memories with the most similar norms. An effect appears if it is larger than in each of 20 random
groups (probability 1/21 without an effect) and the interval of the mean difference over prefixes lies above 0.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memlens.index.memory import token_counts
from memlens.index.reader import Index
from memlens.models.groups import MemoryGroup
from memlens.models.lens import to_float64
from memlens.models.memory_model import MemoryModel
from memlens.progress import Progress, no_progress
from memlens.role.table import RoleEffect
from memlens.stats import draw, generator, mean_interval

Group = list[tuple[int, int]]  # (layer, memory)
SAMPLE, CONTROLS, NEAREST, MOST = 200, 20, 20, 100
_BATCH = 16


@dataclass(frozen=True, eq=False)
class TargetPrefixes:
    """Prefixes of the corpus, each with the token whose probability is measured."""

    tokens: list[list[int]]
    targets: NDArray[np.int64]

    def where(self, mask: list[bool]) -> "TargetPrefixes":
        return TargetPrefixes(
            [tokens for tokens, keep in zip(self.tokens, mask, strict=True) if keep], self.targets[mask]
        )


def role_effects(
    index: Index, model: MemoryModel, *, seed: int = 0, sample: int = SAMPLE, progress: Progress = no_progress
) -> list[RoleEffect]:
    """Return the effects of the three roles entropy, token-frequency and token, measured on `sample` prefixes."""
    random_prefixes = _draw_prefixes(index, sample, generator(seed, "role-effects"))
    counts = token_counts(index)[: model.vocabulary]
    unigram = torch.from_numpy(np.log((counts + 1) / (counts + 1).sum())).to(model.device)
    suppressing, triggers = _find_suppressing(index, generator(seed, "role-removing"))
    plans = (
        ("entropy", "entropy of the output", _memories_with(index, "entropy"), random_prefixes, _entropy),
        ("token-frequency", "divergence from frequency", _memories_with(index, "token-frequency"), random_prefixes,
         partial(_divergence, unigram=unigram)),
        ("token", "log p of its own token", suppressing, triggers, _log_p_of_target),
    )  # fmt: skip
    effects = []
    for done, (role, measure, group, prefixes, read) in enumerate(plans):
        progress("effects", done, len(plans))
        effects.append(_effect(index, model, role, measure, group, prefixes, read, seed))
    progress("effects", len(plans), len(plans))
    return effects


def _effect(
    index: Index,
    model: MemoryModel,
    role: str,
    measure: str,
    group: Group,
    prefixes: TargetPrefixes,
    read: Any,
    seed: int,
) -> RoleEffect:
    random = generator(seed, f"role-{role}")
    others = UnusedMemories(index, group)
    compared = others.comparable(random)
    if not compared or not prefixes.tokens:
        return RoleEffect(role, measure, len(group), 0, None, None, None, (), None, None, None, None)
    groups = [compared, *(others.random_group(compared, random) for _ in range(CONTROLS))]
    is_signed = role == "token"  # silencing a memory must raise the probability of its token
    if is_signed:
        prefixes = prefixes.where([memory in compared for memory in group])
    before = _measure(model, prefixes, read)
    changes = []
    for silenced in groups:
        with silence(model, silenced):
            change = _measure(model, prefixes, read) - before
        changes.append(change if is_signed else np.abs(change))
    effect, chance = changes[0], np.stack(changes[1:])
    difference = effect - chance.mean(0)
    low, high = mean_interval(difference, generator(seed, f"role-{role}", 1))
    means = tuple(chance.mean(1).tolist())
    appears = bool(low is not None and low > 0 and effect.mean() > max(means))
    norm, *norms = map(others.norm, groups)
    return RoleEffect(
        role, measure, len(compared), len(effect), norm, float(np.mean(norms)), float(effect.mean()), means,
        float(difference.mean()), low, high, appears,
    )  # fmt: skip


class UnusedMemories:
    """The memories for random groups: active memories of the same layers that are not in the group."""

    def __init__(self, index: Index, group: Group) -> None:
        rows = index.arrays("SELECT layer, memory, norm, list_contains(roles, 'dead') AS dead FROM {roles}")
        layers, memories, norms = rows["layer"].tolist(), rows["memory"].tolist(), rows["norm"].tolist()
        self.group, members = group, set(group)
        self.norms = {(layer, memory): norm for layer, memory, norm in zip(layers, memories, norms, strict=True)}
        self.free: dict[int, list[int]] = {layer: [] for layer, _ in group}
        for layer, memory, dead in zip(layers, memories, rows["dead"].tolist(), strict=True):
            if layer in self.free and not dead and (layer, memory) not in members:
                self.free[layer].append(memory)

    def comparable(self, random: np.random.Generator) -> Group:
        """Return a random part of the group that has, in each layer, at most as many memories as there are unused."""
        comparable: Group = []
        for layer, free in sorted(self.free.items()):
            memories = np.array([memory for at, memory in self.group if at == layer])
            comparable += [(layer, int(memory)) for memory in draw(memories, len(free), random)]
        return comparable

    def random_group(self, group: Group, random: np.random.Generator) -> Group:
        """Replace each memory by a random one of the NEAREST unused memories of its layer, by similarity of norms."""
        norms = {layer: np.array([self.norms[layer, memory] for memory in free]) for layer, free in self.free.items()}
        drawn = list(group)
        for place in random.permutation(len(group)):  # random order, so that no memory always gets the first choice
            layer, memory = group[place]
            distances = np.abs(norms[layer] - self.norms[layer, memory])
            near = np.argsort(distances, kind="stable")[: min(NEAREST, int(np.isfinite(distances).sum()))]
            row = int(random.choice(near))
            norms[layer][row] = np.inf  # infinitely distant, so it is not drawn again
            drawn[place] = layer, self.free[layer][row]
        return drawn

    def norm(self, group: Group) -> float:
        return float(np.mean([self.norms[memory] for memory in group]))


@contextmanager
def silence(model: MemoryModel, group: Group) -> Iterator[None]:
    """Set the coefficients of these memories to 0 inside the `with` block."""

    def change(m: Tensor, owner: MemoryGroup, numbers: Sequence[int]) -> Tensor:
        places = [number - owner.start for number in numbers if owner.start <= number < owner.start + owner.size]
        if not places:
            return m
        m = m.clone()
        m[..., places] = 0.0
        return m

    layers = {layer: [memory for at, memory in group if at == layer] for layer, _ in group}
    with model.edit({layer: partial(change, numbers=numbers) for layer, numbers in layers.items()}):
        yield


def _measure(model: MemoryModel, prefixes: TargetPrefixes, read: Any) -> NDArray[np.float64]:
    """Return a measure of the output after each prefix. [prefixes]"""
    bos = [model.tokenizer.bos] if model.tokenizer.adds_bos else []
    results = np.empty(len(prefixes.tokens))
    order = np.argsort([len(tokens) for tokens in prefixes.tokens], kind="stable")  # batch texts of similar length
    for places in np.split(order, range(_BATCH, len(order), _BATCH)):
        texts = [[*bos, *prefixes.tokens[place]] for place in places]
        longest = max(map(len, texts))
        states = model.run_body(torch.tensor([ids + [ids[0]] * (longest - len(ids)) for ids in texts]))
        last = states[torch.arange(len(texts)), torch.tensor([len(ids) - 1 for ids in texts])]
        logs = torch.log_softmax(to_float64(model.lens.capped(model.lens.state_logits(last))), dim=-1)
        results[places] = read(logs, torch.from_numpy(prefixes.targets[places]).to(logs.device)).cpu().numpy()
    return results


def _entropy(logs: Tensor, _targets: Tensor) -> Tensor:
    return -(logs.exp() * logs).sum(1)


def _divergence(logs: Tensor, _targets: Tensor, unigram: Tensor) -> Tensor:
    return (logs.exp() * (logs - unigram)).sum(1)


def _log_p_of_target(logs: Tensor, tokens: Tensor) -> Tensor:
    return logs.gather(1, tokens[:, None])[:, 0]


def _memories_with(index: Index, role: str) -> Group:
    query = "SELECT layer, memory FROM {roles} WHERE list_contains(roles, $1) ORDER BY layer, memory"
    return [(row["layer"], row["memory"]) for row in index.sql(query, [role])]


def _draw_prefixes(index: Index, sample: int, random: np.random.Generator) -> TargetPrefixes:
    """Draw random sentences, and one prefix of each sentence."""
    count = index.manifest.counts.sentences
    numbers = np.sort(random.choice(count, min(sample, count), replace=False)).tolist()
    sentences = [row["tokens"] for _, row in sorted(index.sentences(numbers).items()) if row["tokens"]]
    tokens = [sentence[: int(random.integers(len(sentence))) + 1] for sentence in sentences]
    return TargetPrefixes(tokens, np.array([prefix[-1] for prefix in tokens], np.int64))


def _find_suppressing(index: Index, random: np.random.Generator) -> tuple[Group, TargetPrefixes]:
    """Return token memories whose value demotes their token, each with its best trigger that ends with this token.

    If there are more than MOST such memories, the result is a random sample of them.
    """
    rows = index.sql(
        """SELECT r.layer, r.memory, r.token, arg_min(c.tokens[:t.position + 1], t.rank) AS tokens FROM {roles} r
           JOIN {values} v USING (layer, memory) JOIN {triggers} t USING (layer, memory)
           JOIN {corpus} c USING (sentence)
           WHERE list_contains(r.roles, 'token') AND list_contains(v.bottom_tokens, r.token)
                 AND t."end" = 'top' AND c.tokens[t.position + 1] = r.token
           GROUP BY r.layer, r.memory, r.token ORDER BY r.layer, r.memory"""
    )
    sampled = [rows[place] for place in draw(np.arange(len(rows)), MOST, random)]
    group = [(row["layer"], row["memory"]) for row in sampled]
    targets = np.array([row["token"] for row in sampled], np.int64)
    return group, TargetPrefixes([row["tokens"] for row in sampled], targets)
