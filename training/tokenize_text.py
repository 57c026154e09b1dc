"""Train the byte-level BPE and encode the cleaned text.

    python training/tokenize_text.py --work DIR

reads DIR/articles.jsonl (see clean.py) and writes
  DIR/tokenizer/            the tokenizer, in the form transformers loads
  DIR/train.npz, valid.npz  tokens (uint16), where each sentence starts in them, where each article starts among
                            the sentences; the last 2% of the text is held out as valid
  DIR/valid.jsonl           the held-out articles as text, for whoever wants to read them
"""

import argparse
import json
from itertools import chain
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BOS = "<|endoftext|>"
VOCABULARY = 16384  # enough to keep common words whole; fits uint16
HELD_OUT = 0.02
POSITIONS = 128


def read_articles(path: Path) -> list[list[str]]:
    """The sentences of every article, paragraph breaks forgotten."""
    with path.open(encoding="utf-8") as lines:
        return [list(chain.from_iterable(json.loads(line)["paragraphs"])) for line in lines]


def split_point(articles: list[list[str]]) -> int:
    """Index of the first held-out article: those from there on hold the last 2% of the characters."""
    sizes = np.array([sum(map(len, sentences)) for sentences in articles])
    return int(np.searchsorted(np.cumsum(sizes), (1 - HELD_OUT) * sizes.sum())) + 1


def train_tokenizer(articles: list[list[str]]) -> Tokenizer:
    """Byte-level BPE as GPT-2 has it, but for two things.

    A space is put before a text, so that a word is the same token at the start of a sentence as in its midst; and the
    beginning of a text is marked with BOS, as the model has never seen a text without it.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chain.from_iterable(articles), trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(
                single=f"{BOS} $A",
                pair=f"{BOS} $A {BOS} $B",
                special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
            ),
        ]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, articles: list[list[str]], path: Path) -> dict[str, int]:
    """Write tokens (without BOS) and boundaries of articles to an .npz file; give back the counts."""
    sentences = list(chain.from_iterable(articles))
    ids = [encoding.ids for encoding in tokenizer.encode_batch(sentences, add_special_tokens=False)]
    starts = np.concatenate([[0], np.cumsum([len(sentence) for sentence in ids])])
    article_starts = np.concatenate([[0], np.cumsum([len(article) for article in articles])])
    tokens = np.fromiter(chain.from_iterable(ids), dtype=np.uint16, count=starts[-1])
    np.savez(path, tokens=tokens, sentence_starts=starts.astype(np.int64), article_starts=article_starts)
    return {"articles": len(articles), "sentences": len(sentences), "tokens": int(starts[-1])}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="directory that holds articles.jsonl")
    work = parser.parse_args().work
    articles = read_articles(work / "articles.jsonl")
    split = split_point(articles)
    tokenizer = train_tokenizer(articles[:split])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=BOS,
        pad_token=BOS,
        unk_token=BOS,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(work / "tokenizer")
    print("train", encode(tokenizer, articles[:split], work / "train.npz"))
    print("valid", encode(tokenizer, articles[split:], work / "valid.npz"))
    with (work / "articles.jsonl").open(encoding="utf-8") as lines:
        (work / "valid.jsonl").write_text("".join(list(lines)[split:]), encoding="utf-8")


if __name__ == "__main__":
    main()
