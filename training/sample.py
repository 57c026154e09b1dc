"""Write the bundled texts: a sample of the training text, and the held-out text.

    python training/sample.py --work DIR src/memlens/bundled/wikipedia [--tokens 500000]

Writes OUT/train.jsonl.gz and OUT/held-out.jsonl.gz with one article per line (title, and text with one sentence per
line), and OUT/SOURCES.txt with the address of each article. The text is from Wikipedia (CC BY-SA), and the histories of
the articles name the authors. Sentences that the tokenizer cannot decode without loss are left out. Training articles
are evenly spaced, so that all parts of the dump are represented.
"""

import argparse
import gzip
import json
from itertools import chain
from pathlib import Path
from urllib.parse import quote

from tokenize_text import split_point
from tokenizers import Tokenizer

Article = tuple[str, list[str]]
SAFE = "/:,()'!*"  # characters that Wikipedia does not escape in addresses
LONGEST = 127  # tokens of a sentence; the model has 128 positions, one of them for BOS


def select_sentences(tokenizer: Tokenizer, sentences: list[str]) -> tuple[list[str], int]:
    """Return the sentences that fit the model and can be decoded, and their number of tokens."""
    kept, tokens = [], 0
    for sentence, encoding in zip(sentences, tokenizer.encode_batch(sentences, add_special_tokens=False), strict=True):
        if len(encoding.ids) <= LONGEST and tokenizer.decode(encoding.ids).strip() == sentence:
            kept.append(sentence)
            tokens += len(encoding.ids)
    return kept, tokens


def write(folder: Path, name: str, articles: list[Article]) -> int:
    """Write the articles as compressed JSON Lines. Returns the size of the file."""
    lines = [
        json.dumps({"title": title, "text": "\n".join(sentences)}, ensure_ascii=False) for title, sentences in articles
    ]
    path = folder / f"{name}.jsonl.gz"
    path.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode(), 9, mtime=0))
    return path.stat().st_size


def write_sources(folder: Path, parts: dict[str, list[Article]]) -> None:
    """Write the address of every article."""
    lines = ["Articles of the English Wikipedia (dump of March 2006), whose histories name their authors:"]
    for name, articles in parts.items():
        lines += ["", name]
        lines += [f"https://en.wikipedia.org/wiki/{quote(title.replace(' ', '_'), safe=SAFE)}" for title, _ in articles]
    (folder / "SOURCES.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--work", type=Path, required=True, help="directory with articles.jsonl and tokenizer/")
    parser.add_argument("--tokens", type=int, default=500_000, help="tokens of training text")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(options.work / "tokenizer" / "tokenizer.json"))
    with (options.work / "articles.jsonl").open(encoding="utf-8") as lines:
        read = [json.loads(line) for line in lines]
    articles = [(article["title"], list(chain.from_iterable(article["paragraphs"]))) for article in read]
    split = split_point([sentences for _, sentences in articles])

    all_tokens = 13_336_245  # in the training text; determines the distance between articles
    step = max(1, int(all_tokens / options.tokens))
    chosen: list[Article] = []
    tokens = 0
    for offset in range(step):
        for title, sentences in articles[offset:split:step]:
            kept, count = select_sentences(tokenizer, sentences)
            if tokens < options.tokens and kept:
                chosen.append((title, kept))
                tokens += count
        if tokens >= options.tokens:
            break
    size = write(options.out, "train", chosen)
    print(f"train: {len(chosen)} articles, {sum(len(s) for _, s in chosen)} sentences, {tokens} tokens, {size} bytes")
    held_out, tokens = [], 0
    for title, sentences in articles[split:]:
        kept, count = select_sentences(tokenizer, sentences)
        if kept:
            held_out.append((title, kept))
            tokens += count
    size = write(options.out, "held-out", held_out)
    sentences = sum(len(kept) for _, kept in held_out)
    print(f"held out: {len(held_out)} articles, {sentences} sentences, {tokens} tokens, {size} bytes")
    write_sources(options.out, {"train": chosen, "held-out": held_out})


if __name__ == "__main__":
    main()
