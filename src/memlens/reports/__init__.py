"""The report: an index as one self-contained page to read and share."""
