"""Annotations of an index: labels of patterns, verdicts on last-layer changes, notes on memories."""
