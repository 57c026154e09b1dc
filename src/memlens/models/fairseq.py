"""The paper's model, a fairseq checkpoint with adaptive input and softmax, as a MemoryModel; fairseq is not needed.

A folder with model.pt and dict.txt is read. Tokens are whole words: four special ones, then line k of dict.txt is token
k + 4; words that are not in the file are `<unk>`. The lens is the adaptive softmax itself: its scores are
log-probabilities over all words, for states and for values, since there is no final norm and no bias.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memlens.errors import ModelError, UnknownName
from memlens.memory import EncodedText
from memlens.models.fairseq_checkpoint import Settings, build_network, read_checkpoint, read_shape
from memlens.models.fairseq_network import ACTIVATIONS, AdaptiveBlock, AdaptiveTransformer, Shape
from memlens.models.groups import LinearGroup, MemoryLayer
from memlens.models.lens import Lens, Norm, at_least_float32
from memlens.models.memory_model import MemoryModel, fingerprint_of
from memlens.models.tokenizer import Tokenizer

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
START, PADDING, END, UNKNOWN = range(4)
_WORD = re.compile(r"\S+")
_OVERWRITE = " #fairseq:overwrite"  # behind a word that is meant to take the place of an earlier one


class WordTokenizer(Tokenizer):
    """The words of one dictionary."""

    def __init__(self, words: Sequence[str], bos: int = END) -> None:
        """`words`: all of them by id, the special ones first; of equal ones the last is used."""
        self._words = list(words)
        self._ids = {word: token for token, word in enumerate(self._words)}
        # padding is a place that attention would skip, never a word of a text
        self._ids[SPECIAL[PADDING]] = UNKNOWN
        self.bos = bos
        self.adds_bos = True

    @property
    def size(self) -> int:
        return len(self._words)

    def encode(self, texts: Sequence[str]) -> list[EncodedText]:
        encoded = []
        for text in texts:
            words = list(_WORD.finditer(text))
            ids = [self._ids.get(match[0], UNKNOWN) for match in words]
            encoded.append(EncodedText(ids, [match.end() for match in words]))
        return encoded

    def token_text(self, token: int) -> str:
        """The word, without the space that stands before it in a text."""
        if token < 0:
            raise UnknownName(f"token {token} does not exist: tokens count from 0")
        return self._words[token] if token < self.size else f"<no token {token}>"

    def id_of(self, text: str) -> int:
        """The word's id, white space around it left aside; UnknownName where the dictionary does not hold it."""
        words = text.split()
        if len(words) != 1:
            split = " + ".join(repr(word) for word in words) or "no word at all"
            raise UnknownName(f"{text!r} is not one word but {split}; this model's tokens are whole words")
        if words[0] == SPECIAL[PADDING]:
            return PADDING
        if words[0] not in self._ids:
            raise UnknownName(f"{words[0]!r} is not in this model's dictionary, which would read it as <unk>")
        return self._ids[words[0]]

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(self.token_text(token) for token in tokens)

    def save(self, folder: Path) -> None:
        raise ModelError(f"a dictionary of whole words cannot be saved into {folder}; keep the checkpoint's dict.txt")

    def serialized(self) -> str:
        return json.dumps({"words": self._words, "memlens": {"bos": self.bos, "adds_bos": self.adds_bos}})


def read_dictionary(path: Path) -> list[str]:
    """All words by id, the special ones first."""
    try:
        lines = path.read_text(encoding="utf-8-sig").rstrip("\n").split("\n")
    except (OSError, UnicodeError) as error:
        raise ModelError(f"{path} cannot be read as UTF-8 text; get the checkpoint again") from error
    words = list(SPECIAL)
    seen = set(words)
    for number, line in enumerate(lines, start=1):
        entry = line.rstrip()
        is_overwriting = entry.endswith(_OVERWRITE)
        word, space, count = entry.removesuffix(_OVERWRITE).rpartition(" ")
        if not space or not word or not (count.isascii() and count.isdigit()):
            raise ModelError(f"{path}, line {number}: not a word, a space and a count; get the checkpoint again")
        if word in seen and not is_overwriting:
            raise ModelError(f"{path}, line {number}: {word!r} stands there twice; get the checkpoint again")
        seen.add(word)
        words.append(word)
    return words


FAMILY = "fairseq-adaptive"


def load_fairseq(folder: Path, device: torch.device, dtype: torch.dtype, *, name: str, source: str) -> "AdaptiveModel":
    """The model of a folder with model.pt and dict.txt."""
    words = read_dictionary(folder / "dict.txt")
    settings, tensors = read_checkpoint(folder / "model.pt", name)
    shape = read_shape(settings, len(words), name)
    network = build_network(settings, tensors, shape, dtype, name).to(device)
    tokenizer = WordTokenizer(words, bos=START if settings.get("add_bos_token") else END)
    return AdaptiveModel(network, shape, tokenizer, name=name, source=source, context=_context(settings, name))


class AdaptiveModel(MemoryModel):
    """An AdaptiveTransformer with its words."""

    def __init__(
        self,
        network: AdaptiveTransformer,
        shape: Shape,
        tokenizer: WordTokenizer,
        *,
        name: str,
        source: str,
        context: int | None,
    ) -> None:
        super().__init__(
            name=name,
            source=source,
            family=FAMILY,
            network=network,
            layers=[_memory_layer(layer, block, shape.activation) for layer, block in enumerate(network.blocks)],
            lens=AdaptiveLens(network),
            tokenizer=tokenizer,
            context=context,
        )
        self._transformer = network
        self.shape = shape

    def _run_body(self, tokens: Tensor) -> Tensor:
        return self._transformer.body(tokens)

    def _logits(self, tokens: Tensor) -> Tensor:
        """Log-probabilities: an adaptive softmax has no scores that could be compared before they are normalised."""
        log_probabilities: Tensor = self._transformer(tokens)
        return log_probabilities

    def fingerprint(self) -> str:
        return fingerprint_of(str(self.shape), self._tokenizer, self.network)


class AdaptiveLens(Lens):
    """The adaptive softmax, exact over all words. Every score is a log-probability, so softmax of the scores is p.

    Scaling a value can change the order of words in different bands, and scores of parts do not add up to the score of
    their sum; within a band they do, up to a constant: `embedding` holds those directions.
    """

    def __init__(self, network: AdaptiveTransformer) -> None:
        nothing = [None] * len(network.blocks)
        super().__init__(output=network.output, input_embedding=network.input, final_norm=None, post_norms=nothing)

    @property
    def vocabulary(self) -> int:
        return int(self._output.ends[-1])

    @property
    def embedding(self) -> Tensor:
        """Each word's direction, [vocabulary, d], projections multiplied in; computed at each call."""
        with torch.no_grad():
            return at_least_float32(self._output.table())

    @property
    def logit_is(self) -> str:
        return "the word's score with the score of its band's class, before both are normalised"

    def logit_rows(self, tokens: Tensor) -> Tensor:
        """[n, d]: times a state, log p of each word [n] but for the normalisers of the head and of the word's band.

        With the class's row in it, for without it the share within the band could rise while p falls.
        """
        with torch.no_grad():
            return at_least_float32(self._output.rows(tokens))

    @property
    def bias(self) -> None:
        return None

    @property
    def input_embedding(self) -> Tensor:
        """Each word's vector, [vocabulary, d], projections multiplied in, not scaled; computed at each call."""
        with torch.no_grad():
            return at_least_float32(self._input_embedding.table())

    @property
    def tied(self) -> bool:
        return self._output.words is self._input_embedding.words[0].weight

    def folded_scores(self, vectors: Tensor, out: Tensor | None = None) -> Tensor:
        """Log-probabilities [n, vocabulary] of values [n, d], each read as the last state would be; `out` is unused."""
        with torch.no_grad():
            scores: Tensor = self._output(vectors)
            return scores

    def state_logits(self, states: Tensor, gradients: bool = False) -> Tensor:
        """Log-probabilities of what the model would predict from states [..., d]."""
        with torch.set_grad_enabled(gradients):
            scores: Tensor = self._output(states.to(self._output.words.dtype))
            return scores


def _memory_layer(number: int, block: Any, activation: str) -> MemoryLayer:
    assert isinstance(block, AdaptiveBlock)
    group = LinearGroup(
        activation=activation,
        activate=ACTIVATIONS[activation],
        key_projection=block.keys,
        down=block.values,
    )
    norm = Norm(block.memory_norm, "layer")
    return MemoryLayer.of(
        number=number, block=block, groups=[group], outputs=(block.values,), input_norm=norm, post_norm=None
    )


def _context(settings: Settings, name: str) -> int | None:
    """The longest input that the checkpoint was made for; sinusoids themselves know no end."""
    longest = settings.get("max_target_positions") or settings.get("tokens_per_sample")
    if longest is None:
        return None
    if not isinstance(longest, int) or longest < 1:
        raise ModelError(f"{name}: max_target_positions is {longest!r}, not a whole number from 1")
    return longest
