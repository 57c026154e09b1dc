"""Text becomes sentences of tokens, and sentences become batches, with ids that stay the same.

    settings      what to read and how to cut it
    sources       files and folders, in an order that never varies
    streams       bytes and lines, a chunk at a time
    readers, hub  passages of .txt, .jsonl, .parquet and Hub datasets
    units         passages cut into sentences, lines, documents
    sentences     units as tokens, with ids
    repeats       which prefixes were seen in an earlier sentence
    batches       windows of sentences as padded rectangles
    fingerprint   is it still the same corpus

Knows nothing of models, coefficients and indexes; pyarrow, sentencex and datasets are imported when first needed.
"""

from __future__ import annotations

from memlens.corpus.batches import Batch, cut_batches, fill_share
from memlens.corpus.fingerprint import corpus_fingerprint
from memlens.corpus.readers import Passage
from memlens.corpus.repeats import Repeats, find_repeats, fresh_from, repeated_sentences
from memlens.corpus.sentences import Encoded, Sentence, tokenize_units
from memlens.corpus.settings import CorpusSettings, HubSpec
from memlens.corpus.units import TextUnit, read_passages, read_units

__all__ = [
    "Batch",
    "CorpusSettings",
    "Encoded",
    "HubSpec",
    "Passage",
    "Repeats",
    "Sentence",
    "TextUnit",
    "corpus_fingerprint",
    "cut_batches",
    "fill_share",
    "find_repeats",
    "fresh_from",
    "read_passages",
    "read_units",
    "repeated_sentences",
    "tokenize_units",
]
