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
