"""The command line: one file a command, each a plain function of a dataclass."""
