"""The command line: parse, call, print. Exit codes: 0 fine, 1 a law or check failed, 2 bad input, 130 interrupted."""

from regard.cli.app import main

__all__ = ["main"]
