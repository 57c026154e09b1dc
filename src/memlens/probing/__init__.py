"""Sparse probes for concepts in labeled texts, with baselines on the residual stream and on words."""
