"""Comparison of two indexes or two layers: the memories whose triggers, values, patterns or roles changed most.

compare_indexes(a, b)                   the same memory of both: base and tuned model, two corpora
compare_indexes(a, b, layers="3:5")     each memory of a layer of a with its best counterpart in a layer of b
"""
