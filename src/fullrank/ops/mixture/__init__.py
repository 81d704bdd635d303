"""The mixture loss and the losses of single rows: definition, chunks, kernels, operators."""
