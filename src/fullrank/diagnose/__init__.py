"""Measure a model's output layer: states are streamed out of it, then one file answers one question."""
