"""People's work on an index: labels of patterns, verdicts on changes of the last layer, notes on memories."""
