"""The one exception that a user's mistake raises.

A message says what came, what was expected and what to do, in one sentence. The command line prints it
without a traceback and exits with 2; a caller in Python catches `FullrankError` and nothing wider.
"""


class FullrankError(ValueError):
    """Bad input: the message names what came, what was expected and the remedy."""
