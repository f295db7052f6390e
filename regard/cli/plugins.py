"""The option --plugin, which all commands have that take names of mechanisms."""

from __future__ import annotations

import shlex
from typing import Any

import typer

HELP = "Run this Python file first, which registers mechanisms; repeatable."


_named: list[str] = []  # the files that were given to this process's command


def import_plugins(files: list[str] | None) -> list[str] | None:
    """Imports the files that the user gave, before the command does anything else, and returns them."""
    _named[:] = files or ()
    if files:
        from regard.plugins import import_file  # it needs PyTorch

        for file in files:
            import_file(file)
    return files


def again(command: str) -> str:
    """Returns a command with this process's --plugin options added, to continue its work."""
    words = [word for path in _named for word in ("--plugin", path)]
    return " ".join([command, *map(shlex.quote, words)])


def plugin_option() -> Any:
    """Returns the option as a parameter of the parser; it is not passed to the command's function."""

    asked = typer.Option(None, "--plugin", metavar="FILE", callback=import_plugins, is_eager=True, help=HELP)

    def command(plugin: list[str] | None = asked) -> None: ...

    alone = typer.Typer(add_completion=False)
    alone.command()(command)
    option = typer.main.get_command(alone).params[0]
    option.expose_value = False
    return option
