"""Target score, normaliser and loss of single rows."""
