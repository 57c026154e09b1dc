"""Which memories changed most between two indexes, or between two layers.

    compare_indexes(a, b)                   the same memory of both: base and tuned model, two corpora
    compare_indexes(a, b, layers="3:5")     each memory of a layer of a with its best counterpart in a layer of b

Reads tables; keeps nothing and knows no model.
"""
