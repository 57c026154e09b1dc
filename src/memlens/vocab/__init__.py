"""Tables of what memories promote and of the tokens their keys match: values.parquet and keys.parquet.

    table      compute_values(index) writes both
    kernels    vocabulary scores block by block: both ends, softmax, entropy, ranks
    read       values.parquet in a few numbers

One memory's value is read by memlens.index.memory and searched by memlens.index.search, without torch.
"""
