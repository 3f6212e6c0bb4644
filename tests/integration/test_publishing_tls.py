"""A publisher speaks TLS with servers that the machine trusts, and with no others."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.process import TARGET_VARIABLE
from demo.postgres import free_port
from demo.rabbitmq import Broker
from tests.support.certificates import make_certificate
from tests.support.rabbitmq import running_broker
from tests.support.replicated import execute, wait_until

pytestmark = pytest.mark.thorough("test_publishing_to_nats.py: a publisher speaks TLS with whom it trusts")


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    make_certificate(folder / "server.crt", folder / "server.key")
    return folder / "server.crt"


@pytest.fixture(scope="module")
def tls_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def broker(trusted: Path, tls_port: int) -> Iterator[Broker]:
    settings = {
        "listeners.ssl.1": f"127.0.0.1:{tls_port}",
        "ssl_options.certfile": str(trusted),
        "ssl_options.keyfile": str(trusted.with_suffix(".key")),
        "ssl_options.cacertfile": str(trusted),
    }
    with running_broker(**settings) as broker:
        # It answers without TLS before it does with it.
        wait_until(lambda: speaks_tls(tls_port), 150, "the broker to speak TLS")
        yield broker


def speaks_tls(port: int) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection(("127.0.0.1", port), 5) as line,
            context.wrap_socket(line) as connection,
        ):
            return connection.version() is not None
    except OSError:
        return False


def test_publisher_sends_events_to_trusted_amqps_broker(published, dsn, trusted, monkeypatch, tls_port):
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    monkeypatch.setenv(TARGET_VARIABLE, f"amqps://guest:guest@localhost:{tls_port}/%2F")
    execute(dsn, "insert into t(id) select generate_series(1, 100)")
    published.receive()
    assert [message.event["data"]["id"] for message in published.publish()] == [*range(1, 101)]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_broker_with_untrusted_or_wrong_name_certificate_gets_no_events(
    published, dsn, trusted, monkeypatch, caplog, tls_port, host
):
    """The password is not sent there, either: the certificate is checked first."""
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    if host != "localhost":
        monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    monkeypatch.setenv(TARGET_VARIABLE, f"amqps://guest:geheim@{host}:{tls_port}/%2F")
    execute(dsn, "insert into t(id) values (1)")
    published.receive()
    assert published.publish(code=process.WILL_NOT_HELP) == []
    assert "its certificate was refused" in caplog.text
    assert ("self-signed" if host == "localhost" else "IP address mismatch") in caplog.text
    assert "geheim" not in caplog.text
