"""The paper's experiments on an index: one module each; see registry for how one is added.

run(index, ["agreement", "rank"])      their tables, kept in INDEX/experiments/
"""
