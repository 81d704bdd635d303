"""Text: where it lies, how it is cut into documents and tokens, and the token files that runs share."""
