"""Roles of memories, assigned by stated rules from triggers, values and weights."""
