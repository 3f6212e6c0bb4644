"""The secrets of a publisher, such as the URI of its broker, from Airflow connections."""

from __future__ import annotations

from urllib.parse import quote, urlencode

from airflow.sdk import BaseHook
from airflow.sdk.log import mask_secret

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.app.process import REGISTRY_VARIABLE, SALT_VARIABLE, TARGET_VARIABLE
from airflow_provider_pgrepl.replication.settings.publisher import PublisherSettings
from airflow_provider_pgrepl.replication.settings.targets import FORMATS, TARGETS, TargetName

_SECRET = ("password", "secret", "pem", "oauthbearer.config")
"""Parts of names of librdkafka properties whose values are secret."""


def target_secrets(settings: PublisherSettings) -> dict[str, str]:
    """Return the secrets of a publisher as environment variables for its process only. Raises ConfigError."""
    secrets = {TARGET_VARIABLE: target_uri(settings.conn_id, settings.target)}
    if FORMATS[settings.format].has_registry:
        secrets[REGISTRY_VARIABLE] = registry_uri(settings)
    return secrets | ({SALT_VARIABLE: hash_salt(settings)} if settings.hash_columns else {})


def target_uri(conn_id: str, target: TargetName) -> str:
    """Return the URI of a broker, as `amqp://user:password@host:port/vhost`, and mask it in logs.

    The connection's schema is RabbitMQ's virtual host, by default `/`. For Kafka, the host may be a
    comma-separated list, and extras whose keys have a dot are librdkafka properties. TLS is used if the
    connection type is `amqps`, `tls` (NATS) or `kafkas`, or if the extra has `tls`. Raises ConfigError.
    """
    connection = BaseHook.get_connection(conn_id)
    if not connection.host:
        raise ConfigError(f"connection {conn_id}: has no host", "give the broker's host, login and password")
    kind = TARGETS[target]
    plain, secure = kind.schemes
    extra = connection.extra_dejson
    is_tls = connection.conn_type == secure or bool(extra.get("tls"))
    login = connection.login or kind.default_login
    given = connection.password or kind.default_login
    password = quote(given, safe="")
    user = quote(login, safe="") + (f":{password}" if password else "")
    port = f":{connection.port}" if connection.port else ""
    # Put an IPv6 address in brackets, except where the hosts include their ports.
    host = f"[{connection.host}]" if ":" in connection.host and not kind.has_hosts else connection.host
    path = f"/{quote(connection.schema or '/', safe='')}" if kind.has_virtual_hosts else ""
    properties = {name: str(value) for name, value in extra.items() if kind.has_hosts and "." in name}
    query = f"?{urlencode(properties)}" if properties else ""
    uri = f"{secure if is_tls else plain}://{f'{user}@' if user else ''}{host}{port}{path}{query}"
    hidden = [value for name, value in properties.items() if any(word in name for word in _SECRET)]
    for secret in (connection.password, password, uri, *hidden):
        if secret and secret != kind.default_login:
            mask_secret(secret)
    return uri


def registry_uri(settings: PublisherSettings) -> str:
    """Return the URI of a publisher's schema registry. It is masked in logs if it has a login.

    The URI scheme is the connection's `schema`, by default `http`. The extra's `path` is appended after the
    port. Raises ConfigError.
    """
    connection = BaseHook.get_connection(settings.registry_conn_id)
    if not connection.host:
        raise ConfigError(
            f"connection {settings.registry_conn_id}: has no host", "give the schema registry's host and port"
        )
    password = quote(connection.password or "", safe="")
    login = quote(connection.login or "", safe="") + (f":{password}" if password else "")
    port = f":{connection.port}" if connection.port else ""
    path = str(connection.extra_dejson.get("path", ""))
    uri = f"{connection.schema or 'http'}://{f'{login}@' if login else ''}{connection.host}{port}{path}"
    for secret in (connection.password, password, uri if login else ""):
        if secret:
            mask_secret(secret)
    return uri


def hash_salt(settings: PublisherSettings) -> str:
    """Return the salt of a publisher's column hashes, and mask it in logs. Raises ConfigError."""
    where = f"publishers: {settings.name}"
    if not settings.salt_conn_id:
        raise ConfigError(
            f"{where}: hash_columns needs a salt_conn_id",
            "name an Airflow connection whose password is a long random string that never changes",
        )
    salt: str | None = BaseHook.get_connection(settings.salt_conn_id).password
    if not salt:
        raise ConfigError(
            f"connection {settings.salt_conn_id} has no password", "set a long random string as its password"
        )
    mask_secret(salt)
    return salt
