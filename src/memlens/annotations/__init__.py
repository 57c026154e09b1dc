"""People's work on an index: labels of patterns and verdicts on changes of the last layer."""
