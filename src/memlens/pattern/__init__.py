"""Patterns that the triggers of a memory share, found for all memories without a model.

compute_patterns(index)              writes patterns.parquet and names.parquet (table)
related_memories(index, "L3N51")    memories with the same triggers, values or patterns (related)
duplicates(index)                    pairs of memories with mostly the same triggers (related)
"""
