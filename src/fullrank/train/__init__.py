"""Training: recipes, data, loop, checkpoints, monitors and evaluation."""
