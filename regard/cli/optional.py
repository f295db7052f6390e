"""Options whose value may be left out: `--prune` is `--prune importance`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from regard.cli.groups import Command


class OptionalValueCommand(Command):
    """A command with options that may be given without a value; `defaults` has the value that each then takes."""

    defaults: ClassVar[Mapping[str, str]] = {}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        valued = {name for p in self.params if not getattr(p, "is_flag", True) for name in p.opts}
        return super().parse_args(ctx, fill_values(args, self.defaults, valued))


def fill_values(words: Sequence[str], defaults: Mapping[str, str], valued: set[str]) -> list[str]:
    """Returns the words of a command with the default added to each option that has no value.

    An option takes the next word as its value unless that is an option, too, or would be the only argument:
    `--prune MODEL` is `--prune=importance MODEL`. `valued` are all options that take a value.
    """
    taken = {}  # place of an optional value → place of its option
    arguments = 0
    place = 0
    while place < len(words):
        word = words[place]
        follows = place + 1 < len(words) and not words[place + 1].startswith("-")
        if word in valued and follows:
            if word in defaults:
                taken[place + 1] = place
            place += 1
        elif not word.startswith("-"):
            arguments += 1
        place += 1
    if arguments == 0 and taken:
        del taken[max(taken)]
    given = set(taken.values())
    return [
        f"{word}={defaults[word]}" if word in defaults and place not in given else word
        for place, word in enumerate(words)
    ]
