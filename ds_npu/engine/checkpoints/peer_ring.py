"""A ring of connections over all ranks, each to a rank on another node where there is one: messages with files.

The connections are sockets, not a communicator: they carry bytes while collectives run, from any thread, and one that
ends without a farewell tells at once that the process at its other end is gone.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

HEADER = struct.Struct("!IQ")
"""The start of a message: the sizes in bytes of the JSON that follows, and of the file after the JSON."""
MOST_JSON = 2**20
KEEPALIVE_S = 10
"""Seconds without an answer after which the machine at the other end is taken for gone."""
CONNECT_S, LEAVING_S = 60.0, 10.0
FAREWELL = "farewell"
GONE = "gone"
"""Kinds of messages of the ring itself: the end of a rank that ends in order, and news of one that did not."""


@dataclass(frozen=True)
class RingMessage:
    """A message of one ``kind``: ``fields``, which JSON can hold, and ``data``, the bytes of a file."""

    kind: str
    fields: dict[str, Any]
    data: bytes | bytearray = b""


def ring_order(hosts: Sequence[str]) -> list[int]:
    """All ranks, one after the other such that neighbours are on different hosts where there are several."""
    seen: dict[str, int] = {}
    keys = []
    for rank, host in enumerate(hosts):
        keys.append((seen.get(host, 0), rank))
        seen[host] = seen.get(host, 0) + 1
    return [rank for _, rank in sorted(keys)]


class PeerRing:
    """This rank's two connections: to its holder, which receives its messages, and from the rank whose holder it is.

    All ranks make it at the same time. ``receive`` is called with each message, and ``gone`` with the rank that is
    gone, on a thread of the ring's.
    """

    def __init__(self, receive: Callable[[RingMessage], None], gone: Callable[[int], None]) -> None:
        self.rank, ranks = dist.get_rank(), dist.get_world_size()
        self._receive, self._gone = receive, gone
        listener = socket.create_server((_own_address(), 0))
        mine = (*listener.getsockname()[:2], secrets.token_hex(16), socket.gethostname())
        everyones: list[Any] = [None] * ranks
        dist.all_gather_object(everyones, mine)
        self.run = str(everyones[0][2])[:8]
        """A name of this run that no other one has."""
        order = ring_order([each[3] for each in everyones])
        at = order.index(self.rank)
        self.holder = order[(at + 1) % ranks]
        self.held = order[at - 1]
        """The rank that holds this one's files, and the one whose files this one holds."""
        address, port, token, _ = everyones[self.holder]
        self._out = socket.create_connection((address, port), CONNECT_S)
        self._out.sendall(token.encode())
        self._in = _accepted(listener, mine[2])
        for each in (self._out, self._in):
            each.settimeout(None)
            _keep_alive(each)
        self._outgoing: queue.SimpleQueue[RingMessage | None] = queue.SimpleQueue()
        self._is_left = False
        self._sender = threading.Thread(target=self._send, name="ds_npu peer sender", daemon=True)
        self._receiver = threading.Thread(target=self._read, name="ds_npu peer receiver", daemon=True)
        self._sender.start()
        self._receiver.start()

    def send(self, message: RingMessage) -> None:
        """Queue ``message`` for the holder, after all earlier ones; any thread may call it."""
        self._outgoing.put(message)

    def leave(self) -> None:
        """End in order: the holder is told that nothing more comes."""
        if not self._is_left:
            self._is_left = True
            self.send(RingMessage(FAREWELL, {}))
            self._outgoing.put(None)
            self._sender.join(LEAVING_S)

    def _send(self) -> None:
        while (message := self._outgoing.get()) is not None:
            text = json.dumps({"kind": message.kind, **message.fields}).encode()
            try:
                self._out.sendall(HEADER.pack(len(text), len(message.data)) + text)
                self._out.sendall(message.data)
            except OSError:
                # This rank's holder is gone: the holder of that one notices it by its own connection.
                return
        with suppress(OSError):
            self._out.shutdown(socket.SHUT_WR)

    def _read(self) -> None:
        while True:
            try:
                sizes = HEADER.unpack(_exactly(self._in, HEADER.size))
                fields = json.loads(_exactly(self._in, min(sizes[0], MOST_JSON)))
                message = RingMessage(fields.pop("kind"), fields, _exactly(self._in, sizes[1]))
            except (OSError, ValueError):
                message = RingMessage(GONE, {"rank": self.held})
            if message.kind == FAREWELL:
                return
            if message.kind != GONE:
                self._receive(message)
                continue
            self.send(message)
            self._gone(message.fields["rank"])
            if message.fields["rank"] == self.held:
                return


def _own_address() -> str:
    """The address at which other ranks find this one: of the interface through which it finds rank 0's machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))
            return str(asking.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())


def _accepted(listener: socket.socket, token: str) -> socket.socket:
    """The connection of the rank that knows ``token``; others are closed. Raises TimeoutError."""
    listener.settimeout(CONNECT_S)
    try:
        while True:
            found, _ = listener.accept()
            found.settimeout(CONNECT_S)
            with suppress(OSError):
                if secrets.compare_digest(bytes(_exactly(found, len(token))), token.encode()):
                    return found
            found.close()
    finally:
        listener.close()


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S // 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _exactly(connection: socket.socket, count: int) -> bytearray:
    """Read ``count`` bytes; raises ConnectionError, an OSError, where the connection ends before."""
    found = bytearray(count)
    view = memoryview(found)
    while len(view):
        read = connection.recv_into(view)
        if read == 0:
            raise ConnectionError("the connection has ended")
        view = view[read:]
    return found
