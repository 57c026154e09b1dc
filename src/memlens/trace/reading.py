"""States read as distributions: their top tokens, and how one token stands in each.

All states of a trace are scored in one product, since a few rows cost as much as reading the whole output embedding.
This module knows a lens and states, not where the states come from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memlens.errors import ModelError
from memlens.models.memory_model import MemoryModel
from memlens.trace.result import Token, TokenShare
from memlens.values.blocks import thread_pool
from memlens.values.rows import Ends, FloatArray, Softmax, find_ends, read_softmax


class TokenTexts:
    """The text of every token that was asked for, each looked up once."""

    def __init__(self, model: MemoryModel) -> None:
        self._read: Callable[[int], str] = model.tokenizer.token_text
        self._known: dict[int, Token] = {}

    def __call__(self, token: int) -> str:
        return self.token(token).text

    def token(self, token: int) -> Token:
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = Token(token, self._read(token))
        return found

    def tokens(self, ids: list[int]) -> tuple[Token, ...]:
        return tuple(map(self.token, ids))


@dataclass(frozen=True, eq=False)
class Readings:
    """The distributions of n states."""

    scores: NDArray[np.float32]  # [n, vocabulary], soft-capped where the model does that
    ends: Ends
    softmax: Softmax

    def top(self, row: int) -> int:
        return int(self.ends.top[row, 0])

    def shares(self, row: int, texts: TokenTexts) -> tuple[TokenShare, ...]:
        p = self._p(row, self.ends.top_scores[row])
        ids = self.ends.top[row].tolist()
        return tuple(TokenShare(token, texts(token), float(one)) for token, one in zip(ids, p, strict=True))

    def p(self, row: int, token: int) -> float:
        return float(self._p(row, self.scores[row, token : token + 1])[0])

    def _p(self, row: int, scores: FloatArray) -> NDArray[np.float64]:
        above = scores.astype(np.float64) - self.softmax.highest[row]
        probabilities: NDArray[np.float64] = np.exp(above) / self.softmax.total[row]
        return probabilities

    def rank(self, row: int, token: int) -> int:
        """1 + tokens with a strictly higher score."""
        return 1 + int((self.scores[row] > self.scores[row, token]).sum())


def read_states(model: MemoryModel, states: Tensor, top: int) -> Readings:
    """The distributions of states [n, d], with the top tokens of each."""
    logits = model.lens.capped(model.lens.state_logits(states))
    scores = logits.to("cpu", torch.float32).contiguous().numpy()
    if not np.isfinite(scores).all():
        raise ModelError(
            f"a state of {model.name} has scores that are NaN or infinite; a coefficient or value is too large, "
            "or the dtype too small: try float32"
        )
    with thread_pool() as pool:
        ends = find_ends(scores, min(top, scores.shape[1]), pool)
        return Readings(scores, ends, read_softmax(scores, ends, np.full(len(scores), -1), pool))


def log_probabilities(model: MemoryModel, states: Tensor) -> Tensor:
    """log p [n, vocabulary] in float64, for states [n, d]: what is compared before and after a change."""
    logits = model.lens.capped(model.lens.state_logits(states)).cpu().double()
    if not torch.isfinite(logits).all():
        raise ModelError(
            f"a state of {model.name} has scores that are NaN or infinite; a coefficient or value is too large, "
            "or the dtype too small: try float32"
        )
    return torch.log_softmax(logits, dim=-1)


def divergence(before: Tensor, after: Tensor) -> Tensor:
    """KL(before || after) in nats, [n], of log-probabilities [n, vocabulary]; never below 0."""
    terms = before.exp() * (before - after)
    return terms.sum(-1).clamp_min(0)
