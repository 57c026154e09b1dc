"""Pairs of a task that a tiny model does, because its own preferences are the answers."""

import random

import torch

from memlens.circuits.task import Pair
from memlens.models.memory_model import MemoryModel


def last_logits(model: MemoryModel, ids: list[int]) -> torch.Tensor:
    return model.lens.state_logits(model.run_body(torch.tensor([ids]))[0, -1:])[0]


def make_pairs(model: MemoryModel, count: int = 10, length: int = 4) -> list[Pair]:
    """Return pairs of prompts, each with the letter that it favors most over the other prompt."""
    letters, draw = "cdfgklmpwy", random.Random(0)
    ids = {letter: model.tokenizer.encode([letter])[0].ids for letter in letters}
    assert all(len(tokens) == 1 for tokens in ids.values())
    pairs: list[Pair] = []
    while len(pairs) < count:
        clean, patch = ("".join(draw.choices(letters, k=length)) for _ in range(2))
        clean_ids, patch_ids = (model.tokenizer.encode([text])[0].ids for text in (clean, patch))
        if len(clean_ids) != length or len(patch_ids) != length:
            continue
        logits = last_logits(model, clean_ids)
        difference = logits - last_logits(model, patch_ids)
        ranked = sorted(letters, key=lambda letter: float(difference[ids[letter][0]]))
        if logits[ids[ranked[-1]][0]] > logits[ids[ranked[0]][0]]:
            pairs.append(Pair(clean, patch, ranked[-1], ranked[0]))
    return pairs
