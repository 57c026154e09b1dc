"""Two indexes, or two layers, side by side: which memories changed most in their triggers, values or patterns.

compare_indexes(a, b)                   the same memory of both: base and tuned model, two corpora
compare_indexes(a, b, layers="3:5")     each memory of a layer of a with its best counterpart in a layer of b
"""
