"""One file a study: runs it and returns its record."""
