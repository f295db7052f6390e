"""The command line: parse, call, print. Exit codes: 0 success, 1 failed check, 2 wrong input, 130 interrupted."""

from regard.cli.app import main

__all__ = ["main"]
