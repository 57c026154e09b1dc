"""What memories promote and which tokens their keys match, as tables of an index, and how to search them.

    compute_values(index)                values.parquet and keys.parquet
    search_values(index, " Paris")       which memories promote a token
    read_value(index, "L3N512")          both ends of one value, and the tokens of its key

Names are imported when first used: looking at the tables needs no torch, making them does.
"""
