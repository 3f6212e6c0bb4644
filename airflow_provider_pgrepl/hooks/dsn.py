"""From an Airflow connection to a libpq connection string."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg2
import psycopg2.extensions

from airflow_provider_pgrepl.errors import ConfigError

CONNECTION_TYPES = ("pgrepl", "postgres", "postgresql")
LIBPQ_EXTRAS = (
    "sslmode", "sslrootcert", "sslcert", "sslkey", "sslpassword", "sslcrl", "sslnegotiation", "sslsni",
    "ssl_min_protocol_version", "ssl_max_protocol_version", "channel_binding", "require_auth",
    "options", "connect_timeout", "target_session_attrs", "load_balance_hosts", "hostaddr",
    "keepalives", "keepalives_idle", "keepalives_interval", "keepalives_count", "tcp_user_timeout",
    "gssencmode", "krbsrvname", "passfile", "service",
)  # fmt: skip
"""Keys of a connection's extra that go to libpq; what they mean is in PostgreSQL's manual, 34.1.2."""

SECRET_EXTRAS = ("sslpassword",)


def dsn_of(connection: Any) -> str:
    """The connection string for an Airflow connection of type `pgrepl` or `postgres`.

    Raises ConfigError for another type, and for an extra of a `pgrepl` connection that libpq does not have:
    a misspelt `sslmode` must not connect without TLS. A `postgres` connection may carry its own provider's.
    """
    if connection.conn_type not in CONNECTION_TYPES:
        raise ConfigError(
            f"connection {connection.conn_id!r} is of type {connection.conn_type!r}",
            "use a connection of type pgrepl (or postgres)",
        )
    extras = {key: value for key, value in connection.extra_dejson.items() if value not in (None, "")}
    _check_extras(connection, extras)
    parts: dict[str, object] = {
        "host": connection.host,
        "port": connection.port,
        "dbname": connection.schema,
        "user": connection.login,
        "password": connection.password,
        **{key: _text(extras[key]) for key in LIBPQ_EXTRAS if key in extras},
    }
    try:
        text: str = psycopg2.extensions.make_dsn(**{key: value for key, value in parts.items() if value})
    except psycopg2.Error:
        # Without the cause: libpq quotes what it could not read.
        raise ConfigError(f"connection {connection.conn_id!r} does not make a connection string") from None
    return text


def _check_extras(connection: Any, extras: Mapping[str, object]) -> None:
    unknown = sorted(set(extras) - set(LIBPQ_EXTRAS))
    if unknown and connection.conn_type == "pgrepl":
        raise ConfigError(
            f"connection {connection.conn_id!r} has unknown extras: {', '.join(unknown)}",
            f"known ones: {', '.join(LIBPQ_EXTRAS)}",
        )
    if extras.get("iam"):
        raise ConfigError(
            f"connection {connection.conn_id!r} logs in by IAM tokens, which expire while replication runs",
            "use a user with a password or a client certificate",
        )


def _text(value: object) -> str:
    """JSON's true and false are libpq's 1 and 0."""
    return str(int(value)) if isinstance(value, bool) else str(value)
