"""Tables of the tokens that values promote and that keys match.

    table      compute_values(index) writes values.parquet, keys.parquet, tokens.parquet and routers.parquet
    kernels    compiled loops over vocabulary scores: highest and lowest tokens, softmax, entropy, ranks
    tokens     counts, training state and classes of tokens
    coherence  whether the top tokens of a value are more similar to each other than those of a random direction
    nearest    memories with similar keys or values

`memlens.index` reads and searches these tables without torch.
"""
