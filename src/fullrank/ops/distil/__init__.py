"""Outputs of a mixture beside its loss: log-probabilities at ids, entropy, divergence from a teacher."""
