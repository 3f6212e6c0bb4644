"""Hosts of the internet, as Java sees them: a proxy with certificates for them, before a server here."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

TOKEN_HOST = "oauth2.googleapis.com"
_TOKEN = json.dumps({"access_token": "t", "expires_in": 3600, "token_type": "Bearer"})


class TlsFront:
    """A proxy that answers for `hosts` with the server behind `port`, and for Google's token host."""

    def __init__(self, folder: Path, hosts: tuple[str, ...], port: int) -> None:
        self._folder, self._behind = folder, port
        self._trusted = folder / "trusted.p12"
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(self._certify(hosts))
        self.asked: set[str] = set()
        self.port = 0

    @property
    def java_options(self) -> str:
        """Options with which a JVM uses this proxy and trusts its certificates."""
        return (
            f"-Dhttps.proxyHost=127.0.0.1 -Dhttps.proxyPort={self.port}"
            f" -Djavax.net.ssl.trustStore={self._trusted} -Djavax.net.ssl.trustStorePassword=changeit"
        )

    async def serve(self, started: threading.Event) -> None:
        server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        async with server:
            await server.serve_forever()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            host = head.split()[1].partition(":")[0]
            self.asked.add(host)
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            await writer.drain()
            await writer.start_tls(self._context)
            if host == TOKEN_HOST:
                await reader.readuntil(b"\r\n\r\n")
                told = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(_TOKEN)}"
                writer.write(f"{told}\r\nConnection: close\r\n\r\n{_TOKEN}".encode())
                await writer.drain()
                writer.close()
                return
            behind = await asyncio.open_connection("127.0.0.1", self._behind)
            await asyncio.gather(_pass_on(reader, behind[1]), _pass_on(behind[0], writer))

    def _certify(self, hosts: tuple[str, ...]) -> Path:
        """A certificate and its key; in `trusted` Java finds the certificate."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "front")])
        now = datetime.now(UTC)
        names = x509.SubjectAlternativeName([x509.DNSName(host) for host in (*hosts, TOKEN_HOST)])
        certificate = (
            x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(names, critical=False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(key, hashes.SHA256())
        )
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        chain, alone = self._folder / "front.pem", self._folder / "certificate.pem"
        form = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        chain.write_bytes(pem + key.private_bytes(serialization.Encoding.PEM, *form))
        alone.write_bytes(pem)
        place = ["-keystore", str(self._trusted), "-storetype", "PKCS12", "-storepass", "changeit"]
        command = ["keytool", "-importcert", "-noprompt", "-alias", "front", "-file", str(alone), *place]
        subprocess.run(command, check=True, capture_output=True)
        return chain


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


@contextmanager
def tls_front(folder: Path, hosts: tuple[str, ...], port: int) -> Iterator[TlsFront]:
    """Yield a front that serves until the block ends."""
    front, started = TlsFront(folder, hosts, port), threading.Event()
    loop = asyncio.new_event_loop()
    serving = loop.create_task(front.serve(started))

    def run() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(serving)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield front
    finally:
        loop.call_soon_threadsafe(serving.cancel)
        thread.join(10)
