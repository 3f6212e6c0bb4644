"""From an Airflow connection to the URI of a broker."""

from __future__ import annotations

from urllib.parse import quote

from airflow.sdk import BaseHook
from airflow.sdk.log import mask_secret

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.publisher_settings import TargetKind

_SCHEMES: dict[TargetKind, tuple[str, str]] = {"rabbitmq": ("amqp", "amqps"), "nats": ("nats", "tls")}
"""Without TLS, and with it."""
_ANYBODY = "guest"
"""Login and password of a RabbitMQ that nobody has set up."""


def target_uri(conn_id: str, target: TargetKind) -> str:
    """`amqp://user:password@host:port/vhost`, or `nats://user:password@host:port`, of a connection; masked in
    logs from here on.

    The connection's schema is RabbitMQ's virtual host, `/` unless given. TLS is used when its type is
    `amqps`, or `tls` for NATS, or its extra has `tls`. Raises ConfigError.
    """
    connection = BaseHook.get_connection(conn_id)
    if not connection.host:
        raise ConfigError(f"connection {conn_id}: has no host", "give the broker's host, login and password")
    plain, secure = _SCHEMES[target]
    is_tls = connection.conn_type == secure or bool(connection.extra_dejson.get("tls"))
    is_rabbitmq = target == "rabbitmq"
    login = connection.login or (_ANYBODY if is_rabbitmq else "")
    given = connection.password or (_ANYBODY if is_rabbitmq else "")
    password = quote(given, safe="")
    user = quote(login, safe="") + (f":{password}" if password else "")
    port = f":{connection.port}" if connection.port else ""
    host = f"[{connection.host}]" if ":" in connection.host else connection.host
    path = f"/{quote(connection.schema or '/', safe='')}" if is_rabbitmq else ""
    uri = f"{secure if is_tls else plain}://{f'{user}@' if user else ''}{host}{port}{path}"
    for secret in (connection.password, password, uri):
        if secret and secret != _ANYBODY:
            mask_secret(secret)
    return uri
