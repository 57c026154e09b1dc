"""The scan: one pass of the model over a corpus that keeps the exact top triggers of every memory."""
