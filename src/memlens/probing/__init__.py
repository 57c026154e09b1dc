"""Probes: which memories know a concept that labelled texts describe, beside the residual stream and words alone."""
