"""One module a kind of chart, and the look that all share."""
