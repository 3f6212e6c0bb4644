"""The data of Airflow connections for the apps: variables of a lake's store, and secrets of a publisher, such
as the URI of its broker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, quote, urlencode

from airflow.sdk import BaseHook, Connection
from airflow.sdk.log import mask_secret

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.app.process import REGISTRY_VARIABLE, SALT_VARIABLE, TARGET_VARIABLE
from airflow_provider_pgrepl.replication.settings.lake import store_location
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.publisher import PublisherSettings
from airflow_provider_pgrepl.replication.settings.stores import STORES, VARIABLES, StoreLogin
from airflow_provider_pgrepl.replication.settings.targets import FORMATS, TARGETS, TargetName

_SECRET = ("password", "secret", "pem", "oauthbearer.config")
"""Parts of names of librdkafka properties whose values are secret."""
_NO = ("", "false", "0", "no", "off")


def target_secrets(settings: PublisherSettings) -> dict[str, str]:
    """Return the secrets of a publisher as environment variables for its process only.

    :raises ConfigError: for a connection that cannot be used
    """
    secrets = {TARGET_VARIABLE: target_uri(settings.conn_id, settings.target)}
    if FORMATS[settings.format].has_registry:
        secrets[REGISTRY_VARIABLE] = registry_uri(settings)
    return secrets | ({SALT_VARIABLE: hash_salt(settings)} if settings.hash_columns else {})


def target_uri(conn_id: str, target: TargetName) -> str:
    """Return the URI of a broker, as `amqp://user:password@host:port/vhost`, and mask it in logs.

    The connection's schema is RabbitMQ's virtual host, by default `/`. For Kafka, the host may be a
    comma-separated list, and extras whose keys have a dot are librdkafka properties. TLS is used if the
    connection type is `amqps`, `tls` (NATS) or `kafkas`, or if the extra has `tls`.

    :param conn_id: the Airflow connection
    :param target: the kind of broker
    :raises ConfigError: for a connection without a host
    """
    connection = BaseHook.get_connection(conn_id)
    if not connection.host:
        raise ConfigError(f"connection {conn_id}: has no host", "give the broker's host, login and password")
    kind = TARGETS[target]
    plain, secure = kind.schemes
    extra = connection.extra_dejson
    is_tls = connection.conn_type == secure or _is_set(extra.get("tls"))
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


def _is_set(value: object) -> bool:
    """Return True unless an extra says no. The extras of a connection's URI are text: `tls=false`."""
    return str(value or "").strip().lower() not in _NO


def registry_uri(settings: PublisherSettings) -> str:
    """Return the URI of a publisher's schema registry. It is masked in logs if it has a login.

    The URI scheme is the connection's `schema`, by default `http`. The extra's `path` is appended after the
    port.

    :raises ConfigError: for a connection without a host
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
    """Return the salt of a publisher's column hashes, and mask it in logs.

    :raises ConfigError: without a `salt_conn_id`, and for a connection without a password
    """
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


def lake_variables(pipeline: Pipeline) -> dict[str, str]:
    """Return the environment variables by which a process reaches the pipeline's store.

    Returns none if the pipeline has no `lake_conn_id` or its lake is a directory. The hosts' own environment
    is used then. Secrets are masked in logs from then on.

    :raises ConfigError: for a connection of the wrong type, of another account, or with an unsupported or
        incomplete login
    """
    place = store_location(pipeline.lake_root)
    if pipeline.lake_conn_id is None or place is None:
        return {}
    connection = BaseHook.get_connection(pipeline.lake_conn_id)
    kind = STORES[place.scheme]
    if connection.conn_type not in kind.connections:
        raise ConfigError(
            f"lake_conn_id: {pipeline.lake_conn_id} is a connection of type {connection.conn_type or 'none'}",
            f"name a connection of type {' or '.join(kind.connections)}, or remove lake_conn_id: then the"
            " hosts' own environment is used",
        )
    login = StoreLogin(connection.login, connection.password, connection.host, _Extra(connection).get)
    _check_identity(pipeline.lake_conn_id, login, kind.unsupported)
    try:
        variables = kind.variables_of(login, place)
    except ValueError as fault:
        raise ConfigError(f"lake_conn_id: {pipeline.lake_conn_id} {fault}") from None
    given = {name: str(value) for name, value in variables.items() if value}
    for secret in (value for name, value in given.items() if VARIABLES[name].is_secret):
        mask_secret(secret)
        # Mask the signature of a SAS token alone, too: a client may print a token's parts in another order.
        for signature in parse_qs(secret).get("sig", ()):
            mask_secret(signature)
            mask_secret(quote(signature, safe=""))
    return given


class _Extra:
    """The extras of a connection. Forms of old Airflow versions store them with a prefix."""

    def __init__(self, connection: Connection) -> None:
        self._found: Mapping[str, Any] = connection.extra_dejson
        self._prefix = f"extra__{connection.conn_type}__"

    def get(self, name: str) -> Any:
        """Return the extra `name`, with or without the prefix; None if it is missing or empty."""
        return self._found.get(name) or self._found.get(f"{self._prefix}{name}") or None


def _check_identity(conn_id: str, login: StoreLogin, others: tuple[str, ...]) -> None:
    found = [name for name in others if login.extra_field(name)]
    if found:
        raise ConfigError(
            f"lake_conn_id: connection {conn_id} sets {', '.join(found)}, which is not supported",
            "grant the role or the identity to the hosts and remove lake_conn_id, or store access keys in the"
            " connection",
        )
