"""The certificates that the machine trusts, for `sslrootcert=system`.

The wheels of psycopg2 and psycopg bring an OpenSSL of their own, which looks for them in a folder of the
machine that it was built on. So the file is named to it, as it is on the host that connects.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path

from airflow_provider_pgrepl.errors import ConfigError

_SYSTEM = "system"
_STRICT = "verify-full"
_KNOWN = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Ubuntu, Alpine
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora, Red Hat
    "/etc/ssl/ca-bundle.pem",  # SUSE
    "/etc/ssl/cert.pem",  # macOS, Alpine
)


def with_system_certificates(parameters: Mapping[str, str]) -> dict[str, str]:
    """Connection parameters with `system` as libpq means it: that file, and no weaker check than verify-full.

    SSL_CERT_FILE names another one. Raises ConfigError where there is none, or a weaker check was asked for.
    """
    given = dict(parameters)
    if given.get("sslrootcert") != _SYSTEM:
        return given
    mode = given.get("sslmode", _STRICT)
    if mode != _STRICT:
        raise ConfigError(
            f"sslmode {mode} is too weak for sslrootcert system: anybody can have a certificate of those",
            f"set sslmode to {_STRICT}, or leave it out",
        )
    found = _find()
    if found is None:
        raise ConfigError(
            "sslrootcert is system, and this machine has no file of certificates that it trusts",
            "install ca-certificates, name the file in SSL_CERT_FILE, or give its path as sslrootcert",
        )
    return {**given, "sslrootcert": found, "sslmode": _STRICT}


def _find() -> str | None:
    # Python's own OpenSSL is the distribution's; it also looks at SSL_CERT_FILE.
    places = (ssl.get_default_verify_paths().cafile, *_KNOWN)
    return next((place for place in places if place and Path(place).is_file()), None)
