"""What a memory's triggers have in common: found by machine for all memories, named by people for some.

compute_patterns(index)              patterns.parquet and names.parquet
memory_name(index, "L3N512")         one memory in one line, with what follows it and what it promotes
memory_patterns(index, "L3N512")     its patterns, the surest first
prefix_patterns(index, "L3N512")     which patterns each of its triggers contains
related_memories(index, "L3N512")    memories with the same triggers, values or patterns

Labels of people are in index/annotations; samples, agreement and comparison with the machine are in study here.
"""
