"""Roles of memories, which fixed rules (rules.py) assign from triggers, values and weights."""
