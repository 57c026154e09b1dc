"""Train the byte-level BPE and encode the cleaned text.

    python training/tokenize_text.py --work DIR

reads DIR/articles.jsonl (see clean.py) and writes
  DIR/tokenizer/            the tokenizer, in the form transformers loads
  DIR/train.npz, valid.npz  tokens (uint16), where each sentence starts in them, where each article starts among
                            the sentences; the last 2% of the text is held out as valid
  DIR/counts.csv            how often every token occurs in the training text
  DIR/valid.jsonl           the held-out articles as text, for whoever wants to read them

Every token occurs at least 200 times in the training text, bytes among them: a token that is hardly seen keeps a long,
random embedding, which then wins argmaxes it has no business to win.
"""

import argparse
import json
from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BOS, UNKNOWN = "<|endoftext|>", "<unk>"
FIRST_VOCABULARY = 9200  # tokens of the BPE before any is dropped
VOCABULARY = 8192  # at most; enough to keep common words whole
SEEN = 200  # times at least, in the training text
HELD_OUT = 0.02
POSITIONS = 128
# What has no accent to strip but is near enough to something in ASCII.
NEAR = {
    "–": "-",
    "—": "-",
    "−": "-",
    "‘": "'",
    "’": "'",
    "“": '"',
    "”": '"',
    "…": "...",
    "×": "x",
    "ø": "o",
    "Ø": "O",
    "æ": "ae",
    "Æ": "Ae",
    "œ": "oe",
    "ß": "ss",
    "ł": "l",
    "Ł": "L",
    "ð": "d",
    "đ": "d",
    "þ": "th",
    "ı": "i",
}


def read_articles(path: Path) -> list[list[str]]:
    """The sentences of every article, paragraph breaks forgotten."""
    with path.open(encoding="utf-8") as lines:
        return [list(chain.from_iterable(json.loads(line)["paragraphs"])) for line in lines]


def split_point(articles: list[list[str]]) -> int:
    """Index of the first held-out article: those from there on hold the last 2% of the characters."""
    sizes = np.array([sum(map(len, sentences)) for sentences in articles])
    return int(np.searchsorted(np.cumsum(sizes), (1 - HELD_OUT) * sizes.sum())) + 1


def bare_tokenizer(vocabulary: dict[str, int] | None = None, merges: list[tuple[str, str]] | None = None) -> Tokenizer:
    """Byte-level BPE as GPT-2 has it, but for three things.

    A space is put before a text, so that a word is the same token at the start of a sentence as in its midst. Accents
    are stripped. A run of characters that cannot be written with the bytes of the vocabulary becomes <unk>, which
    the training text has too (Greek, Arabic, symbols).
    """
    if vocabulary is None:
        model = models.BPE(unk_token=UNKNOWN, fuse_unk=True)
    else:
        # ignore_merges: a whole word of the vocabulary is taken at once, even if no merges lead to it any more.
        model = models.BPE(vocabulary, merges, unk_token=UNKNOWN, fuse_unk=True, ignore_merges=True)
    tokenizer = Tokenizer(model)
    replacements = [normalizers.Replace(sign, near) for sign, near in NEAR.items()]
    tokenizer.normalizer = normalizers.Sequence([*replacements, normalizers.NFKD(), normalizers.StripAccents()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(BOS, special=True), AddedToken(UNKNOWN, special=True)])
    return tokenizer


def all_merges(pieces: list[str]) -> list[tuple[str, str]]:
    """Every way to put a token together from two others; the tokens of the earliest merges first."""
    known = set(pieces)
    return [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known
    ]


def from_pieces(pieces: list[str]) -> Tokenizer:
    """The tokenizer whose vocabulary is BOS, <unk> and the given tokens."""
    vocabulary = {piece: place for place, piece in enumerate([BOS, UNKNOWN, *pieces])}
    return bare_tokenizer(vocabulary, all_merges(pieces))


def occurrences(tokenizer: Tokenizer, words: dict[str, int]) -> np.ndarray:
    """The occurrences of each token in a text given as its words and their counts."""
    counts = np.zeros(tokenizer.get_vocab_size(), dtype=np.int64)
    for encoding, count in zip(
        tokenizer.encode_batch(list(words), add_special_tokens=False), words.values(), strict=True
    ):
        np.add.at(counts, encoding.ids, count)
    return counts


def words_of(articles: list[list[str]]) -> dict[str, int]:
    """The pieces of the pre-tokenizer, counted; without the space before, which encoding puts there again."""
    tokenizer, words = bare_tokenizer(), Counter()
    for sentence in chain.from_iterable(articles):
        pieces = tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(sentence))
        words.update(piece for piece, _ in pieces)
    return words


def train_tokenizer(articles: list[list[str]]) -> Tokenizer:
    """Train a BPE, then drop tokens that occur too seldom, and encode again, until all that are left are frequent.

    Where a dropped token was a step on the way to a frequent one, other ways to it are found (all_merges). The rarest
    go first, a part at a time, as the others gain from it. A byte is dropped as well if it occurs too seldom alone:
    the bytes of letters that have no ASCII form are.
    """
    tokenizer = bare_tokenizer()
    ascii_only = [sentence for sentence in chain.from_iterable(articles) if sentence.isascii()]
    trainer = trainers.BpeTrainer(vocab_size=FIRST_VOCABULARY, special_tokens=[BOS, UNKNOWN], show_progress=False)
    tokenizer.train_from_iterator(ascii_only, trainer)
    pieces = [tokenizer.id_to_token(place) for place in range(2, tokenizer.get_vocab_size())]
    words = words_of(articles)
    # The words are in the byte alphabet already, so a tokenizer without normalizer and pre-tokenizer encodes them.
    for turn in range(100):
        tokenizer = from_pieces(pieces)
        tokenizer.normalizer, tokenizer.pre_tokenizer = None, pre_tokenizers.Split("\n", "isolated")
        counts = occurrences(tokenizer, words)[2:]
        excess = len(pieces) + 2 - VOCABULARY
        rare = [place for place in np.argsort(counts, kind="stable") if counts[place] < SEEN]
        print(f"turn {turn}: {len(pieces)} tokens, {len(rare)} rare, least {counts.min()}", flush=True)
        if not rare and excess <= 0:
            break
        if rare:
            gone = set(rare[: max(1, len(rare) // 2)]) | {place for place in rare if counts[place] < SEEN // 2}
        else:
            multi = [place for place in np.argsort(counts, kind="stable") if len(pieces[place]) > 1]
            gone = set(multi[:excess])
        pieces = [piece for place, piece in enumerate(pieces) if place not in gone]
    tokenizer = from_pieces(pieces)
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


def encode(tokenizer: Tokenizer, articles: list[list[str]], path: Path) -> np.ndarray:
    """Write tokens (without BOS) and boundaries of articles to an .npz file; give back how often each token occurs."""
    sentences = list(chain.from_iterable(articles))
    ids = [encoding.ids for encoding in tokenizer.encode_batch(sentences, add_special_tokens=False)]
    starts = np.concatenate([[0], np.cumsum([len(sentence) for sentence in ids])])
    article_starts = np.concatenate([[0], np.cumsum([len(article) for article in articles])])
    tokens = np.fromiter(chain.from_iterable(ids), dtype=np.uint16, count=starts[-1])
    np.savez(path, tokens=tokens, sentence_starts=starts.astype(np.int64), article_starts=article_starts)
    print(path.stem, {"articles": len(articles), "sentences": len(sentences), "tokens": int(starts[-1])})
    return np.bincount(tokens, minlength=tokenizer.get_vocab_size())


def main() -> None:
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
        unk_token=UNKNOWN,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(work / "tokenizer")
    counts = encode(tokenizer, articles[:split], work / "train.npz")
    encode(tokenizer, articles[split:], work / "valid.npz")
    rows = "".join(f"{place},{json.dumps(tokenizer.id_to_token(place))},{n}\n" for place, n in enumerate(counts))
    (work / "counts.csv").write_text("id,token,count\n" + rows, encoding="utf-8")
    print(f"{len(counts)} tokens; of those but BOS the rarest occurs {counts[1:].min()} times")
    with (work / "articles.jsonl").open(encoding="utf-8") as lines:
        (work / "valid.jsonl").write_text("".join(list(lines)[split:]), encoding="utf-8")


if __name__ == "__main__":
    main()
