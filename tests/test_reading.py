"""Files from anybody: one module reads them, within limits, and its errors are of one family."""

import os
import re
import time
from pathlib import Path

import pytest

import regard
from regard.config import ConfigError
from regard.errors import MAX_QUOTED, RunError, did_you_mean, printable, quote
from regard.reading import (
    MAX_DEPTH,
    MAX_TOML_BYTES,
    ReadingError,
    check_path,
    parse_json,
    parse_toml,
    read_bytes,
    read_json,
    read_toml,
)

PACKAGE = Path(regard.__file__).parent


def test_nobody_else_parses_files():
    # What the `tokenizers` library writes of a tokenizer that it has read is no file.
    parsing = re.compile(r"json\.loads?\((?!.*\.to_str\(\))|\btomllib\b|\bload_file\(|\bsafe_open\(")
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for line in path.read_text("utf-8").splitlines()
        if parsing.search(line)
    }
    # What ejected files do is written there as text.
    assert found == {"reading.py", "models/tensor_files.py", "models/eject/write.py"}


@pytest.mark.parametrize("depth", [MAX_DEPTH, MAX_DEPTH + 1, 100_000])
@pytest.mark.parametrize("text", ["[{}]", '{{"a":{}}}'], ids=["array", "object"])
def test_the_depth_of_json_has_a_cap(text, depth):
    left, right = text.format("|").split("|")
    document = left * depth + "1" + right * depth
    if depth <= MAX_DEPTH:
        parse_json(document, "it")
    else:
        with pytest.raises(ReadingError, match="it is nested more than 100 deep"):
            parse_json(document, "it")


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 5000 + "]" * 5000,
        "a = " + "{b = " * 5000 + "1" + "}" * 5000,
        ".".join("a" * 5000) + " = 1",
        "[" + ".".join(['"a"'] * 5000) + "]",
        "[[" + " . ".join(["'a'"] * 5000) + "]]",
    ],
    ids=["array", "table", "key", "header", "array of tables"],
)
def test_the_depth_of_toml_has_a_cap(text):
    with pytest.raises(ReadingError, match="nested more than 100 deep"):
        parse_toml(text, "it")


def test_brackets_in_texts_nest_nothing():
    many = "[" * 1000
    assert parse_json(f'["{many}", "\\"{many}"]', "it") == [many, '"' + many]
    toml = f"a = \"{many}\"\nb = '{many}'\nc = \"\"\"{many}\"\"\"\nd = '''{many}'''\n# {many}\n"
    assert parse_toml(toml, "it") == dict.fromkeys("abcd", many)


@pytest.mark.parametrize("text", ["{", '"\\', "1" * 5000, "\x00", '{"a": 1,}', "nul", ""])
def test_what_is_no_json_is_told(text):
    with pytest.raises(RunError, match="it is damaged or no JSON"):
        parse_json(text, "it", RunError)


def test_bytes_that_are_no_text_are_told_by_line():
    with pytest.raises(ConfigError, match="it, line 2: byte 0xFF is not UTF-8"):
        parse_json(b"[\n\xff]", "it", ConfigError)


@pytest.mark.parametrize("text", ['"' + "\\" * (1 << 22), '"' * (1 << 22), '"\\"' * (1 << 20)])
def test_finding_out_the_depth_takes_time_in_proportion(text):
    began = time.perf_counter()
    with pytest.raises(ReadingError):
        parse_json(text, "it")
    assert time.perf_counter() - began < 10


@pytest.mark.timeout(10)
def test_pipes_devices_and_folders_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, words in {
        tmp_path / "pipe": "a pipe or a device",
        Path("/dev/zero"): "a pipe",
        tmp_path: "a folder",
    }.items():
        with pytest.raises(ReadingError, match=words):
            read_json(path)


def test_a_sparse_file_is_not_read(tmp_path):
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ReadingError, match="has 1,099,511,627,776 bytes; expected at most"):
        read_bytes(tmp_path / "sparse")
    (tmp_path / "large.toml").write_bytes(b"#" * (MAX_TOML_BYTES + 1))
    with pytest.raises(ReadingError, match="bytes; expected at most"):
        read_toml(tmp_path / "large.toml")


@pytest.mark.parametrize("path", ["x" * 300, "a\0b", "half \ud800", "y/" * 3000])
def test_what_can_be_no_path_is_told_and_quoted_briefly(path):
    with pytest.raises(RunError) as caught:
        check_path(path, RunError)
    assert len(str(caught.value)) < 400


def test_a_missing_path_is_a_path(tmp_path):
    assert check_path(tmp_path / "missing" / "below") == tmp_path / "missing" / "below"


def test_a_quote_is_short_and_printable():
    long = quote("x" * 10_000)
    assert len(long) == MAX_QUOTED and long.endswith("…")
    assert len(quote([10**6] * 10_000)) <= MAX_QUOTED
    assert len(quote({"a": ["b" * 10_000]})) <= MAX_QUOTED
    assert len(quote(10**100_000)) <= MAX_QUOTED
    assert quote("a\x1b[2J") == "'a\\x1b[2J'"
    assert quote(ValueError("\u202eabc")) == "\\u202eabc"
    assert quote(ValueError()) == "ValueError"
    assert len(did_you_mean("x" * 10**6, ["train"])) < 100


def test_what_a_terminal_acts_on_is_escaped_and_other_text_is_not():
    assert printable("\x1b]0;title\x07 \x9b31m \u202e \u2066 \x7f \r") == (
        "\\u001b]0;title\\u0007 \\u009b31m \\u202e \\u2066 \\u007f \\u000d"
    )
    harmless = "naïve — 漢字 🙂 \t\n עברית ﷺ\u200d"
    assert printable(harmless) == harmless
