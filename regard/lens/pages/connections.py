"""Limiting the connections to the server that have not shown the access token.

Anybody on this machine can connect and send nothing. Such a connection is closed after `SECONDS_WITHOUT_TOKEN`, and the
oldest of them at once if there are more than `MAX_WITHOUT_TOKEN`; a connection that has shown the token stays open.
"""

from __future__ import annotations

import asyncio
from typing import Any

SECONDS_WITHOUT_TOKEN = 5.0
MAX_WITHOUT_TOKEN = 64


class Connections:
    """The open connections that have not shown the access token, by the client's address, the oldest first."""

    def __init__(self) -> None:
        self.waiting: dict[Any, asyncio.Transport] = {}

    def open(self, client: Any, transport: asyncio.Transport) -> None:
        """Adds a new connection, and closes the oldest that has not shown the token if there are too many."""
        self.waiting[client] = transport
        asyncio.get_running_loop().call_later(SECONDS_WITHOUT_TOKEN, self._expire, client, transport)
        while len(self.waiting) > MAX_WITHOUT_TOKEN:
            self.close(next(iter(self.waiting)))

    def admit(self, client: Any) -> None:
        """Lets a connection stay: a request on it has shown the token."""
        self.waiting.pop(client, None)

    def close(self, client: Any) -> None:
        """Closes a connection that has not shown the token, without a response."""
        transport = self.waiting.pop(client, None)
        if transport is not None:
            transport.abort()

    def forget(self, client: Any, transport: asyncio.Transport) -> None:
        """Drops a connection that has ended."""
        if self.waiting.get(client) is transport:
            del self.waiting[client]

    def _expire(self, client: Any, transport: asyncio.Transport) -> None:
        # The address may belong to a later connection by now.
        if self.waiting.get(client) is transport:
            self.close(client)


def protocol_of(connections: Connections) -> type[asyncio.Protocol]:
    """Returns uvicorn's HTTP protocol, which reports to `connections` whenever a connection opens or ends."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class CountedProtocol(H11Protocol):  # type: ignore[misc, unused-ignore]
        """uvicorn's HTTP protocol for one connection."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override, unused-ignore]
            super().connection_made(transport)
            connections.open(self.client, transport)

        def connection_lost(self, error: Exception | None) -> None:
            connections.forget(self.client, self.transport)
            super().connection_lost(error)

    return CountedProtocol
