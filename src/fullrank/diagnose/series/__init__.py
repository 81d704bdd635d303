"""Curves of many checkpoints or models: saturation, scaling, and where they come from."""
