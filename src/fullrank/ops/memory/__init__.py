"""Scores of queries against a memory: definition, tiles."""
