"""The Airflow hook of a source database. It resolves connections and calls the core, which has the logic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg2
import psycopg2.extensions
from airflow.providers.common.sql.hooks.sql import DbApiHook
from airflow.sdk.exceptions import AirflowNotFoundException
from airflow.sdk.log import mask_secret
from sqlalchemy.engine import URL

from airflow_provider_pgrepl.errors import ConfigError, PgReplError, SlotError
from airflow_provider_pgrepl.hooks.lake import lake_variables
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.store_variables import use_store
from airflow_provider_pgrepl.replication.source import publication, slot_creation
from airflow_provider_pgrepl.replication.source.connection import (
    Connection,
    connect,
    with_system_certificates,
)
from airflow_provider_pgrepl.replication.source.preflight.check import check_server, check_source
from airflow_provider_pgrepl.replication.source.preflight.selection import resolve_tables
from airflow_provider_pgrepl.replication.source.server import wal_lsn
from airflow_provider_pgrepl.replication.source.slot import Slot, drop_slot, read_slot

CONNECTION_TYPES = ("pgrepl", "postgres", "postgresql")
LIBPQ_EXTRAS = (
    "sslmode", "sslrootcert", "sslcert", "sslkey", "sslpassword", "sslcrl", "sslnegotiation", "sslsni",
    "ssl_min_protocol_version", "ssl_max_protocol_version", "channel_binding", "require_auth",
    "options", "connect_timeout", "target_session_attrs", "load_balance_hosts", "hostaddr",
    "keepalives", "keepalives_idle", "keepalives_interval", "keepalives_count", "tcp_user_timeout",
    "gssencmode", "krbsrvname", "passfile", "service",
)  # fmt: skip
"""The keys of a connection's extra that are passed to libpq (PostgreSQL manual, 34.1.2).

https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-PARAMKEYWORDS
"""

SECRET_EXTRAS = ("sslpassword",)
_ROLE = "hook"


def dsn_of(connection: Any) -> str:
    """Return the libpq connection string of an Airflow connection of type `pgrepl` or `postgres`.

    Raises ConfigError for another type, for IAM logins, and for an extra of a `pgrepl` connection that is not
    in LIBPQ_EXTRAS: a misspelled `sslmode` must not connect without TLS. A `postgres` connection may have
    other extras of Airflow's postgres provider, which are ignored.
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
        # Suppress the cause: libpq's message quotes the text that it could not parse, which may hold secrets.
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
    """Return a value as libpq expects it: 1 for true, 0 for false."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def missing_connection(
    error: AirflowNotFoundException, conn_id: str, conn_type: str, other: str
) -> AirflowNotFoundException:
    """Return Airflow's error with a hint.

    :param other: an alternative to adding the connection, as an instruction
    """
    return AirflowNotFoundException(
        f"{error}\n  hint: add a connection {conn_id} of type {conn_type} under Admin, Connections, or in the"
        f" variable AIRFLOW_CONN_{conn_id.upper()} of every worker; or {other}"
    )


@dataclass(frozen=True)
class SlotLag:
    """The lag of a slot's reader behind the source, in bytes of WAL.

    `unconfirmed_bytes`: from the confirmed LSN to the source's WAL position. `retained_bytes`: the WAL that
    the server keeps for the slot.
    """

    slot: str
    active: bool
    confirmed_flush_lsn: LSN
    source_lsn: LSN
    unconfirmed_bytes: int
    retained_bytes: int


class PgReplicationHook(DbApiHook):
    """A source database, by an Airflow connection of type `pgrepl` or `postgres`.

    Methods raise the errors of `airflow_provider_pgrepl.errors`. In a @task function, wrap calls in
    `operators.failures.translated()`: it raises Airflow's exceptions, so that Airflow does not retry a task
    that a retry cannot fix.
    """

    conn_name_attr = "pgrepl_conn_id"
    default_conn_name = "pgrepl_default"
    conn_type = "pgrepl"
    hook_name = "PostgreSQL replication"
    supports_autocommit = True

    def dsn(self) -> str:
        """Return the libpq connection string with its password. It is masked in logs from then on.

        Raises ConfigError. Raises AirflowNotFoundException for an unknown connection. That error is retried,
        because Airflow also raises it while a secrets backend cannot be reached.
        """
        try:
            dsn = dsn_of(self.connection)
        except AirflowNotFoundException as error:
            other = "name another as conn_id or state_conn_id of the pipeline"
            raise missing_connection(error, self.get_conn_id(), self.conn_type, other) from None
        for secret in (
            self.connection.password,
            *(self.connection_extra.get(key) for key in SECRET_EXTRAS),
            dsn,
        ):
            if secret:
                mask_secret(secret)
        return dsn

    def get_conn(self) -> Connection:
        """Open a psycopg2 connection in autocommit mode, with the session settings that replication needs."""
        return connect(self.dsn(), _ROLE)

    @property
    def sqlalchemy_url(self) -> URL:
        """Return the URL for the SQLAlchemy methods of DbApiHook, such as get_df."""
        given = self.connection
        extras = with_system_certificates(
            {key: str(self.connection_extra[key]) for key in LIBPQ_EXTRAS if self.connection_extra.get(key)}
        )
        return URL.create(
            "postgresql+psycopg2",
            username=given.login,
            password=given.password,
            host=given.host,
            port=given.port,
            database=given.schema,
            query=extras,
        )

    def get_uri(self) -> str:
        return self.sqlalchemy_url.render_as_string(hide_password=False)

    def test_connection(self) -> tuple[bool, str]:  # type: ignore[override]
        """Check version, wal_level, replication right, free slots and free walsenders of the server.

        Returns True and a description, or False and the problems. `check` checks the tables of a pipeline.
        """
        try:
            server = check_server(self.dsn())
        except PgReplError as error:
            return False, str(error)
        kind = "standby" if server.in_recovery else "primary"
        return True, (
            f"PostgreSQL {server.version_num // 10000} ({kind}), wal_level {server.wal_level}:"
            " replication connections are accepted, and two slots and a sender are free"
        )

    def check(self, pipeline: Pipeline) -> None:
        """Raise the error that a run of this pipeline would raise at the source. Creates nothing."""
        check_source(self.dsn(), pipeline)

    def list_tables(self, patterns: Sequence[str]) -> list[TableName]:
        """Return the tables that these names and patterns select. Raises ConfigError, TableError."""
        pipeline = Pipeline(name=_ROLE, lake="/unused", tables=tuple(patterns))
        with self._connected() as connection:
            return [relation.table for relation in resolve_tables(connection, pipeline)]

    def create_publication(self, name: str, tables: Sequence[str]) -> None:
        """Create a publication of these tables or patterns. Raises PublicationError if its name is in use."""
        pipeline = Pipeline(name=_ROLE, lake="/unused", tables=tuple(tables), publication=name)
        with self._connected() as connection:
            publication.create_publication(connection, name, resolve_tables(connection, pipeline))

    def get_publication(self, name: str) -> publication.Publication | None:
        """Return the publication `name`, or None if it does not exist."""
        with self._connected() as connection:
            return publication.read_publication(connection, name)

    def drop_publication(self, name: str) -> None:
        """Drop the publication `name`. Does nothing if it does not exist."""
        with self._connected() as connection:
            publication.drop_publication(connection, name)

    def create_slot(self, name: str, timeout_s: float = 60.0) -> LSN:
        """Create a permanent pgoutput slot and return its consistent point.

        The slot retains WAL from then on. The creation needs a second free slot. Raises SlotError,
        ServerSettingError. Raises SnapshotError if the server waits longer than `timeout_s` seconds for open
        transactions.
        """
        with slot_creation.create_slot(self.dsn(), name, timeout_s=timeout_s) as exported:
            return exported.consistent_point

    def get_slot(self, name: str) -> Slot | None:
        """Return the replication slot `name`, or None if it does not exist."""
        with self._connected() as connection:
            return read_slot(connection, name)

    def drop_slot(self, name: str) -> None:
        """Drop the replication slot `name`. Does nothing if it does not exist.

        Raises BusyError while a walsender is reading the slot, SlotError for a slot of another database and
        for a physical slot.
        """
        with self._connected() as connection:
            drop_slot(connection, name)

    def lag(self, slot_name: str) -> SlotLag:
        """Return the lag of a slot's reader, and the bytes of WAL that the server retains for the slot.

        :raises SlotError: if no logical slot has this name
        """
        with self._connected() as connection:
            found = read_slot(connection, slot_name)
            source_lsn = wal_lsn(connection)
        if found is None or found.confirmed_flush_lsn is None:
            raise SlotError(f"there is no logical slot named {slot_name}")
        confirmed = found.confirmed_flush_lsn
        restart = confirmed if found.restart_lsn is None else found.restart_lsn
        return SlotLag(
            slot=slot_name,
            active=found.active,
            confirmed_flush_lsn=confirmed,
            source_lsn=source_lsn,
            # A reader may have confirmed a record that the server had not flushed at the time of the query.
            unconfirmed_bytes=max(0, source_lsn - confirmed),
            retained_bytes=max(0, source_lsn - restart),
        )

    @contextmanager
    def _connected(self) -> Iterator[Any]:
        connection = self.get_conn()
        try:
            yield connection
        finally:
            connection.close()


def access_to(pipeline: Pipeline, started_by: str = "") -> Access:
    """Return the pipeline with its connection strings, which are masked in logs from then on.

    Raises ConfigError.

    :param started_by: the task that acts on the pipeline, for the events that it records
    """
    dsn = PgReplicationHook(pipeline.conn_id).dsn()
    state_dsn = PgReplicationHook(pipeline.state_conn_id).dsn() if pipeline.state_conn_id else dsn
    return Access(pipeline, dsn, state_dsn, started_by)


def access_with_lake(pipeline: Pipeline, started_by: str = "") -> Access:
    """Return the pipeline's access, and make this process use the store of its `lake_conn_id`.

    Call this before the process reads or writes the lake. Only tasks may call this, because each task has its
    own process. Triggers share one. Raises ConfigError.
    """
    use_store(lake_variables(pipeline))
    return access_to(pipeline, started_by)
