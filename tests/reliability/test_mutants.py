"""Safeguards taken out, one at a time: each time a check that holds otherwise must fail.

A missing fsync is found by tests/test_storage.py; the others are here.
"""

import asyncio
import contextlib
import html
import io

import pytest
import torch
from training import gpt

from regard.cli import show
from regard.data.tokenizers import Bytes
from regard.errors import RunError
from regard.lens import record
from regard.lens.models import RecordableModel
from regard.lens.pages import gate, page, server
from regard.lens.recording.regard_models import regard_card
from regard.lens.trace import format as trace_format
from regard.report.page import Page
from regard.train import checkpoint, claim
from regard.train.run import Run

HOSTILE = "</title></script><script>alert(1)</script>"
ACTS = "\x1b]0;owned\x07\u202e"  # names a terminal's window, and turns the text round


def unchanged(text, *given, **named):
    return text


# Who may ask the server


def status_of(**headers):
    """Returns the status with which the gate answers a request that has the token."""
    given = {"host": "127.0.0.1:8000", "authorization": "Bearer t"} | headers
    encoded = [(name.encode(), value.encode()) for name, value in given.items()]
    sent = []

    async def receive():
        return {"type": "http.request", "body": b""}

    async def send(message):
        sent.append(message)

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    scope = {"type": "http", "path": "/record", "query_string": b"", "headers": encoded}
    asyncio.run(gate.Gate(app, 8000, "t")(scope, receive, send))
    return sent[0]["status"]


def check_host(folder):
    assert status_of() == 200
    assert status_of(host="evil.example:8000") == 421


def check_origin(folder):
    assert status_of(origin="http://127.0.0.1:8000") == 200
    assert status_of(origin="http://evil.example") == 403


def check_token(folder):
    assert status_of(authorization="Bearer x") == 403


def without_header(name, instead):
    """Returns a mutant of the gate that sees a harmless value in place of a header's."""
    find = gate.Gate._find_refusal

    def find_without(self, scope):
        headers = [(key, value) for key, value in scope["headers"] if key != name]
        return find(self, scope | {"headers": headers + instead})

    return lambda patch: patch.setattr(gate.Gate, "_find_refusal", find_without)


# What is shown


def printed(print_it):
    """Returns what something prints to a terminal."""
    out = io.StringIO()
    out.isatty = lambda: True
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        print_it()
    return out.getvalue()


def print_table():
    made = show.table("token")
    made.add_row(ACTS)
    show.console().print(made)


PRINTS = {
    "an error": lambda: show.print_error(ACTS),
    "a warning": lambda: show.print_warning(ACTS),
    "JSON": lambda: show.print_json({"token": ACTS}),
    "text": lambda: show.print_text(ACTS),
    "a table": print_table,
    "a line": lambda: show.console().print(ACTS),
}


def check_terminal(name):
    def check(folder):
        text = printed(PRINTS[name])
        assert "owned" in text
        assert "\x1b]" not in text and "\u202e" not in text

    return check


def named_model():
    model = gpt()
    model.tokenizer = Bytes()
    return RecordableModel(model, model.tokenizer, regard_card(model, HOSTILE))


def check_page(text):
    assert "alert(1)" in text and "<script>alert(1)" not in text


def check_lens_page(folder):
    model = named_model()
    trace = record(model.model, [1, 2], card=model.card)
    page.write_page(trace, folder / "page.html")
    check_page((folder / "page.html").read_text())


def check_server_page(folder):
    check_page(server.document(server.SharedModel(named_model()))[0])


def check_report(folder):
    made = Page(HOSTILE, HOSTILE)
    made.write(folder / "report.html")
    check_page((folder / "report.html").read_text())


# What is kept


def check_lock(folder):
    first = Run(folder)
    second = Run(folder)
    with first.locked():
        first.best = 1  # replaces a file of the run
        with contextlib.suppress(RunError), second.locked():
            raise AssertionError("two processes write into one run")


def check_prune(folder):
    for step in (1, 2):
        checkpoint.write(folder, step, gpt(), {"a": torch.zeros(3)}, {})
    weights = folder / "step-2" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])  # as a disk that failed has it
    with contextlib.suppress(checkpoint.CheckpointError):
        checkpoint.prune(folder, 1, None, written=2)
    assert (folder / "step-1").is_dir()


MUTANTS = {
    "no Host check": (check_host, without_header(b"host", [(b"host", b"127.0.0.1:8000")])),
    "no Origin check": (check_origin, without_header(b"origin", [])),
    "no token check": (check_token, lambda patch: patch.setattr(gate, "compare_digest", lambda one, other: True)),
    **{
        f"no escape of {name} in a terminal": (
            check_terminal(name),
            lambda patch: patch.setattr(show, "printable", unchanged),
        )
        for name in PRINTS
    },
    "no escape in a title of the lens": (check_lens_page, lambda patch: patch.setattr(html, "escape", unchanged)),
    "no escape in a trace": (check_lens_page, lambda patch: patch.setattr(trace_format, "escape_json", unchanged)),
    "no escape in a title of the server": (check_server_page, lambda patch: patch.setattr(html, "escape", unchanged)),
    "no escape in what the server tells": (
        check_server_page,
        lambda patch: patch.setattr(server, "escape_json", unchanged),
    ),
    "no escape in a report": (check_report, lambda patch: patch.setattr(html, "escape", unchanged)),
    "a lock on a file that is replaced": (check_lock, lambda patch: patch.setattr(claim, "LOCK", "best")),
    "pruning before reading back": (
        check_prune,
        lambda patch: patch.setattr(checkpoint, "fault", lambda path, from_disk=False: None),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_safeguard_that_is_taken_out_is_missed(name, tmp_path, monkeypatch):
    check, mutate = MUTANTS[name]
    check(tmp_path)
    with monkeypatch.context() as patch:
        mutate(patch)
        (tmp_path / "mutant").mkdir()
        with pytest.raises(AssertionError):
            check(tmp_path / "mutant")
