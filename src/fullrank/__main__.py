"""`python -m fullrank` is the command, where it is not installed."""

from fullrank.cli.main import main

if __name__ == "__main__":
    main()
