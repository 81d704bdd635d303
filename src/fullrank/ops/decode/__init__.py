"""Log-probabilities and best entries of mixtures: operators, kernels."""
