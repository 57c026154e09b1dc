"""Reads text as sentences of tokens with stable ids, stores them, and packs sentences into batches.

    readers     files of a source in a fixed order; passages of .txt, .jsonl, .parquet and Hub datasets
    sentences   passages cut into units and tokens; the corpus fingerprint; batches
    encoding    the same in chunks, in one process or several
    repeats     prefixes that an earlier sentence contains
    store       the text of an index on disk

pyarrow, sentencex and datasets are imported when first needed.
"""
