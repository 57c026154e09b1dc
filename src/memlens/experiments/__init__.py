"""The paper's experiments on an index: one module each, listed in run.MODULES."""
