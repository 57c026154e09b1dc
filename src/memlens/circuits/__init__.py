"""Circuits: the memories behind a prediction, connected by edges that add up."""
