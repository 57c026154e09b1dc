"""Annotations of an index: labels of patterns, verdicts on changes by the last layer, notes on memories."""
