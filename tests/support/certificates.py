"""A certificate for a server of a test's own."""

from __future__ import annotations

import subprocess
from pathlib import Path

_BY = ("-newkey", "rsa:2048", "-nodes", "-x509", "-days", "2", "-subj", "/CN=localhost")


def make_certificate(certificate: Path, key: Path) -> None:
    """Make a self-signed certificate for the name `localhost` alone."""
    names = ("-addext", "subjectAltName=DNS:localhost")
    subprocess.run(
        ["openssl", "req", *_BY, *names, "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )
