"""From an Airflow connection to the URI of a broker."""

from __future__ import annotations

from urllib.parse import quote, urlencode

from airflow.sdk import BaseHook
from airflow.sdk.log import mask_secret

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.app.process import REGISTRY_VARIABLE, SALT_VARIABLE, TARGET_VARIABLE
from airflow_provider_pgrepl.replication.settings.publisher import PublisherSettings
from airflow_provider_pgrepl.replication.settings.targets import FORMATS, TARGETS, TargetName

_SECRET = ("password", "secret", "pem", "oauthbearer.config")
"""In names of librdkafka's properties."""


def target_secrets(settings: PublisherSettings) -> dict[str, str]:
    """What a publisher needs of connections, for the environment of its process alone. Raises ConfigError."""
    secrets = {TARGET_VARIABLE: target_uri(settings.conn_id, settings.target)}
    if FORMATS[settings.format].has_registry:
        secrets[REGISTRY_VARIABLE] = registry_uri(settings)
    return secrets | ({SALT_VARIABLE: hash_salt(settings)} if settings.hash_columns else {})


def target_uri(conn_id: str, target: TargetName) -> str:
    """The URI of a connection, as `amqp://user:password@host:port/vhost`; masked in logs from here on.

    The connection's schema is RabbitMQ's virtual host, `/` unless given. Kafka's host may be several with
    commas between, and keys of its extra that have a dot are properties of librdkafka. TLS is used when the
    type is `amqps`, `tls` (NATS) or `kafkas`, or the extra has `tls`. Raises ConfigError.
    """
    connection = BaseHook.get_connection(conn_id)
    if not connection.host:
        raise ConfigError(f"connection {conn_id}: has no host", "give the broker's host, login and password")
    kind = TARGETS[target]
    plain, secure = kind.schemes
    extra = connection.extra_dejson
    is_tls = connection.conn_type == secure or bool(extra.get("tls"))
    login = connection.login or kind.anybody
    given = connection.password or kind.anybody
    password = quote(given, safe="")
    user = quote(login, safe="") + (f":{password}" if password else "")
    port = f":{connection.port}" if connection.port else ""
    # An address of IPv6 stands in brackets, but where hosts carry their ports.
    host = f"[{connection.host}]" if ":" in connection.host and not kind.has_hosts else connection.host
    path = f"/{quote(connection.schema or '/', safe='')}" if kind.has_virtual_hosts else ""
    properties = {name: str(value) for name, value in extra.items() if kind.has_hosts and "." in name}
    query = f"?{urlencode(properties)}" if properties else ""
    uri = f"{secure if is_tls else plain}://{f'{user}@' if user else ''}{host}{port}{path}{query}"
    hidden = [value for name, value in properties.items() if any(word in name for word in _SECRET)]
    for secret in (connection.password, password, uri, *hidden):
        if secret and secret != kind.anybody:
            mask_secret(secret)
    return uri


def registry_uri(settings: PublisherSettings) -> str:
    """The URI of a publisher's schema registry; masked in logs from here on. Its connection's `schema` is
    `http` unless it says `https`, and the extra's `path` what stands behind the port. Raises ConfigError."""
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
    """What goes into the hashes of a publisher; masked in logs from here on. Raises ConfigError."""
    where = f"publishers: {settings.name}"
    if not settings.salt_conn_id:
        raise ConfigError(
            f"{where}: hash_columns needs a salt_conn_id",
            "name an Airflow connection whose password is a long secret text that never changes",
        )
    salt: str | None = BaseHook.get_connection(settings.salt_conn_id).password
    if not salt:
        raise ConfigError(
            f"connection {settings.salt_conn_id}: has no password", "give it a long secret text as password"
        )
    mask_secret(salt)
    return salt
