"""Connections to the source, all with the same settings, so that a value has one text everywhere.

The certificates that the machine trusts, for `sslrootcert=system`.
The wheels of psycopg2 and psycopg bring an OpenSSL of their own, which looks for them in a folder of the
machine that it was built on. So the file is named to it, as it is on the host that connects.

Statements that wait for an answer no longer than a limit, also when the network swallows it in silence.
A limit of the server's (`statement_timeout`) ends nothing for a client whom no message reaches, and TCP does
not notice a tunnel that keeps the line and delivers nothing. So the client looks at the clock, and shuts the
socket down: libpq then finds the connection closed, in whatever thread waits for it.

Whether the server has ended a session that another thread uses now and then.
A server that shuts down ends its sessions with an error that nobody has asked for, and then waits for its
walsenders until they have sent everything, and what they sent is confirmed.
https://www.postgresql.org/docs/current/server-shutdown.html
"""

from __future__ import annotations

import os
import re
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import psycopg2
import psycopg2.extensions
import psycopg2.extras

from airflow_provider_pgrepl.errors import (
    ConfigError,
    PrivilegeError,
    ServerSettingError,
    SourceConnectionError,
    SourceError,
)
from airflow_provider_pgrepl.replication.source.server_errors import source_errors, translate

_SYSTEM = "system"
_STRICT = "verify-full"
_KNOWN = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Ubuntu, Alpine
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora, Red Hat
    "/etc/ssl/ca-bundle.pem",  # SUSE
    "/etc/ssl/cert.pem",  # macOS, Alpine
)
ANSWER_LIMIT_S = 60.0
"""How long a statement may take: those that work on catalogs and on our own state take milliseconds."""
Connection: TypeAlias = psycopg2.extensions.connection
PINNED_SETTINGS: dict[str, str] = {
    "DateStyle": "ISO, MDY",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "lc_monetary": "C",
    "client_encoding": "UTF8",
    "search_path": "",
    "quote_all_identifiers": "off",
    # A backslash in our texts is one.
    "standard_conforming_strings": "on",
    # A policy would filter a copy in silence; off makes the server refuse instead.
    "row_security": "off",
    # Settings of the role or database that are meant for its other sessions.
    "default_transaction_read_only": "off",
    "default_transaction_isolation": "read committed",
    # If our own walsender is a synchronous standby, commits would wait for it, also before it is there.
    "synchronous_commit": "local",
    # Parallel workers are few, and the application's.
    "max_parallel_workers_per_gather": "0",
    # Any of these would end a keeper or a long copy.
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    "transaction_timeout": "0",
    # The server notices within a minute that we are gone without a word, and lets slot and locks go.
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
    # Keepalives are not sent while what the server has sent is not acknowledged.
    "tcp_user_timeout": "60000",
    # Nor does one wait for a lock that nobody needs any more.
    "client_connection_check_interval": "2000",
}
_ONLY_ON_LINUX = ("client_connection_check_interval", "tcp_user_timeout")
"""Other platforms refuse some of these by an error."""
# Until it has been run, the path may have anybody's operators before PostgreSQL's own.
_PIN = (
    "SELECT pg_catalog.set_config(known.name, pinned.value, false)"
    " FROM (VALUES %pairs%) AS pinned (name, value)"
    " JOIN pg_catalog.pg_settings AS known ON pg_catalog.lower(known.name) OPERATOR(pg_catalog.=)"
    " pinned.name"
)
IDLE_LIMIT_S = 15
"""How long a transaction that holds locks may send nothing. Then its process hangs; the server ends it."""
CONNECT_TIMEOUT_S = 15
# Likewise we of the server; a DSN may say otherwise. What arrives, and is not passed on, they do not notice:
# that is what `time_limit` and `liveness` are for.
_TCP_LIMITS = {
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}
_MAX_APPLICATION_NAME = 63
_SCHEMES = ("postgresql", "postgres")
_REFUSALS: tuple[tuple[str, type[SourceError], str], ...] = (
    (
        "password authentication failed|no password supplied|authentication failed",
        SourceConnectionError,
        "check user and password of the connection",
    ),
    (
        "max_wal_senders",
        ServerSettingError,
        "raise max_wal_senders (needs a restart), or stop a replication client that is no longer needed:"
        " select pid, application_name from pg_stat_replication",
    ),
    (
        "replication role|permission denied to start WAL sender|REPLICATION attribute",
        PrivilegeError,
        "ALTER ROLE … REPLICATION (Amazon RDS and Aurora: GRANT rds_replication TO …)",
    ),
    ("permission denied", PrivilegeError, "GRANT CONNECT ON DATABASE … TO …"),
    (
        "pg_hba.conf",
        SourceConnectionError,
        "pg_hba.conf of the server must let this user in from this host (to the database itself: a"
        " replication entry does not count here)",
    ),
    (
        "does not exist",
        SourceConnectionError,
        "check database and user of the connection",
    ),
    (
        "replication",
        SourceConnectionError,
        "a connection pooler does not pass replication connections on: use the server's direct address",
    ),
)
UNREAD_S = 2.0
"""How long what the server has sent may lie unread. An answer is read within milliseconds."""
_LOOKS = 20
"""So often it is looked at least: a process that was paused finds an answer that has waited for it."""


def with_system_certificates(parameters: Mapping[str, str]) -> dict[str, str]:
    """Connection parameters with `system` as libpq means it: that file, and no weaker check than verify-full.

    SSL_CERT_FILE names another one. Raises ConfigError where there is none, or a weaker check was asked for.
    """
    given = dict(parameters)
    if given.get("sslrootcert") != _SYSTEM:
        return given
    mode = given.get("sslmode", _STRICT)
    if mode != _STRICT:
        raise ConfigError(
            f"sslmode {mode} is too weak for sslrootcert system: anybody can have a certificate of those",
            f"set sslmode to {_STRICT}, or leave it out",
        )
    found = _find()
    if found is None:
        raise ConfigError(
            "sslrootcert is system, and this machine has no file of certificates that it trusts",
            "install ca-certificates, name the file in SSL_CERT_FILE, or give its path as sslrootcert",
        )
    return {**given, "sslrootcert": found, "sslmode": _STRICT}


def _find() -> str | None:
    # Python's own OpenSSL is the distribution's; it also looks at SSL_CERT_FILE.
    places = (ssl.get_default_verify_paths().cafile, *_KNOWN)
    return next((place for place in places if place and Path(place).is_file()), None)


@contextmanager
def answered_within(fileno: int, limit_s: float | None) -> Iterator[threading.Event]:
    """The socket is shut down when the block takes longer; the event says that it was. None is no limit.

    Raises psycopg2.OperationalError when there is no socket any more.
    """
    overdue = threading.Event()
    if limit_s is None:
        yield overdue
        return
    with _line(fileno) as line:

        def end() -> None:
            overdue.set()
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(limit_s, end)
        timer.daemon = True
        timer.start()
        try:
            yield overdue
        finally:
            timer.cancel()
            timer.join()


def _line(fileno: int) -> socket.socket:
    """The socket by a descriptor of our own: the number may be another connection's when the time is over."""
    try:
        return socket.socket(fileno=os.dup(fileno))
    except OSError:
        # libpq has closed it, in another thread's statement, and the driver does not know it yet.
        raise psycopg2.OperationalError("the connection was lost") from None


def abandon(connection: psycopg2.extensions.connection) -> None:
    """Shut the socket down without a word to the server: who waits for it, waits no longer.

    May be called from any thread, and for a connection that is closed.
    """
    with suppress(psycopg2.Error, OSError), _line(connection.fileno()) as line:
        line.shutdown(socket.SHUT_RDWR)


class LimitedCursor(psycopg2.extensions.cursor):
    """Its `execute` keeps to the `answer_limit_s` of its connection."""

    def execute(self, *arguments: Any, **named: Any) -> None:
        """Raises psycopg2.OperationalError when there is no answer in time."""
        assert isinstance(self.connection, LimitedConnection)
        limit_s = self.connection.answer_limit_s
        with answered_within(self.connection.fileno(), limit_s) as overdue:
            try:
                super().execute(*arguments, **named)
            except psycopg2.Error:
                if overdue.is_set():
                    raise _no_answer(limit_s) from None
                raise


class LimitedConnection(psycopg2.extensions.connection):
    """A connection whose statements keep to a limit."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.answer_limit_s: float | None = ANSWER_LIMIT_S
        self.cursor_factory = LimitedCursor


@contextmanager
def patience(connection: psycopg2.extensions.connection, limit_s: float | None) -> Iterator[None]:
    """Statements of the block, which wait for others or work long, have another limit; None is none."""
    if not isinstance(connection, LimitedConnection):
        yield
        return
    before, connection.answer_limit_s = connection.answer_limit_s, limit_s
    try:
        yield
    finally:
        connection.answer_limit_s = before


def _no_answer(limit_s: float | None) -> psycopg2.OperationalError:
    return psycopg2.OperationalError(
        f"no answer within {limit_s:g} s: the network swallows what is sent, or the statement waits for a"
        " lock that somebody holds"
    )


def pin_statement(*, is_stream: bool = False) -> str:
    """One SQL text that pins every setting the server knows, for any kind of connection.

    Startup options will not do: a server that does not know one of them refuses the connection. The client of
    a stream may read nothing for longer than `tcp_user_timeout`; it has `wal_sender_timeout`.
    """
    names = [name for name in PINNED_SETTINGS if not (is_stream and name == "tcp_user_timeout")]
    pairs = ", ".join(f"('{name.lower()}', {_pinned(name)})" for name in names)
    return _PIN.replace("%pairs%", pairs)


def _pinned(name: str) -> str:
    value = f"'{PINNED_SETTINGS[name]}'"
    if name not in _ONLY_ON_LINUX:
        return value
    is_linux = "pg_catalog.strpos(pg_catalog.version(), 'linux') OPERATOR(pg_catalog.>) 0"
    return f"CASE WHEN {is_linux} THEN {value} ELSE '0' END"


def application_name(role: str) -> str:
    """Return the application name of a session of ours."""
    return f"pgrepl {role}"[:_MAX_APPLICATION_NAME]


def stream_role(slot: str) -> str:
    """Return the role of the session that reads a slot."""
    return f"receive {slot}"


def acting_role_hint(connection: Connection) -> str:
    """Return how a session that acts as another role than it logged in as gets its own back; "" for others.

    ALTER ROLE … SET role makes it one. Rights that the other role lacks should rarely be granted to it.
    Raises psycopg2's errors.
    """
    login, acting = row(
        connection,
        "SELECT pg_catalog.quote_ident(session_user::text), pg_catalog.quote_ident(current_user::text)",
    )
    if login == acting:
        return ""
    return f"{login} acts as {acting} because of its setting role: ALTER ROLE {login} RESET role; or "


def limit_idleness(connection: Connection, limit_s: float | None = None) -> None:
    """Have the server end the session if its transaction sends nothing for IDLE_LIMIT_S, or `limit_s`.

    A process that hangs, or is stopped, keeps its connections. Raises psycopg2's errors.
    """
    limit_ms = int((IDLE_LIMIT_S if limit_s is None else limit_s) * 1000)
    with connection.cursor() as cursor:
        cursor.execute(f"SET LOCAL idle_in_transaction_session_timeout = {limit_ms}")


def current_database(connection: Connection) -> str:
    """Return the name of the database that a connection leads to. Raises SourceError."""
    with source_errors("asking for the database"):
        database: str = row(connection, "SELECT pg_catalog.current_database()::text")[0]
    return database


def stream_conninfo(dsn: str, role: str) -> str:
    """The libpq connection string of the replication stream (`replication=database`). Raises ConfigError."""
    return _conninfo(dsn, role, replication="database")


def connect(dsn: str, role: str, *, read_only: bool = False) -> Connection:
    """An autocommit connection whose application name is `pgrepl <role>`, and whose statements have a limit.

    `read_only`: its transactions write nothing. Code that runs in one can change that, before it has read.
    Raises SourceConnectionError, PrivilegeError, ServerSettingError; ConfigError for an unreadable DSN.
    """
    connection = _open(dsn, _conninfo(dsn, role), LimitedConnection)
    if read_only:
        with source_errors("setting up a connection"), connection.cursor() as cursor:
            cursor.execute("SET default_transaction_read_only = on")
    return connection


def connect_replication(dsn: str, role: str) -> Connection:
    """A connection for replication commands and simple queries (no streaming). Raises as `connect`."""
    return _open(dsn, _conninfo(dsn, role), psycopg2.extras.LogicalReplicationConnection)


def _open(dsn: str, conninfo: str, factory: type[Connection]) -> Connection:
    try:
        connection = psycopg2.connect(conninfo, connection_factory=factory)
    except psycopg2.Error as error:
        raise _refused(dsn, str(error)) from None
    try:
        # Replication connections are in autocommit mode, and refuse to be told so.
        if factory is LimitedConnection:
            connection.autocommit = True
        with answered_within(connection.fileno(), ANSWER_LIMIT_S), connection.cursor() as cursor:
            cursor.execute(pin_statement())
    except psycopg2.Error as error:
        connection.close()
        raise translate(error, "setting up a connection") from None
    return connection


def _conninfo(dsn: str, role: str, **more: str) -> str:
    given = with_system_certificates(_parse(dsn))
    chosen: dict[str, Any] = {
        "connect_timeout": CONNECT_TIMEOUT_S,
        **_TCP_LIMITS,
        **given,
        "application_name": application_name(role),
        "client_encoding": "UTF8",
        **more,
    }
    text: str = psycopg2.extensions.make_dsn(**chosen)
    return text


def _parse(dsn: str) -> dict[str, str]:
    try:
        parsed: dict[str, str] = psycopg2.extensions.parse_dsn(dsn)
    except psycopg2.Error:
        # libpq's own words quote the piece it stumbled over, which may be the password.
        raise ConfigError(
            "the connection string of the source cannot be read",
            "give host=… port=… dbname=… user=… or postgresql://user@host:port/database",
        ) from None
    if _is_misread(dsn, parsed):
        raise ConfigError(
            "the connection string of the source cannot be read: what is special in user or password is not"
            " percent-encoded, or a port is no number",
            "write / as %2F and @ as %40: postgresql://user:p%40ss@host:5432/database",
        )
    return parsed


def _is_misread(dsn: str, parsed: dict[str, str]) -> bool:
    """Whether libpq takes a part of the password for something else, which messages would show."""
    if not all(port.isascii() and (port.isdigit() or not port) for port in parsed.get("port", "").split(",")):
        return True
    scheme, is_uri, rest = dsn.strip().partition("://")
    authority, _, path = rest.partition("?")[0].partition("/")
    return bool(is_uri) and scheme in _SCHEMES and ("@" in path or authority.count("@") > 1)


def address(dsn: str) -> str:
    """Where a DSN points, for messages: user, host, port and database, never the password."""
    parsed = _parse(dsn)
    host = parsed.get("host", "the local socket")
    return f"{parsed.get('user', '')}@{host}:{parsed.get('port', '5432')}/{parsed.get('dbname', '')}"


def _refused(dsn: str, text: str) -> SourceError:
    """The error for a connection that was not opened; libpq gives no error codes there, only words."""
    reason = " ".join(_without_password(text, dsn).split())
    for pattern, kind, hint in _REFUSALS:
        if re.search(pattern, reason):
            return kind(f"cannot connect to {address(dsn)}: {reason}", hint)
    return SourceConnectionError(
        f"cannot connect to {address(dsn)}: {reason}", "check host and port, and that the server runs"
    )


def _without_password(text: str, dsn: str) -> str:
    password = _parse(dsn).get("password")
    return text.replace(password, "***") if password and len(password) > 2 else text


def rows(connection: Connection, query: str, parameters: Any = None) -> list[tuple[Any, ...]]:
    """All rows of a query. Raises psycopg2's errors."""
    with connection.cursor() as cursor:
        cursor.execute(query, parameters)
        found: list[tuple[Any, ...]] = cursor.fetchall()
    return found


@contextmanager
def one_moment(connection: Connection) -> Iterator[None]:
    """All that is read inside the block is of one moment. The connection is in autocommit mode.

    Raises psycopg2's errors.
    """
    with connection.cursor() as cursor:
        cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    try:
        yield
    finally:
        if not connection.closed:
            with connection.cursor() as cursor:
                cursor.execute("ROLLBACK")


def row(connection: Connection, query: str, parameters: Any = None) -> tuple[Any, ...]:
    """The one row of a query. Raises psycopg2's errors, and LookupError without a row."""
    found = rows(connection, query, parameters)
    if not found:
        raise LookupError("the query returned no row")
    return found[0]


class EndedSession:
    """One session's. `has_ended` may be called from any thread, and sends nothing."""

    def __init__(self, connection: Connection, unread_s: float = UNREAD_S) -> None:
        self._connection = connection
        self._unread_s = unread_s
        self._unread_since: float | None = None
        self._looks = 0

    def has_ended(self) -> bool:
        """Return True after what the server has sent was not read for some seconds: it is no answer."""
        if not self._is_unread():
            self._unread_since = None
            return False
        now = time.monotonic()
        if self._unread_since is None:
            self._unread_since, self._looks = now, 0
        self._looks += 1
        return self._looks >= _LOOKS and now - self._unread_since >= self._unread_s

    def _is_unread(self) -> bool:
        # Who works with the connection may have lost and closed it, and says so himself.
        with suppress(psycopg2.Error, OSError, ValueError):
            ready, _, _ = select.select([self._connection.fileno()], [], [], 0)
            return bool(ready)
        return False
