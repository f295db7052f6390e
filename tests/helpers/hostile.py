"""Damages files at random: bytes, values of JSON and TOML, headers of safetensors and traces."""

from __future__ import annotations

import copy
import datetime
import json
import random
import re
import tomllib
import zlib
from collections.abc import Callable
from typing import Any

import tomli_w

Mutate = Callable[[bytes, random.Random], bytes]

DEEP: Any = []
for _ in range(150):
    DEEP = [DEEP]
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 7, 255, -(10**30), 10**30, 2**31, 2**63, 2**64 - 1, 10**400),
    *(0.5, -0.0, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf")),
    *("", " ", "0", "-1", "\x1d0", "²", "٣", "nan", "softmax", "\x1b[2J\x1b]0;x\x07", "\u202eabc", "a\0b", "\ud800"),
    *("x" * 300, "y" * 10_000, "../../..", "/dev/zero", "/etc/passwd", "CON", "{}", "[" * 500, "step-1"),
    *([], {}, [[]], [None], {"": 0}, {"self": 1}, {"cls": 1, "name": "x"}, [1] * 1000, ["a", 1, None], DEEP),
]
KEYS = ["", "self", "cls", "name", "kind", "__class__", "x" * 300, "\x1b[31m", "\u202e", "\ud800", "0"]
PIECES = [b"\x00", b"\xff", b"\xc3", b"\r", b"\n", b"\t", b'"', b"[" * 5000, b"{" * 300, b"\xef\xbb\xbf", b"\x1d"]
PIECES += [b"9" * 400, b"1e400", b"-1", b"\xed\xa0\x80", b"\xe2\x80\xae", b"\x1b[2J", b"NaN", b"a.b." * 300]
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:e-?\d+)?")


def damage_bytes(raw: bytes, draw: random.Random) -> bytes:
    """Returns bytes flipped, cut, repeated, moved, put in, or numbers in them replaced."""
    out = bytearray(raw)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        place = draw.randrange(len(out) + 1)
        match draw.randrange(6):
            case 0 if out:
                out[place % len(out)] ^= 1 << draw.randrange(8)
            case 1:
                del out[place:]
            case 2:
                del out[place : place + draw.randrange(1, 64)]
            case 3:
                start = draw.randrange(len(out) + 1)
                out[place:place] = out[start : start + draw.randrange(1, 200)]
            case 4:
                out[place:place] = draw.choice(PIECES)
            case _:
                numbers = list(_NUMBER.finditer(out[: 1 << 16]))
                if numbers:
                    found = draw.choice(numbers)
                    value = draw.choice([x for x in VALUES if isinstance(x, int | float)])
                    out[found.start() : found.end()] = _number_text(value).encode()
    return bytes(out)


def _number_text(value: Any) -> str:
    return json.dumps(value)


def damage_value(document: Any, draw: random.Random) -> Any:
    """Returns a document with some of its values replaced, removed, renamed, repeated or exchanged."""
    document = copy.deepcopy(document)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        places = list(_places(document))
        if not places:
            return draw.choice(VALUES)
        holder, key = draw.choice(places)
        match draw.randrange(7):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[draw.choice(KEYS)] = copy.deepcopy(draw.choice(VALUES))
            case 2:
                other, other_key = draw.choice(places)
                holder[key] = copy.deepcopy(other[other_key])
            case 3 if isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
                near = holder[key]
                holder[key] = draw.choice((near + 1, -near, near * 1000, str(near)))
            case 4 if isinstance(holder[key], list) and holder[key]:
                holder[key] = draw.choice((holder[key] * 2, holder[key][:-1], holder[key][::-1]))
            case _:
                holder[key] = copy.deepcopy(draw.choice(VALUES))
    return document


def _places(document: Any) -> Any:
    """Yields every container in a document with each of its keys; of long arrays the first and last entries."""
    waiting = [document]
    while waiting:
        holder = waiting.pop()
        if isinstance(holder, dict):
            keys: list[Any] = list(holder)
        elif isinstance(holder, list):
            keys = sorted({*range(min(len(holder), 4)), *range(max(0, len(holder) - 2), len(holder))})
        else:
            continue
        for key in keys:
            yield holder, key
            waiting.append(holder[key])


def damage_json(raw: bytes, draw: random.Random) -> bytes:
    """Returns JSON with other values, or damaged bytes."""
    if draw.random() < 0.3:
        return damage_bytes(raw, draw)
    return to_json(damage_value(json.loads(raw), draw))


def to_json(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=True).encode()


def damage_lines(raw: bytes, draw: random.Random) -> bytes:
    """Returns JSON lines, one of which is damaged."""
    lines = raw.split(b"\n")
    place = draw.randrange(max(1, len(lines) - 1))
    lines[place] = damage_json(lines[place], draw) if lines[place] else b"{}"
    return b"\n".join(lines)


def damage_toml(raw: bytes, draw: random.Random) -> bytes:
    """Returns TOML with other values, or damaged bytes."""
    if draw.random() < 0.3:
        return damage_bytes(raw, draw)
    changed = damage_value(tomllib.loads(raw.decode()), draw)
    if not isinstance(changed, dict):
        changed = {"value": changed}
    try:
        return tomli_w.dumps(_for_toml(changed)).encode()
    except (ValueError, TypeError, UnicodeEncodeError, RecursionError):  # what TOML cannot say
        return damage_bytes(raw, draw)


def _for_toml(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _for_toml(x) for key, x in value.items() if x is not None}
    if isinstance(value, list):
        return [_for_toml(x) for x in value if x is not None]
    if value is True and random.random() < 0.1:
        return datetime.datetime(2020, 1, 1)
    return value


def damage_safetensors(raw: bytes, draw: random.Random) -> bytes:
    """Returns a safetensors file with another header or other bytes."""
    n = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + n])
    data = raw[8 + n :]
    match draw.randrange(6):
        case 0:
            return damage_bytes(raw, draw)
        case 1:
            n = draw.choice((0, 1, n - 1, n + 1, 2**31, 2**63, 2**64 - 1))
            return n.to_bytes(8, "little") + raw[8:]
        case 2:
            empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
            header |= {f"empty{i}": empty for i in range(draw.choice((1, 1, 1, 3000)))}
        case 3:
            name = draw.choice([name for name in header if name != "__metadata__"])
            header[name]["dtype"] = draw.choice(("F64", "F16", "I8", "BOOL", "F8_E4M3", "F4", "U64", "C64", "X"))
        case 4:
            data = damage_bytes(data, draw)
        case _:
            header = damage_value(header, draw)
    text = to_json(header)
    return len(text).to_bytes(8, "little") + text + data


def damage_trace(raw: bytes, draw: random.Random) -> bytes:
    """Returns a trace with other values in its header and a check sum that fits, or other bytes."""
    if draw.random() < 0.25:
        return damage_bytes(raw, draw)
    n = 16 + int.from_bytes(raw[8:16], "little")
    header = damage_value(json.loads(raw[16:n]), draw)
    if isinstance(header, dict):
        header.pop("check", None)
    text = to_json(header)
    return raw[:8] + len(text).to_bytes(8, "little") + text + raw[n:]


def bomb(size: int) -> bytes:
    """Returns zlib's bytes of so many zeros, a thousandth of them."""
    return zlib.compress(bytes(size), 9)
