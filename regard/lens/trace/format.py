"""A trace as bytes: a JSON header and binary blocks. docs/trace-format.md says what stands where."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.data.files import atomic_write
from regard.lens.trace.arrays import TraceError, pack, pack_steps, unpack
from regard.lens.trace.base91 import ALIGN, encode_base91, length
from regard.lens.trace.formulas import MAPS, Dense, Feature, OneHot, SoftmaxFormula
from regard.lens.trace.precision import kept
from regard.lens.trace.rules import Rules
from regard.lens.trace.tokens import Tokens
from regard.lens.trace.trace import Attended, Card, Recording, Trace
from regard.version import __version__

MAGIC = b"REGARD\x01\n"
VERSION = 1
_PLAIN = {"n": "f32", "sign": "f32", "choice": "i32", "w": "f32", "cq": "f32", "ck": "f32", "slopes": "f32"}
_PLAIN |= {"offsets": "f32"}
_ESCAPED = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


@dataclass(frozen=True)
class Encoded:
    """A trace ready to be written. Its size is known before anything is."""

    header: dict[str, Any]
    blocks: list[bytes]

    @property
    def document(self) -> bytes:
        """The header as it is written."""
        return _document(self.header)

    @property
    def size(self) -> int:
        """Bytes of a .trace file."""
        return len(MAGIC) + 8 + len(self.document) + sum(map(len, self.blocks))

    @property
    def page_size(self) -> int:
        """Bytes that the trace takes in a page."""
        blocks = (len(_block(n, "")) + length(len(block)) for n, block in enumerate(self.blocks))
        return len(self._head().encode()) + sum(blocks)

    def write(self, path: str | Path) -> None:
        """Writes a .trace file; an earlier one stays until this one is on disk."""
        with atomic_write(path) as file:
            for part in self._parts():
                file.write(part)

    def _parts(self) -> Iterator[bytes]:
        document = self.document
        yield MAGIC + len(document).to_bytes(8, "little") + document
        yield from self.blocks

    def elements(self) -> Iterator[str]:
        """The inert script elements of a page."""
        yield self._head()
        for number, block in enumerate(self.blocks):
            yield _block(number, encode_base91(block))

    def _head(self) -> str:
        document = self.document.decode().translate(_ESCAPED)
        return f'<script type="application/json" id="trace">{document}</script>\n'


def _block(number: int, text: str) -> str:
    return f'<script type="text/plain" id="block-{number}">{text}</script>\n'


def to_bytes(encoded: Encoded) -> bytes:
    """The bytes of a .trace file."""
    return b"".join(encoded._parts())


def encode(trace: Trace) -> Encoded:
    """Header and blocks: one with all overviews, then one for each attention."""
    blocks = [bytearray()]
    cards = list(dict.fromkeys(recording.model for recording in trace.recordings))
    recordings = []
    for recording in trace.recordings:
        attentions = []
        for attended in recording.attentions:
            blocks.append(bytearray())
            attentions.append(_attention(recording, attended, blocks))
        recordings.append(
            {
                "name": recording.name,
                "model": cards.index(recording.model),
                "sequences": [tokens.as_dict() for tokens in recording.sequences],
                "attentions": attentions,
                "loss": recording.loss,
                "labels": recording.labels,
            }
        )
    header = {
        "format": "regard-trace",
        "version": VERSION,
        "made_by": f"regard {__version__}",
        "blocks": [len(block) for block in blocks],
        "models": [card.as_dict() for card in cards],
        "recordings": recordings,
    }
    return Encoded(header | {"check": _check(header)}, [bytes(block) for block in blocks])


def _document(header: dict[str, Any]) -> bytes:
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "replace")  # half of a surrogate pair, which a token may be, is a "?"


def _check(header: dict[str, Any]) -> int:
    """CRC-32 of a header without its own check."""
    return zlib.crc32(_document({name: x for name, x in header.items() if name != "check"}))


def save(trace: Trace, path: str | Path) -> int:
    """Writes a .trace file and says how many bytes it has."""
    encoded = encode(trace)
    encoded.write(path)
    return encoded.size


def load(path: str | Path) -> Trace:
    """The trace that a file holds."""
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}; expected a .trace file") from None
    return decode(raw, str(path))


def decode(raw: bytes, place: str = "the trace") -> Trace:
    """The trace that the bytes of a file hold; nothing in them is executed."""
    if raw[:8] != MAGIC:
        raise TraceError(f"{place} is no trace, or one of another version: expected a file that begins with 'REGARD'")
    start = 16 + int.from_bytes(raw[8:16], "little")
    try:
        header = json.loads(raw[16:start].decode())
        if header["format"] != "regard-trace" or not isinstance(header["version"], int):
            raise TraceError(f"{place}: format {header['format']!r}, expected 'regard-trace'")
        if header["version"] > VERSION:
            raise TraceError(f"{place} has version {header['version']}, this regard knows {VERSION}: update regard")
        if header.get("check") not in (None, _check(header)):
            raise TraceError(f"{place}: its header is damaged; copy or record it again")
        lengths = [int(n) for n in header["blocks"]]
        if min(lengths, default=0) < 0 or start + sum(lengths) != len(raw):
            raise TraceError(f"{place} has {len(raw)} bytes, expected {start + sum(lengths)}: cut off; copy it again")
        blocks = []
        for n in lengths:
            blocks.append(raw[start : start + n])
            start += n
        cards = [_card(card) for card in header["models"]]
        return Trace([_recording(x, cards, blocks, place) for x in header["recordings"]])
    except TraceError:
        raise
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        raise TraceError(f"{place}: its header is damaged ({type(error).__name__}: {error}); record it again") from None


def _put(blocks: list[bytearray], number: int, raw: bytes, kind: str, shape: tuple[int, ...]) -> dict[str, Any]:
    block = blocks[number]
    block.extend(bytes(-len(block) % ALIGN))
    place = {"block": number, "at": len(block), "bytes": len(raw), "type": kind, "shape": list(shape)}
    block.extend(raw)
    return place


def _attention(recording: Recording, attended: Attended, blocks: list[bytearray]) -> dict[str, Any]:
    here = len(blocks) - 1

    def put(x: Tensor, kind: str, step: Tensor | None = None) -> dict[str, Any]:
        raw = pack(x, kind) if step is None else pack_steps(x, step)
        return _put(blocks, here, raw, kind, tuple(x.shape))

    arrays: dict[str, Any] = {}
    error = [0.0] * attended.heads
    if attended.q is not None and attended.k is not None:
        found = kept(recording, attended)
        arrays["q"] = [put(x, *way) for x, way in zip(found.q, found.ways_q, strict=True)]
        arrays["k"] = [put(x, *way) for x, way in zip(found.k, found.ways_k, strict=True)]
        attended, error = replace(attended, n=found.n), found.error
    for name, kind in _PLAIN.items():
        if (x := getattr(attended, name)) is not None:
            arrays[name] = put(x, kind)
    for name in ("v", "g"):
        if (x := getattr(attended, name)) is not None:
            arrays[name] = [put(y, "step" if bool(y.isfinite().all()) else "f32") for y in x]
    if attended.rules.hidden is not None:
        arrays["hidden"] = put(attended.rules.hidden, "bit")
    if isinstance(attended.formula, Dense):
        arrays["tiles"] = _tiles(attended, attended.formula, recording, blocks)
        error = attended.error or error
    assert attended.overview is not None
    shape = tuple(attended.overview.shape)
    small = "f16" if float(attended.overview.abs().amax()) < 6e4 else "f32"  # weights of either sign have no bound
    return {
        **{n: getattr(attended, n) for n in ("layer", "side", "kind", "name", "mechanism", "queries", "keys")},
        **{n: getattr(attended, n) for n in ("heads", "groups", "signed", "figures")},
        "weights": attended.formula.as_dict(),
        "mask": attended.rules.as_dict(),
        "bias": [name for name in ("slopes", "offsets") if getattr(attended, name) is not None],
        "arrays": arrays,
        "overview": _put(blocks, 0, pack(_short(attended.overview), small), small, shape),
        "error": error,
    }


def _short(x: Tensor) -> Tensor:
    """Half precision of which 7 bits of the fraction are kept: a picture has no more shades."""
    return ((x.half().view(torch.int16) + 4) & -8).view(torch.half) if float(x.abs().amax()) < 6e4 else x


def _tiles(attended: Attended, dense: Dense, recording: Recording, blocks: list[bytearray]) -> list[Any]:
    T, S = (len(x) for x in recording.read(attended))
    return [
        [
            _put(blocks, len(blocks) - 1, raw, "f16", (min(dense.tile, T - n * dense.tile), S))
            for n, raw in enumerate(tiles)
        ]
        for tiles in dense.tiles
    ]


def _card(given: dict[str, Any]) -> Card:
    known = {"cls" if name == "class" else name: x for name, x in given.items()}
    return Card(**known | {"mechanisms": tuple(known["mechanisms"])})


def _recording(given: dict[str, Any], cards: list[Card], blocks: list[bytes], place: str) -> Recording:
    sequences = [Tokens(**x) for x in given["sequences"]]
    for tokens in sequences:
        lists = (tokens.starts, tokens.ends, tokens.words, tokens.special, tokens.visible, tokens.positions)
        if any(len(x) != len(tokens) for x in lists):
            raise TraceError(f"{place}: the lists of sequence {tokens.name!r} differ in length; record it again")
    made = Recording(given["name"], cards[given["model"]], sequences, [], given["loss"], given["labels"])
    for number, x in enumerate(given["attentions"]):
        made.attentions.append(_attended(x, sequences, blocks, f"{place}, attention {number}"))
    return made


def _attended(given: dict[str, Any], sequences: list[Tokens], blocks: list[bytes], place: str) -> Attended:
    arrays = given["arrays"]
    T, S, H = len(sequences[given["queries"]]), len(sequences[given["keys"]]), given["heads"]

    def raw(x: dict[str, Any]) -> bytes:
        block = blocks[x["block"]]
        if not 0 <= x["at"] <= x["at"] + x["bytes"] <= len(block):
            raise TraceError(f"{place}: bytes {x['at']} to {x['at'] + x['bytes']} of a block of {len(block)}")
        return bytes(block[x["at"] : x["at"] + x["bytes"]])

    def read(x: dict[str, Any], name: str) -> Tensor:
        return unpack(raw(x), x["type"], x["shape"], f"{place}, array {name}")

    found: dict[str, Tensor] = {name: read(arrays[name], name) for name in _PLAIN if name in arrays}
    for name in ("q", "k", "v", "g"):
        if name in arrays:
            found[name] = torch.stack([read(x, name) for x in arrays[name]]).float()
    if "choice" in found:
        found["choice"] = found["choice"].long()
    wanted = {"q": (H, T), "g": (H, T), "n": (H, T), "choice": (H, T), "sign": (H, T)}
    wanted |= {"k": (len(found.get("k", ())), S), "v": (len(found.get("v", ())), S)}
    for name, shape in wanted.items():
        if name in found and tuple(found[name].shape[:2]) != shape:
            raise TraceError(f"{place}: {name} is {list(found[name].shape)}, expected {list(shape)} …")
    mask = dict(given["mask"])
    hidden = read(arrays["hidden"], "hidden") if mask.pop("hidden") else None
    how, kind = given["weights"], given["weights"]["kind"]
    formula: SoftmaxFormula | Feature | OneHot | Dense
    if kind == "softmax":
        formula = SoftmaxFormula(float(how["scale"]), how["softcap"])
    elif kind == "feature" and how["map"] in MAPS:
        formula = Feature(how["map"])
    elif kind == "dense":
        formula = Dense(int(how["tile"]), [[raw(x) for x in tiles] for tiles in arrays["tiles"]])
    elif kind == "onehot":
        formula = OneHot()
    else:
        raise TraceError(f"{place}: weights of kind {kind!r} are unknown to this regard; update it")
    same = ("layer", "side", "kind", "name", "mechanism", "queries", "keys", "heads", "groups", "signed", "figures")
    made = Attended(
        **{name: given[name] for name in same},
        formula=formula,
        rules=Rules(**mask, hidden=hidden),
        overview=read(given["overview"], "overview").float(),
        error=given["error"],
    )
    for name, x in found.items():
        setattr(made, name, x)
    return made
