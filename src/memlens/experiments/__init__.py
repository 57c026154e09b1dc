"""The paper's experiments on an index: one module each, listed in the registry."""
