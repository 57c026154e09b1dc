"""The scan: run the model over a corpus once and find the exact top triggers of every memory."""
