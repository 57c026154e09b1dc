"""Held-out perplexity of an exported model and a bigram model, dead memories, and bits per byte.

    python training/evaluate.py --work DIR MODEL [--against OTHER ...]

Both models predict the same tokens of the same held-out sequences. The text is cut in two ways: into runs of sentences
of up to 128 tokens, and into single sentences, as memlens feeds a model.

Perplexities of models with different tokenizers cannot be compared, but bits per byte can. To measure them, MODEL and
the models of --against read the same text: sentences that every tokenizer can decode without loss, alone or in runs
that fit into 128 tokens of every model.
"""

import argparse
import json
import math
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from bigram import Bigram
from data import BOS_ID, Text, batch, epoch_plan
from model import IGNORED, validate
from transformers import AutoModelForCausalLM, AutoTokenizer

LONGEST = 128


class Reader:
    """A model with its tokenizer."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def encode(self, sentence: str) -> list[int] | None:
        """Return the tokens of a sentence, or None if decoding does not restore it."""
        ids = self.tokenizer(sentence, add_special_tokens=False)["input_ids"]
        return ids if self.tokenizer.decode(ids).strip() == sentence else None

    @torch.no_grad()
    def bits(self, pieces: list[list[int]]) -> float:
        """Return the total number of bits of all pieces, each after BOS."""
        nats = 0.0
        pieces = sorted(pieces, key=len)
        for start in range(0, len(pieces), 32):
            part = pieces[start : start + 32]
            longest = max(map(len, part))
            inputs = torch.full((len(part), longest), BOS_ID)
            targets = torch.full((len(part), longest), IGNORED)
            for row, ids in enumerate(part):
                inputs[row, 1 : len(ids)] = torch.tensor(ids[:-1])
                targets[row, : len(ids)] = torch.tensor(ids)
            # Padding comes last, so the mask is all ones. OPT derives positions from it.
            logits = self.model(inputs, attention_mask=torch.ones_like(inputs)).logits
            nats += torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
            ).item()
        return nats / math.log(2)


def bits_per_byte(readers: dict[str, Reader], articles: list[list[str]]) -> dict[str, dict]:
    """Return the bits per byte of every model on the same text, in runs and in single sentences."""
    pieces: dict[str, list[list[tuple]]] = {"runs": [], "sentences": []}
    left_out = 0
    for sentences in articles:
        run: list[tuple] = []
        for sentence in sentences:
            ids = [reader.encode(sentence) for reader in readers.values()]
            if any(one is None or len(one) >= LONGEST for one in ids):
                left_out += 1
                if run:
                    pieces["runs"].append(run)
                run = []
                continue
            pieces["sentences"].append([(sentence, ids)])
            if any(
                sum(len(other[1][place]) for other in run) + len(ids[place]) >= LONGEST for place in range(len(ids))
            ):
                pieces["runs"].append(run)
                run = []
            run.append((sentence, ids))
        if run:
            pieces["runs"].append(run)
    figures: dict[str, dict] = {"sentences_left_out": left_out}
    for name, cut in pieces.items():
        size = sum(len(" ".join(sentence for sentence, _ in run).encode()) for run in cut)
        figures[name] = {"pieces": len(cut), "bytes": size}
        for place, (model, reader) in enumerate(readers.items()):
            tokens = [list(chain.from_iterable(ids[place] for _, ids in run)) for run in cut]
            figures[name][model] = {
                "bits_per_byte": round(reader.bits(tokens) / size, 4),
                "tokens": sum(map(len, tokens)),
            }
    return figures


def dead_on(model, text: Text, tokens: int) -> list[float]:
    """Return the share of memories per layer that are inactive on the first `tokens` tokens, in single sentences."""
    sentences = int(np.searchsorted(text.sentence_starts, tokens))
    articles = int(np.searchsorted(text.article_starts, sentences)) + 1
    part = Text(text.tokens, text.sentence_starts, text.article_starts[:articles])
    plan = epoch_plan(part, LONGEST, 4096, 1.0, seed=0, epoch=0)
    return validate(model, (batch(part, spans) for spans in plan))[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="folder written by export.py")
    parser.add_argument("--work", type=Path, required=True, help="directory with train.npz, valid.npz and valid.jsonl")
    parser.add_argument("--against", type=Path, nargs="*", default=[], help="other models, for bits per byte")
    parser.add_argument(
        "--dead-tokens", type=int, default=800_000, help="training tokens on which dead memories are counted"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    reader = Reader(options.model)
    model = reader.model
    held_out, text = Text.load(options.work / "valid.npz"), Text.load(options.work / "train.npz")
    bigram = Bigram(text, model.config.vocab_size)

    figures: dict[str, dict] = {}
    for name, single in (("runs", 0.0), ("sentences", 1.0)):
        plan = epoch_plan(held_out, LONGEST, 4096, single, seed=0, epoch=0)
        batches = [batch(held_out, spans) for spans in plan]
        loss, dead = validate(model, batches)
        inputs, targets = (
            np.concatenate([part.flatten().numpy() for part in side]) for side in zip(*batches, strict=True)
        )
        asked = targets != IGNORED
        baseline = -bigram.log_probability(inputs[asked], targets[asked]).mean()
        figures[name] = {
            "tokens": int(asked.sum()),
            "perplexity": round(math.exp(loss), 2),
            "bigram_perplexity": round(math.exp(baseline), 2),
            "dead": round(sum(dead) / len(dead), 4),
            "dead_by_layer": [round(share, 4) for share in dead],
        }
        print(name, json.dumps(figures[name]), flush=True)
    readers = {str(options.model): reader} | {str(folder): Reader(folder) for folder in options.against}
    with (options.work / "valid.jsonl").open(encoding="utf-8") as lines:
        articles = [list(chain.from_iterable(json.loads(line)["paragraphs"])) for line in lines]
    figures["bits_per_byte"] = bits_per_byte(readers, articles)
    print("bits per byte", json.dumps(figures["bits_per_byte"]), flush=True)
    if options.dead_tokens:
        dead = dead_on(model, text, options.dead_tokens)
        figures["training_text"] = {
            "tokens": options.dead_tokens,
            "dead": round(sum(dead) / len(dead), 4),
            "dead_by_layer": [round(share, 4) for share in dead],
        }
        print("training text", json.dumps(figures["training_text"]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
