"""A proxy to a port of this host that delays each exchange: `python -m benchmarks.slow_line PORT MS`.

Prints the port that it listens on. Each direction adds half of the delay, and delays of data parts overlap.
"""

from __future__ import annotations

import asyncio
import sys

_CHUNK = 1 << 20


async def main(port: int, delay_s: float) -> None:
    """Run the proxy until the process is ended."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port, limit=_CHUNK)
        await asyncio.gather(
            _pass_on(reader, there_writer, delay_s / 2), _pass_on(there_reader, writer, delay_s / 2)
        )

    server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=_CHUNK)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """Forward data in order, each part `delay_s` seconds after it arrived."""
    loop, parts = asyncio.get_running_loop(), asyncio.Queue[tuple[float, bytes]](64)

    async def write() -> None:
        while True:
            due, part = await parts.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not part:
                break
            writer.write(part)
            await writer.drain()
        writer.close()

    writing = asyncio.create_task(write())
    try:
        while part := await reader.read(_CHUNK):
            await parts.put((loop.time() + delay_s, part))
        await parts.put((loop.time() + delay_s, b""))
        await writing
    except OSError:
        writing.cancel()
        writer.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2]) / 1000))
