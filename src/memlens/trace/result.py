"""What a trace found, as plain frozen data: tokens, memories, layers, and the parts of one logit.

Everything here can be printed, compared and written as JSON without the model. How it looks in a notebook is html.py's
matter; this module computes nothing but sums.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from memlens.memory import MemoryId

PLAIN_LOGIT = "the model's own logit"


@dataclass(frozen=True)
class Token:
    """A token with its text."""

    id: int
    text: str


@dataclass(frozen=True)
class TokenShare(Token):
    """A token and how likely it is in some distribution."""

    p: float


@dataclass(frozen=True)
class TracedMemory:
    """A memory that fired at the traced position.

    `promotes` and `demotes` are what it really did: where the coefficient is negative the value's ends are swapped.
    """

    memory: MemoryId
    coefficient: float
    effect: float  # what it added to the traced token's logit, the final norm's scale taken as it was
    size: float  # |m| * ||v||
    promotes: tuple[Token, ...]
    demotes: tuple[Token, ...]
    trigger: str | None = None  # the prefix that drives it furthest to this side, from the index
    patterns: tuple[str, ...] = ()  # what its top triggers have in common, from the index; none if it is negative here

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"memory": str(self.memory)}


@dataclass(frozen=True)
class LayerTrace:
    """What one layer did at the traced position. r, y and o are read as the model would read its last state."""

    layer: int
    residual: tuple[TokenShare, ...]  # top tokens of r
    ffn: tuple[TokenShare, ...]  # of y
    output: tuple[TokenShare, ...]  # of o
    p: float  # of the traced token in o
    case: str  # of Fig 11
    by_effect: tuple[TracedMemory, ...]  # largest |effect| first; none that did not fire
    by_size: tuple[TracedMemory, ...]  # largest |m| * ||v|| first
    attention: float  # what attention added to the traced token's logit, its biases included
    memories: float  # what all memories together added
    bias: float  # what the block's own biases added

    def to_json(self) -> dict[str, Any]:
        memories = {name: [one.to_json() for one in getattr(self, name)] for name in ("by_effect", "by_size")}
        return asdict(self) | memories


@dataclass(frozen=True)
class Trace:
    """One position of one prompt, and where the logit of one token at it came from."""

    model: str
    prompt: str
    prefix: tuple[Token, ...]  # the prompt's tokens up to the traced position
    position: int
    token: TokenShare  # the traced token, as likely as the model takes it to be
    rank: int  # 1 + tokens that are more likely
    settled: int  # the first layer from which top(o) stays what the model predicts
    embedding: float  # what the input embedding added to the logit
    constant: float  # biases of the final norm and of the output embedding
    layers: tuple[LayerTrace, ...]
    text: str = ""  # the prompt up to the traced position
    logit_is: str = PLAIN_LOGIT  # what is added up: not the same for every kind of output embedding

    @property
    def prediction(self) -> TokenShare:
        """What the model itself takes to be most likely."""
        return self.layers[-1].output[0]

    @property
    def parts(self) -> dict[str, float]:
        """Where the logit came from; sums to it."""
        return {
            "embedding": self.embedding,
            "attention": math.fsum(layer.attention for layer in self.layers),
            "memories": math.fsum(layer.memories for layer in self.layers),
            "block biases": math.fsum(layer.bias for layer in self.layers),
            "output biases": self.constant,
        }

    @property
    def logit(self) -> float:
        """What the parts add up to; `logit_is` says what that is.

        A plain model's own logit, before any soft-capping. Of an adaptive softmax, the word's score and, for a word of
        a rarer band, that of the band's class as well: log p but for the normalisers of the head and of the band.
        """
        return math.fsum(self.parts.values())

    @property
    def is_plain_logit(self) -> bool:
        return self.logit_is == PLAIN_LOGIT

    @property
    def logit_name(self) -> str:
        """One word for it: only what the model itself compares between all tokens is a logit."""
        return "logit" if self.logit_is.startswith(PLAIN_LOGIT) else "score"

    @property
    def memories(self) -> tuple[TracedMemory, ...]:
        """The memories of all layers that did most to the traced token's logit, largest |effect| first."""
        found = [memory for layer in self.layers for memory in layer.by_effect]
        return tuple(sorted(found, key=lambda one: (-abs(one.effect), one.memory)))

    def to_json(self) -> dict[str, Any]:
        """Plain data, for json.dumps."""
        return asdict(self) | {
            "prediction": asdict(self.prediction),
            "logit": self.logit,
            "logit_is": self.logit_is,
            "parts": self.parts,
            "layers": [layer.to_json() for layer in self.layers],
        }

    def __repr__(self) -> str:
        return (
            f"<Trace of {self.token.text!r} after {self.text[-30:]!r}: p {self.token.p:.3g}, logit {self.logit:.4g}, "
            f"prediction {self.prediction.text!r} settled in layer {self.settled}>"
        )

    def _repr_html_(self) -> str:
        from memlens.trace.html import trace_html

        return trace_html(self)
