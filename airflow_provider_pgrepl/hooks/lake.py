"""The environment variables of a lake's store, from an Airflow connection."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote

from airflow.sdk import BaseHook, Connection
from airflow.sdk.log import mask_secret

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.settings.lake import AZURE, GOOGLE, S3, StoreLocation, store_location
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.store_variables import (
    AZURE_CLIENT,
    AZURE_ENDPOINT,
    AZURE_KEY,
    AZURE_SAS,
    AZURE_SECRET,
    AZURE_TENANT,
    ENDPOINT,
    GOOGLE_KEY,
    KEY_ID,
    REGION,
    SECRET,
    TOKEN,
)

_TYPES = {S3: ("aws",), GOOGLE: ("google_cloud_platform",), AZURE: ("wasb", "adls")}
_SECRETS = (SECRET, TOKEN, GOOGLE_KEY, AZURE_KEY, AZURE_SAS, AZURE_SECRET)
_OTHER_IDENTITIES = {
    S3: ("role_arn", "profile_name", "assume_role_method", "assume_role_kwargs", "session_kwargs"),
    GOOGLE: (
        *("key_secret_name", "credential_config_file", "impersonation_chain", "idp_issuer_url"),
        "is_anonymous",
    ),
    AZURE: ("connection_string", "managed_identity_client_id", "workload_identity_tenant_id"),
}


def lake_variables(pipeline: Pipeline) -> dict[str, str]:
    """Return the environment variables by which a process reaches the pipeline's store.

    Returns none if the pipeline has no `lake_conn_id` or its lake is a directory. The hosts' own environment
    is used then. Secrets are masked in logs from then on. Raises ConfigError for a connection of the wrong
    type, of another account, or with an unsupported or incomplete login.
    """
    place = store_location(pipeline.lake_root)
    if pipeline.lake_conn_id is None or place is None:
        return {}
    connection = BaseHook.get_connection(pipeline.lake_conn_id)
    types = _TYPES[place.scheme]
    if connection.conn_type not in types:
        raise ConfigError(
            f"lake_conn_id: {pipeline.lake_conn_id} is a connection of type {connection.conn_type or 'none'}",
            f"name a connection of type {' or '.join(types)}, or remove lake_conn_id: then the hosts' own"
            " environment is used",
        )
    extra = _Extra(connection)
    _check_identity(pipeline.lake_conn_id, extra, _OTHER_IDENTITIES[place.scheme])
    try:
        variables = _READERS[place.scheme](connection, extra, place)
    except ValueError as fault:
        raise ConfigError(f"lake_conn_id: {pipeline.lake_conn_id} {fault}") from None
    given = {name: str(value) for name, value in variables.items() if value}
    for name in _SECRETS:
        if name in given:
            mask_secret(given[name])
    # Mask the signature alone, too: a client may print the parts of a token in another order.
    for signature in parse_qs(given.get(AZURE_SAS, "")).get("sig", ()):
        mask_secret(signature)
        mask_secret(quote(signature, safe=""))
    return given


class _Extra:
    """The extras of a connection. Forms of old Airflow versions store them with a prefix."""

    def __init__(self, connection: Connection) -> None:
        self._found: Mapping[str, Any] = connection.extra_dejson
        self._prefix = f"extra__{connection.conn_type}__"

    def get(self, name: str) -> Any:
        """Return the extra `name`, with or without the prefix, or None."""
        return self._found.get(name) or self._found.get(f"{self._prefix}{name}")


def _check_identity(conn_id: str, extra: _Extra, others: tuple[str, ...]) -> None:
    found = [name for name in others if extra.get(name)]
    if found:
        raise ConfigError(
            f"lake_conn_id: connection {conn_id} sets {', '.join(found)}, which is not supported",
            "grant the role or the identity to the hosts and remove lake_conn_id, or store access keys in the"
            " connection",
        )


def _of_amazon(connection: Connection, extra: _Extra, _: StoreLocation) -> dict[str, Any]:
    of_s3 = (extra.get("service_config") or {}).get("s3") or {}
    variables = {
        KEY_ID: connection.login or extra.get("aws_access_key_id"),
        SECRET: connection.password or extra.get("aws_secret_access_key"),
        TOKEN: extra.get("aws_session_token"),
        REGION: extra.get("region_name"),
        ENDPOINT: of_s3.get("endpoint_url") or extra.get("endpoint_url") or extra.get("host"),
    }
    if bool(variables[KEY_ID]) != bool(variables[SECRET]):
        raise ValueError("has only one of access key id and secret access key")
    return variables


def _of_google(_: Connection, extra: _Extra, __: StoreLocation) -> dict[str, Any]:
    """Return the variable with the service account's key. Without a key, the hosts use default credentials.

    Raises ValueError for a key that cannot be read or is not a service account's.
    """
    key = extra.get("keyfile_dict")
    if path := extra.get("key_path"):
        try:
            key = Path(path).read_text()
        except (OSError, UnicodeDecodeError):
            raise ValueError("has a key_path that this worker cannot read") from None
    try:
        found = json.loads(key) if isinstance(key, str) else key
    except ValueError:
        found = ""
    if found is not None and not (isinstance(found, dict) and found.get("private_key")):
        raise ValueError("has a key that is not the JSON key of a service account")
    return {GOOGLE_KEY: found and json.dumps(found)}


def _of_azure(connection: Connection, extra: _Extra, place: StoreLocation) -> dict[str, Any]:
    """Return the variables of an Entra client if there is a tenant, else of a SAS token or an account key.

    Raises ValueError for another storage account than that of `place`, and for an incomplete client.
    https://airflow.apache.org/docs/apache-airflow-providers-microsoft-azure/stable/connections/wasb.html
    """
    tenant, host = extra.get("tenant_id"), (connection.host or "").rstrip("/")
    account = host.rpartition("://")[2].partition(".")[0] if host else ("" if tenant else connection.login)
    is_other = "://" in host and not host.endswith(".core.windows.net")
    if account and not is_other and account != place.account:
        raise ValueError(f"belongs to storage account {account}, but the lake is in {place.account}")
    variables = {AZURE_ENDPOINT: host if is_other else None}
    if tenant:
        if not (connection.login and connection.password):
            raise ValueError("has a tenant_id, but lacks the client id (login) or secret (password)")
        client = {AZURE_CLIENT: connection.login, AZURE_SECRET: connection.password}
        return variables | {AZURE_TENANT: tenant} | client
    sas = extra.get("sas_token")
    if sas and "://" in sas:
        sas = sas.partition("?")[2]
    key = extra.get("shared_access_key") or connection.password or extra.get("account_key")
    return variables | ({AZURE_SAS: sas} if sas else {AZURE_KEY: key})


_READERS: Mapping[str, Callable[[Connection, _Extra, StoreLocation], dict[str, Any]]] = {
    S3: _of_amazon,
    GOOGLE: _of_google,
    AZURE: _of_azure,
}
