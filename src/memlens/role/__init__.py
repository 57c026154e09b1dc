"""Roles: what each memory is for, by stated rules over its triggers, its value and its weights."""
