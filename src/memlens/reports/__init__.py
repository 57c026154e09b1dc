"""The report: an index as one self-contained page that a person can read and share."""
