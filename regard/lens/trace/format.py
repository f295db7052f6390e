"""Encoding and decoding traces: a JSON header and binary blocks, specified in docs/trace-format.md."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.errors import quote
from regard.lens.trace.arrays import TraceError, pack, pack_steps, unpack
from regard.lens.trace.base91 import ALIGN, encode_base91, encoded_length
from regard.lens.trace.checks import Budget, check_attended, check_tokens
from regard.lens.trace.formulas import MAPS, Dense, Formula, KernelFormula, OneHot, RecurrenceFormula, SoftmaxFormula
from regard.lens.trace.precision import Storage, choose_precision, is_lossless
from regard.lens.trace.predictions import decode_predictions, encode_predictions
from regard.lens.trace.rules import MaskRules
from regard.lens.trace.tokens import Tokens
from regard.lens.trace.trace import Card, RecordedAttention, Recording, Trace
from regard.reading import check_hints, parse_json, read_bytes
from regard.storage import atomic_write
from regard.version import __version__

MAGIC = b"REGARD\x01\n"
VERSION = 2  # what is read; a trace without memories is written as version 1, so that older readers can read it
MAX_TRACE_BYTES = 1 << 32
LARGEST_HALF = 6e4  # below the largest finite float16, 65504
# Storage types of arrays that are packed whole; those of `_ARRAYS_BY_HEAD` are packed head by head.
_WHOLE_ARRAYS = {"n": "f32", "sign": "f32", "choice": "i32", "w": "f32", "cq": "f32", "ck": "f32", "slopes": "f32"}
_WHOLE_ARRAYS |= {"offsets": "f32", "vo": "f32", "b": "f32", "skip": "f32"}
_ARRAYS_BY_HEAD = ("q", "k", "v", "g", "a")
_ESCAPED = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


@dataclass(frozen=True)
class Encoded:
    """A trace ready to be written; its size is known before writing."""

    header: dict[str, Any]
    blocks: list[bytes]

    @property
    def header_bytes(self) -> bytes:
        """The header as UTF-8 JSON."""
        return _header_to_bytes(self.header)

    @property
    def size(self) -> int:
        """The size of the .trace file in bytes."""
        return len(MAGIC) + 8 + len(self.header_bytes) + sum(map(len, self.blocks))

    @property
    def page_size(self) -> int:
        """The size in bytes of the trace inside an HTML page."""
        blocks = (len(_block_element(n, "")) + encoded_length(len(block)) for n, block in enumerate(self.blocks))
        return len(self._header_element().encode()) + sum(blocks)

    def write(self, path: str | Path) -> None:
        """Writes a .trace file atomically: an earlier file is replaced only once this one is complete on disk."""
        with atomic_write(path) as file:
            for part in self._parts():
                file.write(part)

    def _parts(self) -> Iterator[bytes]:
        document = self.header_bytes
        yield MAGIC + len(document).to_bytes(8, "little") + document
        yield from self.blocks

    def elements(self) -> Iterator[str]:
        """Yields the script elements that carry the trace in a page: the header, then the blocks; none is executed."""
        yield self._header_element()
        for number, block in enumerate(self.blocks):
            yield _block_element(number, encode_base91(block))

    def _header_element(self) -> str:
        document = escape_json(self.header_bytes.decode())
        return f'<script type="application/json" id="trace">{document}</script>\n'


def escape_json(document: str) -> str:
    """Returns equivalent JSON for a script element, without any character that could end the element."""
    return document.translate(_ESCAPED)


def _block_element(number: int, text: str) -> str:
    return f'<script type="text/plain" id="block-{number}">{text}</script>\n'


def to_bytes(encoded: Encoded) -> bytes:
    """Returns the bytes of a .trace file."""
    return b"".join(encoded._parts())


def encode(trace: Trace) -> Encoded:
    """Encodes a trace: a header, a block with all overviews, and one for each attention module and for predictions."""
    blocks = [bytearray()]
    cards = list(dict.fromkeys(recording.model for recording in trace.recordings))
    recordings = []
    for recording in trace.recordings:
        attentions = []
        for attended in recording.attentions:
            blocks.append(bytearray())
            attentions.append(_encode_attention(recording, attended, blocks))
        predictions = None
        if recording.predictions is not None:
            blocks.append(bytearray())
            predictions = encode_predictions(recording.predictions, partial(_put_tensor, blocks))
        recordings.append(
            {
                "name": recording.name,
                "model": cards.index(recording.model),
                "sequences": [tokens.as_dict() for tokens in recording.sequences],
                "attentions": attentions,
                "loss": recording.loss,
                "labels": recording.labels,
                "predictions": predictions,
            }
        )
    header = {
        "format": "regard-trace",
        "version": VERSION if _holds_memories(trace) else 1,
        "made_by": f"regard {__version__}",
        "blocks": [len(block) for block in blocks],
        "models": [card.as_dict() for card in cards],
        "recordings": recordings,
    }
    return Encoded(header | {"check": _checksum(header)}, [bytes(block) for block in blocks])


def _holds_memories(trace: Trace) -> bool:
    attentions = (attended for recording in trace.recordings for attended in recording.attentions)
    return any(isinstance(attended.formula, RecurrenceFormula) for attended in attentions)


def _header_to_bytes(header: dict[str, Any]) -> bytes:
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "replace")  # a lone surrogate, which a token may contain, becomes "?"


def _checksum(header: dict[str, Any]) -> int:
    """Returns the CRC-32 of a header without its "check" field."""
    return zlib.crc32(_header_to_bytes({name: x for name, x in header.items() if name != "check"}))


def save(trace: Trace, path: str | Path) -> int:
    """Writes a .trace file and returns its size in bytes."""
    encoded = encode(trace)
    encoded.write(path)
    return encoded.size


def load(path: str | Path) -> Trace:
    """Reads a .trace file; raises TraceError if it cannot be read or is damaged."""
    path = Path(path)
    return decode(read_bytes(path, TraceError, MAX_TRACE_BYTES), str(path))


def decode(raw: bytes, source: str = "the trace") -> Trace:
    """Decodes the bytes of a .trace file; nothing in them is executed.

    `source` names the file in error messages. Raises TraceError if the bytes are damaged or of a newer version.
    """
    if raw[:8] != MAGIC:
        raise TraceError(f"{source} is no trace, or one of another version: expected a file that begins with 'REGARD'")
    start = 16 + int.from_bytes(raw[8:16], "little")
    try:
        header = parse_json(raw[16:start], f"{source}: its header", TraceError)
        if header["format"] != "regard-trace" or not isinstance(header["version"], int):
            raise TraceError(f"{source}: format {quote(header['format'])}, expected 'regard-trace'")
        if header["version"] > VERSION:
            raise TraceError(
                f"{source} has version {quote(header['version'])}, this regard knows {VERSION}: update regard"
            )
        if header.get("check") not in (None, _checksum(header)):
            raise TraceError(f"{source}: its header is damaged; copy or record it again")
        lengths = [int(n) for n in header["blocks"]]
        if min(lengths, default=0) < 0 or start + sum(lengths) != len(raw):
            raise TraceError(f"{source} has {len(raw)} bytes, expected {start + sum(lengths)}: cut off; copy it again")
        blocks = []
        for n in lengths:
            blocks.append(raw[start : start + n])
            start += n
        cards = [_decode_card(card, source) for card in header["models"]]
        budget = Budget(len(raw))
        return Trace([_decode_recording(x, cards, blocks, budget, source) for x in header["recordings"]])
    except TraceError:
        raise
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError, OverflowError) as error:
        raise TraceError(
            f"{source}: its header is damaged ({type(error).__name__}: {quote(error)}); record it again"
        ) from None


def _put(blocks: list[bytearray], number: int, raw: bytes, kind: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Appends packed bytes to a block, and returns the header entry that locates them."""
    block = blocks[number]
    block.extend(bytes(-len(block) % ALIGN))  # so that a page can decode an array on its own
    entry = {"block": number, "at": len(block), "bytes": len(raw), "type": kind, "shape": list(shape)}
    block.extend(raw)
    return entry


def _put_tensor(blocks: list[bytearray], x: Tensor, kind: str) -> dict[str, Any]:
    """Appends a tensor to the last block, and returns the header entry that locates it."""
    return _put(blocks, len(blocks) - 1, pack(x, kind), kind, tuple(x.shape))


def _encode_attention(recording: Recording, attended: RecordedAttention, blocks: list[bytearray]) -> dict[str, Any]:
    """Appends the arrays of one attention module to the last block, and its overview to the first.

    Returns the header entry of the module.
    """
    here = len(blocks) - 1

    def put(x: Tensor, kind: str) -> dict[str, Any]:
        return _put(blocks, here, pack(x, kind), kind, tuple(x.shape))

    def put_heads(x: Tensor, storage: Sequence[Storage]) -> list[dict[str, Any]]:
        packed = _pack_heads(x, storage)
        return [
            _put(blocks, here, raw, kind, tuple(y.shape)) for y, raw, (kind, _) in zip(x, packed, storage, strict=True)
        ]

    arrays: dict[str, Any] = {}
    error = [0.0] * attended.heads
    if attended.q is not None and attended.k is not None:
        stored = choose_precision(recording, attended)
        arrays["q"] = put_heads(stored.q, stored.q_storage)
        arrays["k"] = put_heads(stored.k, stored.k_storage)
        attended = replace(attended, n=stored.n)
        error = stored.error
    for name, kind in _WHOLE_ARRAYS.items():
        if (x := getattr(attended, name)) is not None:
            arrays[name] = put(x, kind)
    # The weights of a memory times v are the layer's output only if v is stored without loss.
    exact = isinstance(attended.formula, RecurrenceFormula) or is_lossless(recording)
    for name in ("v", "g"):
        if (x := getattr(attended, name)) is not None:
            arrays[name] = put_heads(x, [("f32" if exact or not bool(y.isfinite().all()) else "step", None) for y in x])
    if attended.a is not None:
        arrays["a"] = put_heads(attended.a, [("f32", None)] * len(attended.a))
    if attended.rules.hidden is not None:
        arrays["hidden"] = put(attended.rules.hidden, "bit")
    if isinstance(attended.formula, Dense):
        arrays["tiles"] = _encode_tiles(attended, attended.formula, recording, blocks)
        error = attended.error or error
    assert attended.overview is not None
    shape = tuple(attended.overview.shape)
    overview = attended.overview
    overview_type = "f32"
    if float(overview.abs().amax()) < LARGEST_HALF:  # weights that may be negative have no bound
        overview = _shorten(overview)
        overview_type = "f16"
    return {
        **{n: getattr(attended, n) for n in ("layer", "side", "kind", "name", "mechanism", "queries", "keys")},
        **{n: getattr(attended, n) for n in ("heads", "groups", "signed", "figures")},
        "weights": attended.formula.as_dict(),
        "mask": attended.rules.as_dict(),
        "bias": [name for name in ("slopes", "offsets") if getattr(attended, name) is not None],
        "arrays": arrays,
        "overview": _put(blocks, 0, pack(overview, overview_type), overview_type, shape),
        "error": error,
        **({"missed": attended.missed} if attended.missed else {}),
    }


def _pack_heads(x: Tensor, storage: Sequence[Storage]) -> list[bytes]:
    """Returns the packed bytes of each head, by as many threads as PyTorch has: zlib and NumPy release the GIL."""

    def packed(head: Tensor, stored: Storage) -> bytes:
        kind, step = stored
        return pack(head, kind) if step is None else pack_steps(head, step)

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return list(pool.map(packed, x, storage))


def _shorten(x: Tensor) -> Tensor:
    """Returns x in float16, rounded to 7 bits of mantissa: more would not be visible in a thumbnail."""
    return ((x.half().view(torch.int16) + 4) & -8).view(torch.half)  # adding 4 and clearing the lowest 3 bits rounds


def _encode_tiles(
    attended: RecordedAttention, dense: Dense, recording: Recording, blocks: list[bytearray]
) -> list[Any]:
    """Appends the tiles of all heads to the last block, and returns their header entries, one list per head."""
    T, S = (len(x) for x in recording.query_and_key_tokens(attended))
    return [
        [
            _put(blocks, len(blocks) - 1, raw, "f16", (min(dense.tile, T - n * dense.tile), S))
            for n, raw in enumerate(tiles)
        ]
        for tiles in dense.tiles
    ]


def _decode_card(entry: dict[str, Any], source: str) -> Card:
    """Returns the card that a header entry describes."""
    fields = dict(entry)
    fields["cls"] = fields.pop("class")
    fields["mechanisms"] = tuple(fields["mechanisms"])
    card = Card(**fields)
    check_hints(card, source, TraceError)
    return card


def _decode_recording(
    entry: dict[str, Any], cards: list[Card], blocks: list[bytes], budget: Budget, source: str
) -> Recording:
    """Returns the recording that a header entry describes."""
    sequences = [Tokens(**x) for x in entry["sequences"]]
    for tokens in sequences:
        check_tokens(tokens, source)
    recording = Recording(entry["name"], cards[entry["model"]], sequences, [], entry["loss"], entry["labels"])
    check_hints(recording, source, TraceError)
    for number, x in enumerate(entry["attentions"]):
        recording.attentions.append(_decode_attended(x, sequences, blocks, budget, f"{source}, attention {number}"))
    if entry.get("predictions") is not None:
        heads = [attended.heads for attended in recording.attentions]
        read = partial(_read_array, blocks, budget, source)
        recording.predictions = decode_predictions(entry["predictions"], list(map(len, sequences)), heads, read, source)
    return recording


def _raw_array(blocks: list[bytes], source: str, x: dict[str, Any]) -> bytes:
    """Returns the packed bytes of an array, which the header entry `x` locates."""
    block = blocks[x["block"]]
    if not 0 <= x["at"] <= x["at"] + x["bytes"] <= len(block):
        raise TraceError(
            f"{source}: bytes {x['at']} to {x['at'] + x['bytes']} of a block of {len(block)}; record it again"
        )
    return bytes(block[x["at"] : x["at"] + x["bytes"]])


def _read_array(blocks: list[bytes], budget: Budget, source: str, x: dict[str, Any], name: str) -> Tensor:
    """Returns the tensor of the array that the header entry `x` locates; `name` names it in error messages."""
    budget.take(x["shape"], source)
    return unpack(_raw_array(blocks, source, x), x["type"], x["shape"], f"{source}, array {name}")


def _decode_attended(
    entry: dict[str, Any], sequences: list[Tokens], blocks: list[bytes], budget: Budget, source: str
) -> RecordedAttention:
    """Decodes one attention module from its header entry; raises TraceError if its parts are inconsistent."""
    arrays = entry["arrays"]
    raw = partial(_raw_array, blocks, source)
    read = partial(_read_array, blocks, budget, source)

    tensors: dict[str, Tensor] = {name: read(arrays[name], name) for name in _WHOLE_ARRAYS if name in arrays}
    for name in _ARRAYS_BY_HEAD:
        if name in arrays:
            tensors[name] = torch.stack([read(x, name) for x in arrays[name]]).float()
    if "choice" in tensors:
        tensors["choice"] = tensors["choice"].long()
    mask = dict(entry["mask"])
    if mask.pop("hidden"):
        mask["hidden"] = read(arrays["hidden"], "hidden")
    tiles = [[raw(x) for x in head] for head in arrays.get("tiles", ())]
    same = ("layer", "side", "kind", "name", "mechanism", "queries", "keys", "heads", "groups", "signed", "figures")
    attended = RecordedAttention(
        **{name: entry[name] for name in same},
        formula=_decode_formula(entry["weights"], tiles, source),
        rules=MaskRules(**mask),
        overview=read(entry["overview"], "overview").float(),
        error=entry["error"],
        missed=entry.get("missed", {}),
    )
    for name, x in tensors.items():
        setattr(attended, name, x)
    check_attended(attended, sequences, source)
    return attended


def _decode_formula(weights: dict[str, Any], tiles: list[list[bytes]], source: str) -> Formula:
    """Returns the formula that the "weights" of a header entry describe."""
    kind = weights["kind"]
    if kind == "softmax":
        return SoftmaxFormula(weights["scale"], weights["softcap"])
    if kind == "feature" and weights["map"] in MAPS:
        return KernelFormula(weights["map"])
    if kind == "dense":
        return Dense(weights["tile"], tiles)
    if kind == "onehot":
        return OneHot()
    if kind == "recurrence":
        return RecurrenceFormula(weights["scale"], weights["erases"])
    raise TraceError(f"{source}: weights of kind {quote(kind)} are unknown to this regard; update it")
