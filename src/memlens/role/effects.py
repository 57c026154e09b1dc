"""Effects of roles: a group of memories is silenced, and what changes is compared with random groups of the same kind.

    entropy          the entropy of the output, by how much it changes
    token-frequency  the divergence of the output from the frequency of tokens, by how much it changes
    token            memories whose value pushes down the very token they fire on: the log of that token's probability

A random group has for each memory of the group another one of its layer that fires, drawn among those of nearest norm.
An effect appears where it is larger than in every random group, and the mean difference over prefixes surely above 0.
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
from memlens.models.memory_model import MemoryModel
from memlens.parallel import Progress, no_progress
from memlens.stats import generator, mean_interval

Group = list[tuple[int, int]]  # (layer, memory)
SAMPLE, CONTROLS, NEAREST, MOST = 200, 10, 20, 100
_BATCH = 16


@dataclass(frozen=True)
class RoleEffect:
    """What silencing the memories of a role does, beside random groups."""

    role: str
    measure: str
    memories: int
    prefixes: int
    change: float | None  # in the mean over prefixes, in nats
    random: tuple[float, ...]  # the same, of each random group
    difference: float | None  # of the change less that of all random groups
    low: float | None
    high: float | None
    appears: bool | None  # None where there are no such memories


@dataclass(frozen=True, eq=False)
class OwnTokens:
    """Prefixes of the corpus, each with the token it is asked about."""

    tokens: list[list[int]]
    own: NDArray[np.int64]


def role_effects(
    index: Index, model: MemoryModel, *, seed: int = 0, sample: int = SAMPLE, progress: Progress = no_progress
) -> list[RoleEffect]:
    """The effect of each role above that an index has; `sample`: how many prefixes."""
    drawn = _drawn_prefixes(index, sample, generator(seed, "role-effects"))
    counts = token_counts(index)[: model.vocabulary]
    unigram = torch.from_numpy(np.log((counts + 1) / (counts + 1).sum())).to(model.device)
    removing, triggers = _removing(index)
    plans = (
        ("entropy", "entropy of the output", _having(index, "entropy"), drawn, _entropy),
        ("token-frequency", "divergence from frequency", _having(index, "token-frequency"), drawn,
         partial(_divergence, unigram=unigram)),
        ("token", "log p of its own token", removing, triggers, _own),
    )  # fmt: skip
    found = []
    for done, (role, measure, group, prefixes, look) in enumerate(plans):
        progress("effects", done, len(plans))
        found.append(_effect(index, model, role, measure, group, prefixes, look, seed))
    progress("effects", len(plans), len(plans))
    return found


def _effect(
    index: Index, model: MemoryModel, role: str, measure: str, group: Group, prefixes: OwnTokens, look: Any, seed: int
) -> RoleEffect:
    if not group or not prefixes.tokens:
        return RoleEffect(role, measure, 0, 0, None, (), None, None, None, None)
    signed = role == "token"  # silencing it must raise its token, not just move it
    before = _looked(model, prefixes, look)
    changes = []
    for silenced in [group, *random_groups(index, group, generator(seed, f"role-{role}"))]:
        with silence(model, silenced):
            change = _looked(model, prefixes, look) - before
        changes.append(change if signed else np.abs(change))
    own, random = changes[0], np.stack(changes[1:])
    apart = own - random.mean(0)
    low, high = mean_interval(apart, generator(seed, f"role-{role}", 1))
    means = tuple(random.mean(1).tolist())
    appears = bool(low is not None and low > 0 and own.mean() > max(means))
    return RoleEffect(
        role, measure, len(group), len(own), float(own.mean()), means, float(apart.mean()), low, high, appears
    )


def random_groups(index: Index, group: Group, random: np.random.Generator, count: int = CONTROLS) -> Iterator[Group]:
    """Groups of the same size, layers and nearly the same norms, of memories that fire and are not in the group."""
    rows = index.arrays("SELECT layer, memory, norm, list_contains(roles, 'dead') AS dead FROM {roles}")
    taken = set(group)
    others: dict[int, tuple[NDArray[Any], NDArray[Any]]] = {}
    for layer in {layer for layer, _ in group}:
        fits = (rows["layer"] == layer) & ~np.asarray(rows["dead"], np.bool_)
        free = [place for place in np.flatnonzero(fits) if (layer, int(rows["memory"][place])) not in taken]
        others[layer] = rows["memory"][free], rows["norm"][free]
    norms = {(int(a), int(b)): float(c) for a, b, c in zip(rows["layer"], rows["memory"], rows["norm"], strict=True)}
    for _ in range(count):
        chosen: Group = []
        for layer, memory in group:
            memories, lengths = others[layer]
            near = memories[np.argsort(np.abs(lengths - norms[layer, memory]), kind="stable")[:NEAREST]]
            unused = [int(one) for one in near if (layer, int(one)) not in chosen] or near.tolist()
            if unused:  # a layer may hold nothing but the group
                chosen.append((layer, int(random.choice(unused))))
        yield chosen


@contextmanager
def silence(model: MemoryModel, group: Group) -> Iterator[None]:
    """Inside the `with` the memories have coefficient 0."""

    def change(m: Tensor, owner: MemoryGroup, numbers: Sequence[int]) -> Tensor:
        places = [number - owner.start for number in numbers if owner.start <= number < owner.start + owner.size]
        if not places:
            return m
        m = m.clone()
        m[..., places] = 0.0
        return m

    layers = {layer: [memory for own, memory in group if own == layer] for layer, _ in group}
    with model.edit({layer: partial(change, numbers=numbers) for layer, numbers in layers.items()}):
        yield


def _looked(model: MemoryModel, prefixes: OwnTokens, look: Any) -> NDArray[np.float64]:
    """[prefixes]: a measure of the output after each of them."""
    bos = [model.tokenizer.bos] if model.tokenizer.adds_bos else []
    parts = []
    for first in range(0, len(prefixes.tokens), _BATCH):
        own = [[*bos, *tokens] for tokens in prefixes.tokens[first : first + _BATCH]]
        longest = max(map(len, own))
        states = model.run_body(torch.tensor([ids + [ids[0]] * (longest - len(ids)) for ids in own]))
        last = states[torch.arange(len(own)), torch.tensor([len(ids) - 1 for ids in own])]
        logs = torch.log_softmax(model.lens.capped(model.lens.state_logits(last)).double(), dim=-1)
        parts.append(look(logs, torch.from_numpy(prefixes.own[first : first + _BATCH]).to(logs.device)))
    return torch.cat(parts).cpu().numpy()


def _entropy(logs: Tensor, _own: Tensor) -> Tensor:
    return -(logs.exp() * logs).sum(1)


def _divergence(logs: Tensor, _own: Tensor, unigram: Tensor) -> Tensor:
    return (logs.exp() * (logs - unigram)).sum(1)


def _own(logs: Tensor, own: Tensor) -> Tensor:
    return logs.gather(1, own[:, None])[:, 0]


def _having(index: Index, role: str) -> Group:
    query = "SELECT layer, memory FROM {roles} WHERE list_contains(roles, $1) ORDER BY layer, memory"
    return [(row["layer"], row["memory"]) for row in index.sql(query, [role])]


def _drawn_prefixes(index: Index, sample: int, random: np.random.Generator) -> OwnTokens:
    """One prefix of each of some sentences."""
    count = index.manifest.counts.sentences
    chosen = np.sort(random.choice(count, min(sample, count), replace=False)).tolist()
    sentences = [row["tokens"] for _, row in sorted(index.sentences(chosen).items()) if row["tokens"]]
    tokens = [own[: int(random.integers(len(own))) + 1] for own in sentences]
    return OwnTokens(tokens, np.array([own[-1] for own in tokens], np.int64))


def _removing(index: Index) -> tuple[Group, OwnTokens]:
    """Token memories with their own token at the bottom of their value, and the top trigger of each."""
    rows = index.sql(
        """SELECT r.layer, r.memory, r.token, c.tokens[:t.position + 1] AS tokens FROM {roles} r
           JOIN {values} v USING (layer, memory) JOIN {triggers} t USING (layer, memory)
           JOIN {corpus} c USING (sentence)
           WHERE list_contains(r.roles, 'token') AND list_contains(v.bottom_tokens, r.token)
                 AND t."end" = 'top' AND t.rank = 0 ORDER BY r.layer, r.memory LIMIT $1""",
        [MOST],
    )
    group = [(row["layer"], row["memory"]) for row in rows]
    return group, OwnTokens([row["tokens"] for row in rows], np.array([row["token"] for row in rows], np.int64))
