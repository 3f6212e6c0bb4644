"""Connections to the source, all with the same settings, so that a value has the same text everywhere.

`with_system_certificates` resolves `sslrootcert=system`. The wheels of psycopg2 and psycopg contain their own
OpenSSL, which looks for trusted certificates in a folder of the machine that it was built on. So the
connecting host's certificate file is passed to it.

`answered_within` limits the wait for an answer, even if the network drops it silently. A limit of the server
(`statement_timeout`) does not help a client that no message reaches, and TCP does not notice a tunnel that
keeps the connection and delivers nothing. So the client measures the time, and shuts the socket down: libpq
then finds the connection closed, in any thread that waits for it.

`SessionEndDetector` detects that the server has ended a session that another thread uses occasionally. A
server that shuts down ends its sessions with an unrequested error. It then waits for its walsenders until
they have sent everything, and what they sent is confirmed.
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

import psycopg2.extensions
import psycopg2.extras

from airflow_provider_pgrepl.errors import (
    ConfigError,
    LoginError,
    PrivilegeError,
    ServerSettingError,
    SourceConnectionError,
    SourceError,
)

from .deadlines import Deadlines
from .server_errors import source_errors, translate

_SYSTEM = "system"
_STRICT = "verify-full"
_KNOWN = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Ubuntu, Alpine
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora, Red Hat
    "/etc/ssl/ca-bundle.pem",  # SUSE
    "/etc/ssl/cert.pem",  # macOS, Alpine
)
ANSWER_LIMIT_S = 60.0
"""The seconds that a statement may take. Those on the catalog or this package's state take milliseconds."""
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
    # A backslash in this package's string literals is a plain character.
    "standard_conforming_strings": "on",
    # A policy would silently filter a copy; with off, the server raises an error instead.
    "row_security": "off",
    # Override settings of the role or database that are meant for its other sessions.
    "default_transaction_read_only": "off",
    "default_transaction_isolation": "read committed",
    # In kB. With less, sorting the catalog of many tables writes temporary files, which a temp_file_limit of
    # the role may forbid, and only a superuser may change.
    "work_mem": "16384",
    # If this pipeline's walsender is a synchronous standby, commits would wait for it, even before it runs.
    "synchronous_commit": "local",
    # Leave the few parallel workers to the application.
    "max_parallel_workers_per_gather": "0",
    # Each of these timeouts would end a `SnapshotHolder` session or a long copy.
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    "transaction_timeout": "0",
    # The server notices within a minute that the client has vanished, and releases slot and locks.
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
    # TCP sends no keepalives while data that the server has sent is not acknowledged.
    "tcp_user_timeout": "60000",
    # A session that waits for a lock checks whether its client has vanished.
    "client_connection_check_interval": "2000",
}
_ONLY_ON_LINUX = ("client_connection_check_interval", "tcp_user_timeout")
"""Settings that servers on other platforms may reject with an error."""
# Until this statement has run, the search path may have other operators before PostgreSQL's own.
_PIN = (
    "SELECT pg_catalog.set_config(pinned.name, pinned.value, false)"
    " FROM (VALUES %pairs%) AS pinned (name, value)"
    # NULL for a setting that the server does not know. pg_settings would compute all settings.
    " WHERE pg_catalog.current_setting(pinned.name, true) IS NOT NULL"
)
IDLE_LIMIT_S = 15
"""The seconds that a transaction with locks may be idle. After that, the server ends the session: its process
hangs."""
CONNECT_TIMEOUT_S = 15
# The same limits for the client; a DSN may override them. They do not notice data that arrives but is not
# passed on: `answered_within` and `Liveness` do.
_TCP_LIMITS = {
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}
_MAX_APPLICATION_NAME = 63
_HOST_KEYS = ("host", "hostaddr", "port")
_SCHEMES = ("postgresql", "postgres")
_REFUSALS: tuple[tuple[str, type[SourceError], str], ...] = (
    (
        'password authentication failed|no password supplied|authentication failed|role ".*" does not exist'
        "|is not permitted to log in",
        LoginError,
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
        LoginError,
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
_logged_in: set[str] = set()
"""The connection strings with which this process has logged in."""
UNREAD_S = 2.0
"""The seconds that data from the server may stay unread. An answer is read within milliseconds."""
_deadlines = Deadlines()
_LOOKS = 20
"""The least number of checks that find unread data: a process that was paused finds an answer waiting."""


def with_system_certificates(parameters: Mapping[str, str]) -> dict[str, str]:
    """Return connection parameters in which `sslrootcert=system` is replaced by the host's certificate file.

    `sslmode` is verify-full then. SSL_CERT_FILE names another file. Raises ConfigError if there is no file,
    or if `sslmode` is another one.
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
    # Python uses the distribution's OpenSSL, which also reads SSL_CERT_FILE.
    places = (ssl.get_default_verify_paths().cafile, *_KNOWN)
    return next((place for place in places if place and Path(place).is_file()), None)


@contextmanager
def answered_within(fileno: int, limit_s: float | None) -> Iterator[threading.Event]:
    """Shut the socket down if the block takes longer than `limit_s` seconds. None means no limit.

    Yields an event that is set if the socket was shut down. Raises psycopg2.OperationalError if the socket is
    closed already.
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

        with _deadlines.calling(end, limit_s):
            yield overdue


def _line(fileno: int) -> socket.socket:
    """Return the socket with a duplicated descriptor: the number may be another connection's later.

    Raises psycopg2.OperationalError if the socket is closed.
    """
    try:
        return socket.socket(fileno=os.dup(fileno))
    except OSError:
        # libpq has closed the socket in another thread's statement, and psycopg2 has not noticed yet.
        raise psycopg2.OperationalError("the connection was lost") from None


def abandon(connection: psycopg2.extensions.connection) -> None:
    """Shut the socket down without notifying the server, so that a thread that waits for it returns.

    May be called from any thread, and for a closed connection.
    """
    with suppress(psycopg2.Error, OSError), _line(connection.fileno()) as line:
        line.shutdown(socket.SHUT_RDWR)


class LimitedCursor(psycopg2.extensions.cursor):
    """A cursor whose `execute` observes the `answer_limit_s` of its connection."""

    def execute(self, *arguments: Any, **named: Any) -> None:
        """Execute a statement. Raises psycopg2.OperationalError if there is no answer in time."""
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
    """A connection whose statements have a time limit, `answer_limit_s`."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.answer_limit_s: float | None = ANSWER_LIMIT_S
        self.cursor_factory = LimitedCursor
        self.given_dsn = ""
        """The connection string that `connect` was given."""


@contextmanager
def patience(connection: psycopg2.extensions.connection, limit_s: float | None) -> Iterator[None]:
    """Set another limit in seconds for the statements of the block. None means no limit.

    For statements that wait for other sessions or work long. A connection without a limit is left unchanged.
    """
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
        f"no answer within {limit_s:g} s: the network drops packets, or the statement waits for a"
        " lock that another session holds"
    )


def pin_statement(*, is_stream: bool = False) -> str:
    """Return one SQL statement that pins every setting the server knows, for any kind of connection.

    Startup options cannot be used: a server that does not know one of them rejects the connection. For a
    stream, `tcp_user_timeout` is left out: its client may read nothing for longer, within
    `wal_sender_timeout`.
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
    """Return the application name of a session of this package."""
    return f"pgrepl {role}"[:_MAX_APPLICATION_NAME]


def stream_role(slot: str) -> str:
    """Return the role of the session that reads a slot."""
    return f"receive {slot}"


def acting_role_hint(connection: Connection) -> str:
    """Return a hint for a session that acts as another role than its login role; "" for other sessions.

    ALTER ROLE … SET role causes this. The hint resets it: privileges that the other role lacks should rarely
    be granted to it. Raises psycopg2's errors.
    """
    login, acting = row(
        connection,
        "SELECT pg_catalog.quote_ident(session_user::text), pg_catalog.quote_ident(current_user::text)",
    )
    if login == acting:
        return ""
    return f"{login} acts as {acting} because of its setting role: ALTER ROLE {login} RESET role; or "


def limit_idleness(connection: Connection, limit_s: float | None = None) -> None:
    """Limit the idle time of the current transaction to `limit_s` seconds, by default IDLE_LIMIT_S.

    After that the server ends the session: a process that hangs, or is stopped, keeps its connections. Raises
    psycopg2's errors.
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
    """Return the libpq connection string of the stream, with `replication=database`. Raises ConfigError."""
    return _conninfo(dsn, role, replication="database")


def connect(dsn: str, role: str, *, read_only: bool = False) -> Connection:
    """Return an autocommit connection with application name `pgrepl <role>` and a time limit on statements.

    `read_only`: its transactions are read-only by default. Code in a transaction can change that before the
    transaction has read anything. Raises SourceConnectionError, PrivilegeError, ServerSettingError, and
    ConfigError for an invalid DSN.
    """
    connection = _open(dsn, _conninfo(dsn, role), LimitedConnection)
    assert isinstance(connection, LimitedConnection)
    connection.given_dsn = dsn
    if read_only:
        with source_errors("setting up a connection"), connection.cursor() as cursor:
            cursor.execute("SET default_transaction_read_only = on")
    return connection


def server_dsn(connection: Connection) -> str:
    """Return the connection string of the one server that a connection of `connect` leads to.

    Other connections with the string that names several hosts may lead to another of them.
    """
    assert isinstance(connection, LimitedConnection)
    given, info = _parse(connection.given_dsn), connection.info
    if not info.host:
        return connection.given_dsn
    found = [one for one in hosts_of(given) if one.get("host", one.get("hostaddr")) == info.host]
    at_port = [one for one in found if one.get("port", str(info.port)) == str(info.port)]
    address_of = {"hostaddr": at_port[0]["hostaddr"]} if at_port and "hostaddr" in at_port[0] else {}
    rest = {key: value for key, value in given.items() if key not in _HOST_KEYS}
    text: str = psycopg2.extensions.make_dsn(
        **{**rest, "host": info.host, "port": str(info.port), **address_of}
    )
    _logged_in.add(text)
    return text


def other_hosts(connection: Connection) -> Iterator[tuple[str, str]]:
    """Yield name and connection string of each other host that the string of a connection names.

    These strings accept a server in any state, also a standby.
    """
    assert isinstance(connection, LimitedConnection)
    given, info = _parse(connection.given_dsn), connection.info
    rest = {key: value for key, value in given.items() if key not in (*_HOST_KEYS, "target_session_attrs")}
    for host in hosts_of(given):
        name, port = host.get("host", host.get("hostaddr")), host.get("port", "5432")
        if (name, port) != (info.host, str(info.port)):
            yield f"{name}:{port}", psycopg2.extensions.make_dsn(**rest, **host)


def hosts_of(parameters: Mapping[str, str]) -> list[dict[str, str]]:
    """Return host, hostaddr and port of each host that connection parameters name, as libpq pairs them."""
    lists = {key: parameters[key].split(",") for key in _HOST_KEYS if parameters.get(key)}
    count = max((len(values) for key, values in lists.items() if key != "port"), default=0)
    return [
        {
            key: values[index if len(values) > 1 else 0]
            for key, values in lists.items()
            if values[index if len(values) > 1 else 0]
        }
        for index in range(count)
    ]


def connect_replication(dsn: str, role: str) -> Connection:
    """Return a connection for replication commands and simple queries (no streaming). Raises as `connect`."""
    return _open(dsn, _conninfo(dsn, role), psycopg2.extras.LogicalReplicationConnection)


def _open(dsn: str, conninfo: str, factory: type[Connection]) -> Connection:
    try:
        connection = psycopg2.connect(conninfo, connection_factory=factory)
    except psycopg2.Error as error:
        raise _refused(dsn, str(error)) from None
    _logged_in.add(dsn)
    try:
        # Replication connections are always in autocommit mode, and raise an error if it is set.
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
        # Suppress the cause: libpq's message quotes the text that it could not parse, maybe the password.
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
    """Return True if libpq takes part of the password for another parameter, which messages would show."""
    if not all(port.isascii() and (port.isdigit() or not port) for port in parsed.get("port", "").split(",")):
        return True
    scheme, is_uri, rest = dsn.strip().partition("://")
    authority, _, path = rest.partition("?")[0].partition("/")
    return bool(is_uri) and scheme in _SCHEMES and ("@" in path or authority.count("@") > 1)


def address(dsn: str) -> str:
    """Return user, host, port and database of a DSN for messages, never the password."""
    parsed = _parse(dsn)
    host = parsed.get("host", "the local socket")
    return f"{parsed.get('user', '')}@{host}:{parsed.get('port', '5432')}/{parsed.get('dbname', '')}"


def server_and_database(dsn: str) -> tuple[tuple[str, str], str]:
    """Return (host, port) and database of a DSN: the first host of several, `localhost` for a socket."""
    parsed = _parse(dsn)
    host = parsed.get("host", "").partition(",")[0]
    port = parsed.get("port", "").partition(",")[0]
    is_socket = not host or host.startswith(("/", "@"))
    server = "localhost" if is_socket else host, port or "5432"
    return server, parsed.get("dbname") or parsed.get("user", "")


def _refused(dsn: str, text: str) -> SourceError:
    """Return the error for a connection that was not opened. libpq gives no SQLSTATE for it, only a text."""
    reason = " ".join(_without_password(text, dsn).split())
    for pattern, kind, hint in _REFUSALS:
        if re.search(pattern, reason):
            if kind is LoginError and _may_succeed_later(dsn):
                kind = SourceConnectionError
            return kind(f"cannot connect to {address(dsn)}: {reason}", hint)
    return SourceConnectionError(
        f"cannot connect to {address(dsn)}: {reason}", "check host and port, and that the server runs"
    )


def _may_succeed_later(dsn: str) -> bool:
    """Return True if a rejected login may succeed without a correction of the connection string.

    Either the string has no password, so that libpq reads it from a file that another program may rewrite. Or
    this process has logged in with the string before: the password was changed since then, and the next try
    of a task reads the connection again.
    """
    return dsn in _logged_in or not ("password" in _parse(dsn) or "PGPASSWORD" in os.environ)


def _without_password(text: str, dsn: str) -> str:
    password = _parse(dsn).get("password")
    return text.replace(password, "***") if password and len(password) > 2 else text


def rows(connection: Connection, query: str, parameters: Any = None) -> list[tuple[Any, ...]]:
    """Return all rows of a query. Raises psycopg2's errors."""
    with connection.cursor() as cursor:
        cursor.execute(query, parameters)
        found: list[tuple[Any, ...]] = cursor.fetchall()
    return found


@contextmanager
def one_moment(connection: Connection) -> Iterator[None]:
    """Run the block in a read-only transaction with one snapshot. The connection is in autocommit mode.

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
    """Return the first row of a query. Raises psycopg2's errors, and LookupError if there is no row."""
    found = rows(connection, query, parameters)
    if not found:
        raise LookupError("the query returned no row")
    return found[0]


class SessionEndDetector:
    """A detector of a session's end. `has_ended` may be called from any thread, and sends nothing."""

    def __init__(self, connection: Connection, unread_s: float = UNREAD_S) -> None:
        self._connection = connection
        self._unread_s = unread_s
        self._unread_since: float | None = None
        self._looks = 0

    def has_ended(self) -> bool:
        """Return True if data from the server stayed unread for `unread_s` seconds: it is not an answer."""
        if not self._is_unread():
            self._unread_since = None
            return False
        now = time.monotonic()
        if self._unread_since is None:
            self._unread_since, self._looks = now, 0
        self._looks += 1
        return self._looks >= _LOOKS and now - self._unread_since >= self._unread_s

    def _is_unread(self) -> bool:
        # The thread that uses the connection may have closed it, and reports that itself.
        with suppress(psycopg2.Error, OSError, ValueError):
            ready, _, _ = select.select([self._connection.fileno()], [], [], 0)
            return bool(ready)
        return False
