"""A local server for the lens: type a text to see its attention, or let the model continue it and watch each step.

The server is reachable only from this machine, and only with the access token: every request is checked for its Host
and Origin, then for the access token, and only then handled. No files are served; the script is part of the page.
There are five routes:

GET /                 the page
POST /record          a trace
POST /generate        JSON lines: the input tokens, one line for each generated token, and why generation ended
POST /ablate          what the model predicts and writes with all heads and without some
POST /contributions   what each head adds to a token's logit
"""

from __future__ import annotations

import asyncio
import base64
import errno
import html
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from importlib.util import find_spec
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from regard.devices import explain_memory
from regard.errors import ExtraMissingError, LengthError, OptionError, RegardError
from regard.generate import Settings
from regard.lens.heads.ablation import self_attention_layers
from regard.lens.models import RecordableModel, Sample
from regard.lens.pages.connections import Connections, protocol_of
from regard.lens.pages.gate import MAX_BODY_BYTES, Gate
from regard.lens.pages.live import Step, context_length, generate_steps, generates, model_detokenizer, vocabulary_size
from regard.lens.pages.page import PAGE_CSS, policy
from regard.lens.pages.questions import logit_contributions, removed_heads, with_and_without
from regard.lens.trace.format import encode, escape_json, to_bytes
from regard.lens.trace.trace import Trace
from regard.reading import parse_json

MAX_TOKENS = 4096  # largest number of input tokens
MAX_NEW_TOKENS = 1000  # largest number of tokens generated per request
MAX_SECONDS = 120  # time limit for generating
TIMEOUT_SECONDS = 30  # time limit for receiving a request's body, and for waiting until the model is free
EXAMPLE = "The dog ran to the red house, and the dog saw the red door."
# Generation settings that a request may contain.
REQUEST_SETTINGS = ("max_tokens", "temperature", "top_k", "top_p", "seed")
_START = (
    'regardLens.live(document.getElementById("lens"),document.getElementById("talk"),'
    'JSON.parse(document.getElementById("about").textContent));'
)


class ServeError(RegardError, OSError):
    """The server cannot start."""


class _Refused(Exception):
    """Raised to answer a request with an HTTP status and an error message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class SharedModel:
    """A model that several browser tabs share; requests take turns."""

    def __init__(
        self, recordable: RecordableModel, labels: list[dict[str, Any]] | None = None, example: str = EXAMPLE
    ) -> None:
        if not recordable.reads_text:
            raise OptionError(
                f"{recordable.card.name} reads no text but {recordable.model.main_input_name}: record it with "
                "regard.record and write its page with regard.lens.pages.page.write_page"
            )
        self.recordable = recordable
        self.labels = labels
        self.example = example
        self._lock = Lock()
        self._layers: dict[str, int] | None = None  # heads of each self-attention module

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Holds the model for one pass; raises _Refused(503) if it stays busy, ResourceError if memory runs out."""
        if not self._lock.acquire(timeout=TIMEOUT_SECONDS):
            raise _Refused(503, "the model is busy with other requests; try again")
        try:
            with explain_memory("asking the model", "Type a shorter text, or serve a smaller model"):
                yield
        finally:
            self._lock.release()

    def about(self) -> dict[str, Any]:
        """Returns the data that the page embeds: the model's card, an example text and limits."""
        return {
            "model": self.recordable.card.as_dict(),
            "example": self.example,
            "generates": generates(self.recordable),
            "pairs": self.recordable.reads_pairs,
            "target": self.recordable.has_decoder_of_its_own,
            "tokens": self.max_tokens,
            "written": MAX_NEW_TOKENS,
        }

    @property
    def max_tokens(self) -> int:
        """The maximum number of input tokens."""
        return min(MAX_TOKENS, context_length(self.recordable) or MAX_TOKENS)

    def record(self, request: dict[str, Any]) -> bytes:
        """Returns the bytes of the trace of request["text"], or of request["ids"].

        Of the ids, the first request["prompt"] are marked as given and the rest as generated. request["pair"] is the
        second text of a pair, and request["target"] what the decoder of an encoder-decoder is given.
        """
        prompt = None
        text: str | list[int]
        if request.get("ids") is None:
            text = _text(request)
        else:
            prompt = request.get("prompt")
            text = _checked_ids(request["ids"], prompt)
        sample = Sample(text, _optional_text(request, "pair"), _optional_text(request, "target"))
        self._ids(sample)  # raises for an invalid request before waiting for the model
        with self.turn():
            recording = self.recordable.record(sample.text, pair=sample.pair, target=sample.target).recordings[0]
        if prompt is not None:
            recording.sequences[0].mark_generated(prompt)
        recording.name = str(request.get("name", "text"))[:80]
        recording.labels = self.labels
        return to_bytes(encode(Trace([recording])))

    def ablate(self, request: dict[str, Any]) -> dict[str, Any]:
        """Returns the next tokens and the continuation of a text, with all heads and without request["heads"]."""
        settings = _settings(request)
        ids = self._ids(_text(request))
        if self._layers is None:
            with self.turn():
                found = self_attention_layers(self.recordable, ids[:2])
            self._layers = {layer["name"]: heads for layer, heads in found}
        heads = removed_heads(request.get("heads"), self._layers)
        return with_and_without(self.recordable, ids, heads, settings, self.turn, MAX_SECONDS / 2)

    def contributions(self, request: dict[str, Any]) -> dict[str, Any]:
        """Returns what each head adds to the logit of request["token"] after the token at request["position"]."""
        ids = _checked_ids(request.get("ids"), None)
        self._check_ids(ids)
        with self.turn():
            return logit_contributions(self.recordable, ids, request.get("position"), request.get("token"))

    def generate(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields one dict for the input tokens, one for each generated token and its weights, and one for the end."""
        settings = _settings(request)
        ids = self._ids(_text(request))
        return self._lines(ids, generate_steps(self.recordable, ids, settings, self.turn), settings)

    def _lines(self, ids: list[int], steps: Iterator[Step], settings: Settings) -> Iterator[dict[str, Any]]:
        """Yields the dicts of `generate`."""
        detokenizer = model_detokenizer(self.recordable)
        yield {"kind": "start", "ids": ids, "tokens": [detokenizer.push(i) for i in ids]}
        deadline = time.monotonic() + MAX_SECONDS
        written = []
        why = "end"
        for step in steps:
            written.append(step.token)
            line = {"kind": "token", "id": step.token, "text": step.text, "p": round(step.p, 6)}
            yield line | _quantised(step.weights)
            if time.monotonic() > deadline:
                why = "time"
                break
        else:
            longest = context_length(self.recordable)
            if len(written) == settings.max_tokens:
                why = "max"
            elif longest is not None and len(ids) + len(written) > longest:
                why = "full"
        yield {"kind": "end", "why": why, "ids": [*ids, *written]}

    def _ids(self, text: str | Sample) -> list[int]:
        ids = self.recordable.ids(text)
        self._check_ids(ids)
        return ids

    def _check_ids(self, ids: list[int]) -> None:
        """Raises an error for no tokens, too many, or some that the model does not have."""
        if not ids:
            raise OptionError("the text is empty: type something")
        if len(ids) > self.max_tokens:
            raise LengthError(f"the text has {len(ids)} tokens; this model and server read at most {self.max_tokens}")
        size = vocabulary_size(self.recordable)
        if max(ids) >= size:
            raise OptionError(f"token {max(ids)}: this model's vocabulary is 0 to {size - 1}")


def _settings(request: dict[str, Any]) -> Settings:
    settings = Settings().but(**{name: request[name] for name in REQUEST_SETTINGS if request.get(name) is not None})
    if settings.max_tokens > MAX_NEW_TOKENS:
        raise OptionError(f"max_tokens = {settings.max_tokens}: at most {MAX_NEW_TOKENS} are generated at a time")
    return settings


def _text(request: dict[str, Any]) -> str:
    text = request.get("text")
    if not isinstance(text, str):
        raise OptionError('expected {"text": "…"}')
    return text


def _optional_text(request: dict[str, Any], name: str) -> str | None:
    text = request.get(name)
    if text is not None and not isinstance(text, str):
        raise OptionError(f'expected {{"{name}": "…"}}')
    return text or None


def _checked_ids(ids: Any, prompt: Any) -> list[int]:
    whole = isinstance(ids, list) and len(ids) <= MAX_TOKENS and all(type(i) is int and i >= 0 for i in ids)
    if not whole or not (prompt is None or (type(prompt) is int and 0 < prompt <= len(ids))):
        raise OptionError('expected {"ids": [whole numbers], "prompt": how many of them were given}')
    return list(ids)


def _quantised(weights: list[Tensor]) -> dict[str, Any]:
    """Returns the rows of all heads, concatenated and quantised to signed bytes: a weight is scale · byte / 127."""
    rows = torch.cat(weights)
    scale = float(rows.abs().amax().clamp(min=1e-9))
    quantised = (rows / scale * 127).round().to(torch.int8)
    return {
        "heads": [len(w) for w in weights],
        "scale": scale,
        "weights": base64.b64encode(quantised.numpy().tobytes()).decode(),
    }


def document(server: SharedModel) -> tuple[str, str]:
    """Returns the HTML page, and its Content-Security-Policy: one script, and connections to this server only."""
    static = files("regard.lens").joinpath("static")
    script = static.joinpath("lens.js").read_text("utf-8") + _START
    style = PAGE_CSS + static.joinpath("lens.css").read_text("utf-8")
    about = escape_json(json.dumps(server.about(), ensure_ascii=False))
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{html.escape(server.recordable.card.name)} · regard</title>\n<style>{style}</style>\n</head>\n<body>\n"
        '<div id="talk" class="lens talk" data-theme="auto"></div>\n'
        '<div id="lens" class="lens" data-theme="auto"></div>\n'
        "<noscript>The lens draws with JavaScript; it talks to nobody but this machine.</noscript>\n"
        f'<script type="application/json" id="about">{about}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )
    return page, policy(script, style) + "; connect-src 'self'; frame-ancestors 'none'"


def create(server: SharedModel, port: int, token: str, connections: Connections | None = None) -> Any:
    """Returns the ASGI app: `Gate` checks each request and passes it to the routes; `token` is the access token.

    The gate tells `connections` which of them have shown the token.
    """
    require_server_packages()
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route

    page, policies = document(server)

    async def home(request: Request) -> Response:
        return Response(page, media_type="text/html", headers={"content-security-policy": policies})

    async def record(request: Request) -> Response:
        raw = await run_in_threadpool(server.record, await _body(request))
        return Response(raw, media_type="application/octet-stream")

    async def generate(request: Request) -> Response:
        # Raises for an invalid request here, before the response begins.
        lines = server.generate(await _body(request))

        async def stream() -> AsyncIterator[str]:
            try:
                # If the client disconnects, this is cancelled between two steps.
                while (line := await run_in_threadpool(next, lines, None)) is not None:
                    yield json.dumps(line, ensure_ascii=False) + "\n"
            except (RegardError, _Refused) as error:
                yield json.dumps({"kind": "error", "message": str(error)}) + "\n"

        return StreamingResponse(stream(), media_type="application/x-ndjson")

    async def ablate(request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(server.ablate, await _body(request)))

    async def contributions(request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(server.contributions, await _body(request)))

    async def wrong(request: Request, error: Exception) -> Response:
        if isinstance(error, _Refused):
            # Nothing more of the request is read.
            return PlainTextResponse(str(error), error.status, {"connection": "close"})
        return PlainTextResponse(str(error), 400)

    app = Starlette(
        routes=[
            Route("/", home, methods=["GET"]),
            Route("/record", record, methods=["POST"]),
            Route("/generate", generate, methods=["POST"]),
            Route("/ablate", ablate, methods=["POST"]),
            Route("/contributions", contributions, methods=["POST"]),
        ],
        exception_handlers={RegardError: wrong, _Refused: wrong},
    )
    return Gate(app, port, token, connections)


async def _body(request: Any) -> dict[str, Any]:
    """Returns the JSON object in a request's body; raises _Refused if it is too large, too slow, or not JSON."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise _Refused(415, "expected application/json")
    raw = bytearray()
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            async for part in request.stream():
                raw += part
                if len(raw) > MAX_BODY_BYTES:
                    raise _Refused(413, f"the request is larger than {MAX_BODY_BYTES:,} bytes: send a shorter text")
    except TimeoutError:
        raise _Refused(408, f"the request took longer than {TIMEOUT_SECONDS} seconds") from None
    asked = parse_json(bytes(raw), "the request", OptionError)
    if not isinstance(asked, dict):
        raise _Refused(400, "expected a JSON object")
    return asked


def serve(server: SharedModel, port: int, ready: Callable[[str], None], token: str | None = None) -> None:
    """Serves until interrupted; port 0 means any free port. `ready(address)` is called once the port is open."""
    require_server_packages()
    token = token or secrets.token_urlsafe(24)
    with _bind(port) as bound:
        port = bound.getsockname()[1]
        made = build_server(server, port, token)
        ready(f"http://127.0.0.1:{port}/?token={token}")
        made.run(sockets=[bound])


def build_server(server: SharedModel, port: int, token: str) -> Any:
    """Returns uvicorn's server, on which connections without the token make room for those with it."""
    import uvicorn

    connections = Connections()
    config = uvicorn.Config(
        create(server, port, token, connections),
        http=protocol_of(connections),
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="off",
        timeout_keep_alive=5,
        timeout_graceful_shutdown=2,
    )
    return uvicorn.Server(config)


def _bind(port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(("127.0.0.1", port))
        made.listen(128)  # listens now, so that no other process can take the port
    except OSError as error:
        made.close()
        if error.errno == errno.EADDRINUSE:
            raise ServeError(
                f"port {port} is in use; choose another with --port, or --port 0 for any that is free"
            ) from None
        raise ServeError(f"port {port} cannot be opened: {error.strerror}; choose another with --port") from None
    return made


def require_server_packages() -> None:
    """Raises ExtraMissingError if starlette or uvicorn is not installed."""
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise ExtraMissingError('serving needs `starlette` and `uvicorn`: pip install "regard[serve]"')
