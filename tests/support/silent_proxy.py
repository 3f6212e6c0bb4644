"""A proxy to a server that can fall silent: connections stay open, and nothing passes, as behind a tunnel."""

from __future__ import annotations

import contextlib
import re
import select
import socket
import threading
from collections.abc import Iterator

_BYTES = 1 << 16
_POLL_S = 0.02


class SilentProxy:
    """A proxy between 127.0.0.1:`port` and a server that passes bytes until it is asked to be silent."""

    def __init__(self, server_port: int) -> None:
        self._server = ("127.0.0.1", server_port)
        self._passing = threading.Event()
        self._passing.set()
        self._over = threading.Event()
        self.withheld: list[bytes] = []
        """The bytes from clients that were not passed on."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def fall_silent(self) -> None:
        """Stop passing bytes on. Bytes are still received, and every connection stays open."""
        self._passing.clear()

    def speak_again(self) -> None:
        """Pass bytes on again, on old and new connections. Connections that were silent have lost bytes."""
        self._passing.set()

    def close(self) -> None:
        self._over.set()
        self._listener.close()

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._pass, args=(client,), daemon=True).start()

    def _pass(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._server) as server, contextlib.suppress(OSError):
            is_whole = True
            while not self._over.is_set():
                ready, _, _ = select.select([client, server], [], [], _POLL_S)
                for end in ready:
                    data = end.recv(_BYTES)
                    is_whole = is_whole and self._passing.is_set()
                    if data and end is client and not is_whole:
                        self.withheld.append(data)
                    if not data and end is client:
                        return
                    if data and is_whole:
                        (server if end is client else client).sendall(data)
                    elif not data and is_whole:
                        return


@contextlib.contextmanager
def silent_proxy(dsn: str) -> Iterator[tuple[SilentProxy, str]]:
    """A proxy before the server of a DSN, and the DSN that leads through it."""
    found = re.search(r"port=(\d+)", dsn)
    assert found is not None
    proxy = SilentProxy(int(found[1]))
    try:
        yield proxy, dsn.replace(found[0], f"port={proxy.port}")
    finally:
        proxy.close()
