"""Patterns that the triggers of a memory share, found for all memories without a model.

compute_patterns(index)              patterns.parquet and names.parquet (table)
memory_name(index, "L3N512")         one memory in one line, with what follows it and what it promotes (table)
memory_patterns(index, "L3N512")     its patterns, the surest first (table)
related_memories(index, "L3N512")    memories with the same triggers, values or patterns (related)
duplicates(index)                    pairs of memories that are all but the same (alike)
"""
