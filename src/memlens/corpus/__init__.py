"""Reads text as sentences of tokens with stable ids, stores them, and packs sentences into batches.

    readers     files of a source in a fixed order; passages of .txt, .jsonl, .parquet and Hub datasets
    sentences   passages cut into units and tokens; the corpus fingerprint; batches
    encoding    sentences cut and tokenized in chunks, in one process or several
    repeats     prefixes with which an earlier sentence begins
    store       the text of an index on disk

pyarrow, sentencex and datasets are imported when first needed.
"""
