"""The Airflow hook of a source database. It resolves connections and calls the core, which has the logic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg2.extensions
from airflow.providers.common.sql.hooks.sql import DbApiHook
from airflow.sdk.exceptions import AirflowNotFoundException
from airflow.sdk.log import mask_secret
from sqlalchemy.engine import URL

from airflow_provider_pgrepl.errors import ConfigError, PgReplError, SlotError
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

from .connections import lake_variables

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

    A `postgres` connection may have other extras of Airflow's postgres provider, which are ignored. A
    misspelled `sslmode` of a `pgrepl` connection must not connect without TLS.

    :param connection: an Airflow connection
    :raises ConfigError: for another type, for IAM logins, and for an extra of a `pgrepl` connection that is
        not in LIBPQ_EXTRAS
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

    :param slot: name of the slot
    :param active: a walsender reads the slot
    :param confirmed_flush_lsn: the LSN that the slot's reader has confirmed
    :param source_lsn: the source's WAL position
    :param unconfirmed_bytes: bytes of WAL from the confirmed LSN to the source's WAL position
    :param retained_bytes: bytes of WAL that the server retains for the slot
    """

    slot: str
    active: bool
    confirmed_flush_lsn: LSN
    source_lsn: LSN
    unconfirmed_bytes: int
    retained_bytes: int


class PgReplicationHook(DbApiHook):
    """A source database, by an Airflow connection of type `pgrepl` or `postgres`.

    The first argument, or `pgrepl_conn_id`, is the ID of the connection; the default is `pgrepl_default`.
    `schema` and `log_sql` are those of DbApiHook.

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

        :raises ConfigError: for a connection of another type or with unknown extras
        :raises AirflowNotFoundException: for an unknown connection. The error is retried, because Airflow
            also raises it while a secrets backend cannot be reached
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
        """Return the URL for SQLAlchemy as text, with the password."""
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
        """Raise the error that a run of a pipeline would raise at the source. Creates nothing.

        :param pipeline: the pipeline, whose tables, publication and rights are checked
        :raises PgReplError: if the source is not ready
        """
        check_source(self.dsn(), pipeline)

    def list_tables(self, patterns: Sequence[str]) -> list[TableName]:
        """Return the tables that names and patterns select.

        :param patterns: names and patterns, such as `public.orders` and `public.*`
        :raises ConfigError: for an invalid name
        :raises TableError: for a table that does not exist or cannot be replicated
        """
        pipeline = Pipeline(name=_ROLE, lake="/unused", tables=tuple(patterns))
        with self._connected() as connection:
            return [relation.table for relation in resolve_tables(connection, pipeline)]

    def create_publication(self, name: str, tables: Sequence[str]) -> None:
        """Create a publication.

        :param name: name of the publication
        :param tables: names and patterns of its tables, such as `public.*`
        :raises PublicationError: if the name is in use
        """
        pipeline = Pipeline(name=_ROLE, lake="/unused", tables=tuple(tables), publication=name)
        with self._connected() as connection:
            publication.create_publication(connection, name, resolve_tables(connection, pipeline))

    def get_publication(self, name: str) -> publication.Publication | None:
        """Return a publication, or None if it does not exist.

        :param name: name of the publication
        """
        with self._connected() as connection:
            return publication.read_publication(connection, name)

    def drop_publication(self, name: str) -> None:
        """Drop a publication. Does nothing if it does not exist.

        :param name: name of the publication
        """
        with self._connected() as connection:
            publication.drop_publication(connection, name)

    def create_slot(self, name: str, timeout_s: float = 60.0) -> LSN:
        """Create a permanent pgoutput slot and return its consistent point.

        The slot retains WAL from then on. The creation needs a second free slot.

        :param name: name of the slot
        :param timeout_s: seconds to wait for transactions that are open when the slot is created
        :raises SlotError: if the name is in use
        :raises ServerSettingError: if `wal_level` is not logical, or no slot is free
        :raises PrivilegeError: if the role may not create slots
        :raises SnapshotError: if open transactions last longer than `timeout_s`
        """
        with slot_creation.create_slot(self.dsn(), name, timeout_s=timeout_s) as exported:
            return exported.consistent_point

    def get_slot(self, name: str) -> Slot | None:
        """Return a replication slot, or None if it does not exist.

        :param name: name of the slot
        """
        with self._connected() as connection:
            return read_slot(connection, name)

    def drop_slot(self, name: str) -> None:
        """Drop a replication slot. Does nothing if it does not exist.

        :param name: name of the slot
        :raises BusyError: while a walsender is reading the slot
        :raises SlotError: for a slot of another database, and for a physical slot
        """
        with self._connected() as connection:
            drop_slot(connection, name)

    def lag(self, slot_name: str) -> SlotLag:
        """Return the lag of a slot's reader, and the bytes of WAL that the server retains for the slot.

        :param slot_name: name of the slot
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

    :param started_by: the task that acts on the pipeline, for the events that it records
    :raises ConfigError: for a connection that cannot be used
    """
    dsn = PgReplicationHook(pipeline.conn_id).dsn()
    state_dsn = PgReplicationHook(pipeline.state_conn_id).dsn() if pipeline.state_conn_id else dsn
    primary_dsn = PgReplicationHook(pipeline.primary_conn_id).dsn() if pipeline.primary_conn_id else ""
    return Access(pipeline, dsn, state_dsn, started_by, primary_dsn)


def access_with_lake(pipeline: Pipeline, started_by: str = "") -> Access:
    """Return the pipeline's access, and make this process use the store of its `lake_conn_id`.

    Call this before the process reads or writes the lake. Only tasks may call this, because each task has its
    own process. Triggers share one.

    :param started_by: as in `access_to`
    :raises ConfigError: for a connection that cannot be used
    """
    use_store(lake_variables(pipeline))
    return access_to(pipeline, started_by)
