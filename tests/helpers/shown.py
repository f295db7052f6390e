"""Programs and commands as a reader runs them: each in a process of its own, which begins with regard imported."""

import multiprocessing
import os
import runpy
import sys
import tempfile
from pathlib import Path

_FRESH = multiprocessing.get_context("forkserver")
# The last two are imported by the first figure and by the first step of training, slowly.
_FRESH.set_forkserver_preload(
    ["shown", "regard.cli", "regard.lab", "regard.train", "matplotlib.backends.backend_svg", "torch._dynamo"]
)


def program(path, folder):
    """The exit code of a Python file that is run in a folder, and what it printed."""
    return _run(runpy.run_path, (str(path), None, "__main__"), ["python", str(path)], folder)


def command(words, folder):
    """The same of one of regard's commands."""
    return _run(_main, (), words, folder)


def _main():
    from regard.cli import main

    main()


def _run(what, given, words, folder):
    with tempfile.TemporaryDirectory() as elsewhere:
        printed = Path(elsewhere) / "printed.txt"
        process = _FRESH.Process(target=_begin, args=(what, given, words, str(folder), str(printed)))
        process.start()
        process.join()
        return process.exitcode, printed.read_text() if printed.exists() else ""


def _begin(what, given, words, folder, printed):
    # A process of this kind writes where the first of them did, so each is given a file.
    with open(printed, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.chdir(folder)
    sys.argv = words
    what(*given)
