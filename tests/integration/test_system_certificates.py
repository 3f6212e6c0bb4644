"""`sslrootcert: system` trusts what the machine trusts, with the libraries that the wheels bring."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from airflow_provider_pgrepl.errors import ConfigError, SourceConnectionError
from airflow_provider_pgrepl.replication.source.connection import connect, row, stream_conninfo
from demo.postgres import Server
from tests.support.certificates import make_certificate
from tests.support.debian_server import programs


@pytest.fixture(scope="module")
def secure() -> Iterator[tuple[Server, Path]]:
    """A server that speaks TLS, and the certificate that it shows."""
    found = programs()
    if found is None:
        pytest.skip("needs Debian's PostgreSQL, which was built with TLS")
    with tempfile.TemporaryDirectory(prefix="pgrepl-test-tls-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        server = Server(folder / "data", programs=found, settings={"fsync": "off", "ssl": "on"})
        server.create()
        certificate, key = server.data / "server.crt", server.data / "server.key"
        make_certificate(certificate, key)
        owner = server.data.stat()
        for file in (certificate, key):
            file.chmod(0o600)
            if owner.st_uid != file.stat().st_uid:
                os.chown(file, owner.st_uid, owner.st_gid)
        trusted = folder / "trusted.pem"
        trusted.write_bytes(certificate.read_bytes())
        server.start()
        yield server, trusted
        server.stop(immediate=True)


def dsn_of(server: Server, **more: str) -> str:
    given = {"sslrootcert": "system", **more}
    options = " ".join(f"{key}={value}" for key, value in given.items())
    return f"host=localhost hostaddr=127.0.0.1 port={server.port} dbname=postgres user=postgres {options}"


def test_both_libraries_connect_to_server_with_trusted_certificate(secure, monkeypatch):
    server, trusted = secure
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    connection = connect(dsn_of(server), "test")
    assert row(connection, "select ssl from pg_stat_ssl where pid = pg_backend_pid()") == (True,)
    connection.close()
    with psycopg.connect(
        stream_conninfo(dsn_of(server), "test").replace("replication=database", "")
    ) as stream:
        assert stream.pgconn.ssl_in_use


def test_connection_to_server_with_untrusted_certificate_fails(secure, monkeypatch):
    server, _ = secure
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with pytest.raises(SourceConnectionError, match="certificate verify failed"):
        connect(dsn_of(server), "test")


def test_nor_a_host_of_another_name(secure, monkeypatch):
    server, trusted = secure
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    with pytest.raises(SourceConnectionError, match="does not match host name"):
        connect(dsn_of(server).replace("host=localhost", "host=elsewhere"), "test")


@pytest.mark.parametrize("mode", ["require", "verify-ca", "prefer", "disable"])
def test_a_weaker_check_is_refused(mode):
    with pytest.raises(ConfigError, match=f"sslmode {mode} is too weak"):
        stream_conninfo(f"host=localhost sslrootcert=system sslmode={mode}", "test")


def test_a_machine_without_certificates_is_told(monkeypatch):
    monkeypatch.setattr(Path, "is_file", lambda _: False)
    with pytest.raises(ConfigError, match="no file of certificates") as caught:
        stream_conninfo("host=localhost sslrootcert=system", "test")
    assert "ca-certificates" in caught.value.hint
