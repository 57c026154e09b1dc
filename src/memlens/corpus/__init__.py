"""Reads text as sentences of tokens, with ids that stay the same, and packs sentences into batches.

    settings    sources, unit, column, language
    files       files of a source in a fixed order; their bytes and lines
    readers     passages of .txt, .jsonl, .parquet and Hub datasets
    sentences   passages cut into units and tokens; repeated prefixes; the corpus fingerprint; batches
    encoding    the same in chunks, in one process or in several

pyarrow, sentencex and datasets are imported when first needed.
"""
