"""The option --plugin, which all commands share that name mechanisms."""

from __future__ import annotations

import shlex
from typing import Any

import typer

HELP = "A Python file that registers mechanisms, which is run; may be repeated."


_named: list[str] = []  # the files that were named to the command of this process


def import_plugins(files: list[str] | None) -> list[str] | None:
    """Imports the files that the user names, before anything else of the command is done."""
    _named[:] = files or ()
    if files:
        from regard.plugins import import_file  # it needs PyTorch

        for file in files:
            import_file(file)
    return files


def again(command: str) -> str:
    """Returns a command that goes on with this one's work, with the files that were named to this one."""
    words = [word for path in _named for word in ("--plugin", path)]
    return " ".join([command, *map(shlex.quote, words)])


def plugin_option() -> Any:
    """Returns the option; the function of a command never sees it."""

    asked = typer.Option(None, "--plugin", metavar="FILE", callback=import_plugins, is_eager=True, help=HELP)

    def command(plugin: list[str] | None = asked) -> None: ...

    alone = typer.Typer(add_completion=False)
    alone.command()(command)
    option = typer.main.get_command(alone).params[0]
    option.expose_value = False
    return option
