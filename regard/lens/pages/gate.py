"""Access control of the server: each request's Host, Origin and access token are checked before anything else."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from hmac import compare_digest
from typing import Any

from regard.lens.pages.connections import Connections

MAX_BODY_BYTES = 1 << 18  # largest request body
_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Gate:
    """ASGI middleware that refuses requests for another host, from another origin, or without the access token."""

    def __init__(self, app: Any, port: int, token: str, connections: Connections | None = None) -> None:
        self.app = app
        self.connections = connections or Connections()
        self.token = token
        self.hosts = {f"{name}:{port}".encode() for name in ("127.0.0.1", "localhost")}

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        refusal = self._find_refusal(scope)
        if refusal is not None:
            await _answer(receive, send, *refusal)
            return
        self.connections.admit(scope.get("client"))

        async def send_with_headers(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in _HEADERS.items())]
            await send(message)

        await self.app(scope, receive, send_with_headers)

    def _find_refusal(self, scope: dict[str, Any]) -> tuple[int, str] | None:
        """Returns the HTTP status and the message with which a request is refused; None if it is not refused."""
        given: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            given.setdefault(name, []).append(value)
        host = given.get(b"host", [])
        origin = given.get(b"origin", [])
        if len(host) != 1 or host[0].lower() not in self.hosts:
            return 421, "this server answers only for this machine: open the address that regard serve printed"
        if any(page.lower() != b"http://" + host[0].lower() for page in origin):
            return 403, "this server answers only its own page"
        if scope["path"] == "/":
            tokens = [part[6:] for part in scope["query_string"].split(b"&") if part.startswith(b"token=")]
        else:
            tokens = [x[7:] for x in given.get(b"authorization", []) if x.startswith(b"Bearer ")]
        if len(tokens) != 1 or not compare_digest(tokens[0], self.token.encode()):
            return 403, "the token is missing or wrong: open the whole address that regard serve printed"
        return None


async def _answer(receive: Any, send: Any, status: int, message: str) -> None:
    """Sends a response without calling the app.

    The request body is drained first (up to MAX_BODY_BYTES, for at most a second): closing a connection with unread
    bytes resets it, and the response may be lost.
    """
    taken = 0
    more = True
    with suppress(TimeoutError):
        async with asyncio.timeout(1):
            while more and taken <= MAX_BODY_BYTES:
                part = await receive()
                taken += len(part.get("body", b""))
                more = part.get("more_body", False)
    raw = message.encode()
    headers = {
        "content-type": "text/plain; charset=utf-8",
        "content-length": str(len(raw)),
        "connection": "close",
        **_HEADERS,
    }
    start = [(k.encode(), v.encode()) for k, v in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": raw})
