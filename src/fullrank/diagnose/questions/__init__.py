"""One module a question: what it measures of the states and the output layer, and its record."""
