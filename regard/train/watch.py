"""Ends a process of a training when another process has ended, even while it waits for that one in a collective.

Over gloo a collective fails as soon as a peer has ended. Over nccl it may wait for minutes, inside a call that Python
cannot interrupt. So every process keeps an idle TCP connection to rank 0 while it trains, and a thread that waits for
it to close. The kernel closes it when a process is killed, and by keep-alive when a machine is gone. Rank 0 then tells
all others which rank was lost. A process whose training has not failed by itself `GRACE_S` later is ended with a line.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from threading import Event, Thread

import torch

from regard.train.distributed import Process
from regard.train.rendezvous import ProcessError

GRACE_S = 15.0  # seconds in which a training may fail by itself, with its own message
CONNECT_S = 60.0  # seconds in which every process must have connected
DONE = b"done"
TOKEN_BYTES = 16

Connections = Mapping[int, socket.socket]


@contextmanager
def watch_peers(process: Process) -> Iterator[None]:
    """Watches the other processes until the body ends. If one ends before, this one does too, at most `GRACE_S` later.

    All processes must enter it. Leaving it by an error tells the others that this process has ended.
    """
    if process.world_size == 1:
        yield
        return
    connections = _connect_to_main(process)
    stop = Event()
    Thread(target=_watch, args=(connections, stop, _end_process, GRACE_S), daemon=True).start()
    try:
        yield
        for connection in connections.values():
            _send(connection, DONE)
    finally:
        stop.set()
        for connection in connections.values():
            with suppress(OSError):  # the other side may have closed it
                connection.shutdown(socket.SHUT_RDWR)


def _connect_to_main(process: Process) -> Connections:
    """Returns the connections of this process by rank: those of rank 0 to all others, those of the others to rank 0.

    The port and a token, without which nobody is let in, come through the process group.
    """
    with ExitStack() as stack:
        secret = torch.zeros(TOKEN_BYTES + 1, dtype=torch.int64)
        if process.is_main:
            server = stack.enter_context(_listen())
            secret = torch.tensor([server.getsockname()[1], *secrets.token_bytes(TOKEN_BYTES)])
        port, *token = process.broadcast(secret).tolist()
        try:
            if process.is_main:
                return _accept(server, bytes(token), process.world_size)
            address = (os.environ["MASTER_ADDR"], port)
            connection = socket.create_connection(address, CONNECT_S)
            connection.sendall(bytes(token) + process.rank.to_bytes(4, "big"))
        except OSError as error:
            raise ProcessError(f"rank {process.rank} has no connection to rank 0, port {port}: {error}") from error
        return {0: _kept_alive(connection)}


def _listen() -> socket.socket:
    """Returns a socket that listens on a free port, on IPv6 too where the system can."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def _accept(server: socket.socket, token: bytes, world_size: int) -> Connections:
    """Returns the connection of every other rank. One that does not show the token is closed."""
    server.settimeout(CONNECT_S)
    connections: dict[int, socket.socket] = {}
    while len(connections) < world_size - 1:
        connection, _ = server.accept()
        connection.settimeout(5.0)
        shown = b""
        with suppress(OSError):
            shown = connection.recv(TOKEN_BYTES + 4, socket.MSG_WAITALL)
        rank = int.from_bytes(shown[TOKEN_BYTES:], "big")
        if not secrets.compare_digest(shown[:TOKEN_BYTES], token) or rank in connections:
            connection.close()
            continue
        connections[rank] = _kept_alive(connection)
    return connections


def _kept_alive(connection: socket.socket) -> socket.socket:
    """Makes the kernel close a connection whose machine has not answered for half a minute, and returns it."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}.items():
        if hasattr(socket, name):  # not every system has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def _watch(connections: Connections, stop: Event, end: Callable[[int], None], grace: float) -> None:
    """Waits until a connection closes without DONE, tells the others, and calls `end` after `grace` seconds."""
    with ExitStack() as stack:
        for connection in connections.values():
            stack.enter_context(connection)
        lost = _wait_for_loss(connections, stop)
        if lost is None:
            return
        for connection in connections.values():
            _send(connection, str(lost).encode())
        if not stop.wait(grace):
            end(lost)


def _wait_for_loss(connections: Connections, stop: Event) -> int | None:
    """Returns the rank whose process has ended before it was done; None if all were, or the watch was stopped."""
    with selectors.DefaultSelector() as selector:
        for rank, connection in connections.items():
            selector.register(connection, selectors.EVENT_READ, rank)
        while selector.get_map():
            for key, _ in selector.select():
                if stop.is_set():
                    return None
                said = _receive(connections[key.data])
                if said != DONE:
                    return int(said or key.data)  # rank 0 says whom it lost
                selector.unregister(key.fileobj)
    return None


def _receive(connection: socket.socket) -> bytes:
    """Returns the next message of a peer; b"" if the connection is closed or broken."""
    try:
        return connection.recv(64)
    except OSError:
        return b""


def _send(connection: socket.socket, message: bytes) -> None:
    """Sends a message to a peer, which may have ended meanwhile."""
    with suppress(OSError):
        connection.sendall(message)


def _end_process(lost: int) -> None:
    """Ends this process, whose main thread waits where no exception reaches it, with a line."""
    message = f"error: process {lost} has ended, see what it says; this one waited {GRACE_S:.0f} s for it and ends too"
    print(message, file=sys.stderr, flush=True)
    os._exit(2)
