"""Help and errors of commands: whole sentences, examples, and suggestions for wrong names."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from difflib import get_close_matches
from types import SimpleNamespace
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from regard.cli.commands import ALSO_CALLED, COMMANDS, GROUPS, OPTIONS_ALSO_CALLED, PACKAGE, Entry
from regard.cli.plugins import plugin_option
from regard.errors import OptionError, UnknownNameError, quote


class Command(TyperCommand):
    """A command whose help ends with examples, and whose errors suggest the right option."""

    examples: Sequence[str] = ()
    instead = ""  # the advice for somebody who gave too many arguments

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        _write_examples(formatter, self.examples)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        takes_more = ctx.allow_extra_args
        ctx.allow_extra_args = True  # so that extra arguments get the error below
        try:
            left: list[str] = super().parse_args(ctx, args)
        except Exception as error:
            wrong = getattr(
                error, "option_name", None
            )  # the parser's error for an unknown option, or one without a value
            if wrong is None:
                raise
            if wrong in self._options():
                raise OptionError(f"{wrong} needs a value. {self._ask_for_help(ctx)}") from None
            raise OptionError(self._explain(wrong, ctx, given)) from None
        finally:
            ctx.allow_extra_args = takes_more
        if left and not takes_more and not ctx.resilient_parsing:
            raise OptionError(self._explain_extra(left, ctx))
        return left

    def _explain_extra(self, left: Sequence[str], ctx: Any) -> str:
        """Returns the error for extra arguments, which says what the command takes."""
        names = [p.name.upper() for p in self.params if p.param_type_name == "argument" and p.name]
        expected = f"it takes {' '.join(names)}" if names else "it takes options only"
        said = f"{' '.join(map(quote, left))}: too much for `{ctx.command_path}`, {expected}."
        return " ".join(filter(None, [said, self.instead, self._ask_for_help(ctx)]))

    def _explain(self, wrong: str, ctx: Any, given: Sequence[str]) -> str:
        """Returns the error for an unknown option, with the key or the option that it may mean."""
        said = f"no option {quote(wrong, marks=False)} in `{ctx.command_path}`."
        name = wrong.lstrip("-").replace("_", "-")
        options = self._options()
        # Our name for that of another tool, an option that begins so, a similar one.
        meant = [f"--{own}" for own in OPTIONS_ALSO_CALLED.get(name, ())]
        meant += [option for option in options if option.startswith(f"--{name}")]
        meant = [option for option in meant if option in options]
        if not meant and any(parameter.name == "overrides" for parameter in self.params):
            from regard.train.keys import find_keys  # it needs PyTorch

            found = find_keys(name, given)
            if found:
                alternatives = " or ".join(f"{key}=…" for key in found)
                return f"{said} Settings are written behind the name, without dashes: {alternatives}"
        meant += get_close_matches(wrong, options, n=1)
        if meant:
            said += f" Did you mean {meant[0]}?"
        return f"{said} {self._ask_for_help(ctx)}"

    def _options(self) -> list[str]:
        return [option for parameter in self.params for option in parameter.opts if option.startswith("--")]

    def _ask_for_help(self, ctx: Any) -> str:
        return f"`{ctx.command_path} -h` lists its options."


class Group(TyperGroup):
    """A group whose help shows a whole sentence for each of its commands."""

    examples: Sequence[str] = ()

    def sentence(self, ctx: Any, name: str) -> str:
        """Returns what a command does: the first paragraph of its help."""
        command: Any = self.get_command(ctx, name)
        return " ".join((command.help or "").partition("\n\n")[0].split())

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.sentence(ctx, name)) for name in self.list_commands(ctx)])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        _write_examples(formatter, self.examples)


class LazyGroup(Group):
    """The group of the commands in `COMMANDS`, each imported when it is used."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        if cmd_name not in self.commands:
            self.commands[cmd_name] = _build_command(cmd_name, COMMANDS[cmd_name])
        return self.commands[cmd_name]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            raise UnknownNameError(_describe_unknown(name))
        return super().resolve_command(ctx, args)

    def sentence(self, ctx: Any, name: str) -> str:
        return COMMANDS[name].says

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, COMMANDS))
        for group in GROUPS:
            members = [(name, entry.says) for name, entry in COMMANDS.items() if entry.group == group]
            with formatter.section(group):
                formatter.write_dl([(name.ljust(width), says) for name, says in members])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        formatter.write_paragraph()
        formatter.write_text("`regard COMMAND -h` has a command's options and examples.")

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        names = [name for name in COMMANDS if name.startswith(incomplete)]
        found: list[Any] = [SimpleNamespace(value=name, type="plain", help=COMMANDS[name].says) for name in names]
        if incomplete.startswith("-"):
            found += super(TyperGroup, self).shell_complete(ctx, incomplete)
        return found


def _build_command(name: str, entry: Entry) -> Any:
    """Returns a command after importing its module."""
    place, _, attribute = (entry.place or f"{name}:{name}").partition(":")
    module = importlib.import_module(f"{PACKAGE}.{place}")
    target = getattr(module, attribute)
    made: Any
    if isinstance(target, typer.Typer):
        made = typer.main.get_group(target)
    else:
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        alone.command(name, cls=getattr(module, "COMMAND", Command))(target)
        made = typer.main.get_command(alone)
    made.examples = entry.examples
    if entry.plugins:
        inner = [made]
        if isinstance(made, TyperGroup):
            inner = list(made.commands.values())
        for command in inner:
            command.params.append(plugin_option())
    return made


def _describe_unknown(name: str) -> str:
    """Returns the error for an unknown command, with the one that may be meant."""
    if name == "help":
        return "no command is called 'help': `regard -h` lists the commands, `regard COMMAND -h` a command's options."
    if name == "version":
        return "no command is called 'version': `regard --version` prints it, `regard doctor` those of what it uses."
    close = get_close_matches(name, [*COMMANDS, *ALSO_CALLED], n=1)
    hint = ""
    if close:
        hint = f" Did you mean '{ALSO_CALLED.get(close[0], close[0])}'?"
    return f"no command is called {quote(name)}.{hint} Known: {', '.join(COMMANDS)}."


def _write_examples(formatter: Any, examples: Sequence[str]) -> None:
    """Writes examples as they are typed; long lines are not broken."""
    if not examples:
        return
    with formatter.section("Examples"):
        for example in examples:
            formatter.write(f"{'':>{formatter.current_indent}}{example}\n")
