"""The environment variables of a lake's store, from an Airflow connection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, quote

from airflow.sdk import BaseHook, Connection
from airflow.sdk.log import mask_secret

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.settings.lake import store_location
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.stores import STORES, VARIABLES, StoreLogin


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
