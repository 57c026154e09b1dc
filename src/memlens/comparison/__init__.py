"""Comparison of two indexes or two layers: the memories whose triggers, values, patterns or roles changed most.

compare_indexes(a, b)                   each memory of a with the same memory of b: base and tuned model, two corpora
compare_indexes(a, b, layers="3:5")     each memory of a layer of a with its best counterpart in a layer of b
"""
