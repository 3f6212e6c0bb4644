"""The lake's store, in Airflow's words: a connection of type `aws` as variables that a process is given."""

from __future__ import annotations

from airflow.sdk import BaseHook, Connection
from airflow.sdk.log import mask_secret

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.store_variables import ENDPOINT, KEY_ID, REGION, SECRET, TOKEN

_OTHER_IDENTITIES = ("role_arn", "profile_name", "assume_role_method", "assume_role_kwargs", "session_kwargs")


def lake_variables(pipeline: Pipeline) -> dict[str, str]:
    """How the pipeline's store is reached; nothing where the hosts' own environment says that.

    What is secret is masked in logs from here on. Raises ConfigError.
    """
    if pipeline.lake_conn_id is None:
        return {}
    connection = BaseHook.get_connection(pipeline.lake_conn_id)
    if connection.conn_type != "aws":
        raise ConfigError(
            f"lake_conn_id: {pipeline.lake_conn_id} is a connection of type {connection.conn_type or 'none'}",
            "give one of type aws, or none: then the hosts' own environment and roles are used",
        )
    return _variables(pipeline.lake_conn_id, connection)


def _variables(conn_id: str, connection: Connection) -> dict[str, str]:
    extra = connection.extra_dejson
    others = [name for name in _OTHER_IDENTITIES if extra.get(name)]
    if others:
        raise ConfigError(
            f"lake_conn_id: {conn_id} has {', '.join(others)}, which this package does not follow",
            "give the role to the hosts, whose libraries renew what they get, and leave lake_conn_id out; or"
            " give access keys",
        )
    of_s3 = (extra.get("service_config") or {}).get("s3") or {}
    variables = {
        KEY_ID: connection.login or extra.get("aws_access_key_id"),
        SECRET: connection.password or extra.get("aws_secret_access_key"),
        TOKEN: extra.get("aws_session_token"),
        REGION: extra.get("region_name"),
        ENDPOINT: of_s3.get("endpoint_url") or extra.get("endpoint_url") or extra.get("host"),
    }
    if bool(variables[KEY_ID]) != bool(variables[SECRET]):
        raise ConfigError(f"lake_conn_id: {conn_id} has only one of access key id and secret access key")
    for name in (SECRET, TOKEN):
        if variables[name]:
            mask_secret(variables[name])
    return {name: str(value) for name, value in variables.items() if value}
