"""The loss of a mixture whose rows share a trunk: definition, chunks, kernels, operator."""
