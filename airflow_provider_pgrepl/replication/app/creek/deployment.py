"""A creek deployment as a pipeline: its variables, its functions at the source, and child processes.

Deployment is creek's environment as a pipeline with one publisher. Names and defaults are those of creek's
cmd/creekd.go at b88e46c.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

import psycopg2.extensions

from airflow_provider_pgrepl.errors import (
    ConfigError,
    PgReplError,
    PrivilegeError,
    PublicationError,
    TableError,
)
from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.runtime import spark_submit
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.connection import Connection, connect, rows
from airflow_provider_pgrepl.replication.source.preflight.tables import refused_once_published
from airflow_provider_pgrepl.replication.source.publication import create_at_once, read_publication
from airflow_provider_pgrepl.replication.source.server_errors import source_errors
from airflow_provider_pgrepl.replication.source.slot import Slot, read_slot

PUBLISHER = "creek"
LAKE_VARIABLE = "PGREPL_LAKE"
OPTIONS_VARIABLE = "PGREPL_PIPELINE_OPTIONS"
PUBLISHER_VARIABLE = "PGREPL_PUBLISHER_OPTIONS"
_METRICS_HOST_VARIABLE = "PGREPL_METRICS_HOST"
_NEEDED = ("PG_URI", "PG_PUBLICATION_NAME", "PG_PUBLICATION_SLOT", "NATS_URI", LAKE_VARIABLE)
_WITHOUT_EFFECT = (
    *("PG_MESSAGE_TIMEOUT", "NATS_TIMEOUT", "NATS_MAX_PENDING", "NATS_REPLICAS", "NATS_RETENTION_POLICY"),
    *("NATS_RETENTION_MAX_AGE", "NATS_RETENTION_MAX_BYTES", "NATS_RETENTION_MAX_MSGS"),
)
"""Variables that creek reads, and does not use either."""
_METRICS_PORT = "7779"
_OURS = ("name", "lake", "tables", "publication", "publication_mode", "publishers")
_PUBLISHERS = ("target", "namespace", "database", "format", "metrics")
log = logging.getLogger(__name__)
_SCHEMA, *_FUNCTIONS = (
    (Path(__file__).parent / "functions.sql").read_text(encoding="utf-8").strip().split("\n\n")
)
_SIGNATURE = re.compile(r"CREATE OR REPLACE FUNCTION (_creek\.\w+)")
_SOURCE = """
SELECT prosrc, proconfig IS NULL AND NOT prosecdef FROM pg_catalog.pg_proc
WHERE oid = pg_catalog.to_regprocedure(%s)
"""
_EARLIER = frozenset(
    {
        "6af26bbb34fb1064a69b1ef2b12715aab5556eab307b084800bf0d8e4a504ab3",
        "0add4bce346f3dded772f668dce40661151f8e47b9d9dabd4ee2a7d6bbf31461",
    }
)
"""SHA-256 of the bodies that earlier versions of this package gave its functions, which had no settings."""
_PAUSE_S = 5.0
_PR_SET_PDEATHSIG = 1
_ENDS_WITHIN_S = process.STOP_LIMIT_S + 20.0


@dataclass(frozen=True)
class Deployment:
    """The settings of a creek deployment, from its environment variables.

    `tables`: the tables for which the publication is created if it does not exist. `replaced_slot`: creek's
    slot. `without_effect`: variables that were set and change nothing.
    """

    dsn: str = field(repr=False)
    nats_uri: str = field(repr=False)
    database: str
    publication: str
    replaced_slot: str
    tables: tuple[TableName, ...]
    namespace: str
    lake: str
    metrics: str
    log_level: str
    options: Mapping[str, Any]
    publisher_options: Mapping[str, Any]
    without_effect: tuple[str, ...]

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Deployment:
        """Read the settings. Raises ConfigError, which names the variable."""
        given = {name: value.strip() for name, value in environment.items() if value.strip()}
        if missing := [name for name in _NEEDED if name not in given]:
            raise ConfigError(
                f"{', '.join(missing)}: not set",
                "they are creek's own; PGREPL_LAKE is a folder that stays, as /lake, a volume",
            )
        dsn = _without_pool(given["PG_URI"])
        return cls(
            dsn,
            given["NATS_URI"],
            _database(dsn),
            given["PG_PUBLICATION_NAME"],
            given["PG_PUBLICATION_SLOT"],
            _tables(given.get("PG_TABLES", "")),
            given.get("NATS_NAMESPACE", "CREEK"),
            given[LAKE_VARIABLE],
            _metrics(given),
            given.get("LOG_LEVEL", "info"),
            _options(OPTIONS_VARIABLE, given, "the pipeline file's fields", _OURS),
            _options(PUBLISHER_VARIABLE, given, "a publisher's settings", _PUBLISHERS),
            tuple(name for name in _WITHOUT_EFFECT if name in given),
        )

    def pipeline(self, tables: Collection[TableName]) -> Pipeline:
        """Return the pipeline with these tables, which the publication has. Raises ConfigError."""
        # creek's consumers read NULL as the value: by default no NULL is sent for a value that is not known.
        given = {"unchanged": "require", **self.publisher_options}
        publisher = {**given, "target": "nats", "namespace": self.namespace, "database": self.database}
        fields = {
            "lake_tables": "none",
            **self.options,
            "name": re.sub("[^a-z0-9_]", "_", self.replaced_slot.lower()).strip("_")[:55],
            "lake": self.lake,
            "tables": sorted(map(str, tables)),
            "publication": self.publication,
            "publication_mode": "use",
            "publishers": {PUBLISHER: {**publisher, "metrics": self.metrics}},
        }
        return Pipeline.from_dict(fields)


def _without_pool(uri: str) -> str:
    """Return the URI without settings of creek's connection pool (pgxpool.ParseConfig), which libpq
    rejects."""
    if not uri.startswith(("postgres://", "postgresql://")):
        return uri
    try:
        parts = urlsplit(uri)
    except ValueError:
        raise _unreadable("PG_URI") from None
    kept = [(name, value) for name, value in parse_qsl(parts.query, True) if not name.startswith("pool_")]
    # libpq takes a plus sign for itself, not for a space.
    return urlunsplit(parts._replace(query=urlencode(kept, quote_via=quote)))


def _database(dsn: str) -> str:
    try:
        found = psycopg2.extensions.parse_dsn(dsn)
    except psycopg2.Error:
        raise _unreadable("PG_URI") from None
    if not found.get("dbname"):
        raise ConfigError("PG_URI: names no database", "creek's subjects carry its name: …:5432/shop")
    return str(found["dbname"])


def _unreadable(variable: str) -> ConfigError:
    return ConfigError(f"{variable}: cannot be read", "give it as postgres://user:password@host:5432/shop")


def _tables(text: str) -> tuple[TableName, ...]:
    try:
        return tuple(TableName.parse(name.strip()) for name in text.split(",") if name.strip())
    except ValueError as error:
        raise ConfigError(f"PG_TABLES: {error}") from None


def _metrics(given: Mapping[str, str]) -> str:
    port = given.get("PROMETHEUS_PORT", _METRICS_PORT)
    return "" if port == "0" else f"{given.get(_METRICS_HOST_VARIABLE, '0.0.0.0')}:{port}"  # noqa: S104 - creek's


def _options(variable: str, given: Mapping[str, str], what: str, by_creek: Collection[str]) -> dict[str, Any]:
    try:
        found = json.loads(given.get(variable, "{}"))
    except ValueError as error:
        raise ConfigError(f"{variable}: is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{variable}: must be an object of {what}")
    if taken := sorted(set(found) & set(by_creek)):
        raise ConfigError(
            f"{variable}: {', '.join(taken)}: creek's own variables set this already; the key is not"
            " allowed here"
        )
    return found


class SourceTables:
    """A connection to the source that is notified when a table is added to or removed from the publication.

    A connection that was lost is opened again. All methods but `has_news` raise SourceConnectionError.
    `prepare` raises PrivilegeError if the role may not create the publication; without the functions it goes
    on, with a warning.
    """

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._connection: Connection | None = None

    def prepare(self) -> None:
        """Create the functions and the publication that are missing.

        Raises TableError for tables whose changes the source would reject, and SnapshotError if the locks of
        the publication's tables are not available in time.
        """
        connection = self._connected()
        try:
            with source_errors("making the schema _creek"):
                _execute(connection, _SCHEMA)
                for function in _FUNCTIONS:
                    _make(connection, function)
        except PrivilegeError as error:
            log.warning("the functions of schema _creek were not created or updated: %s", error)
        if read_publication(connection, self._deployment.publication) is None:
            self._create_publication(connection)

    def _create_publication(self, connection: Connection) -> None:
        """Create the publication as creek does, for the tables in PG_TABLES.

        Raises TableError, SnapshotError.
        """
        name, tables = self._deployment.publication, self._deployment.tables
        # Check this first: once a table is published, the application's UPDATE and DELETE of it could fail.
        if refused := refused_once_published(connection, self._deployment.pipeline(tables), tables):
            raise TableError(
                "\n".join(f"{one.table}: {one.problem}. Either {one.cure}" for one in refused),
                "nothing was published. Fix the table, or remove it from PG_TABLES. If rows are only"
                " inserted into it, list it in insert_only (PGREPL_PIPELINE_OPTIONS)",
            )
        create_at_once(connection, name, tables)
        log.info("made the publication %s", name)

    def planned(self) -> frozenset[TableName]:
        """Return the publication's tables, or those for which it will be created.

        Raises PublicationError if it would be created without tables.
        """
        name = self._deployment.publication
        found = read_publication(self._connected(), name)
        if found is not None:
            return found.tables
        if not self._deployment.tables:
            raise PublicationError(
                f"there is no publication {name}, and PG_TABLES names no tables for it",
                "set PG_TABLES",
            )
        return frozenset(self._deployment.tables)

    def published(self) -> frozenset[TableName]:
        """Return the publication's tables. Raises PublicationError if the publication no longer exists."""
        found = read_publication(self._connected(), self._deployment.publication)
        if found is None:
            raise PublicationError(
                f"the publication {self._deployment.publication} was dropped",
                "changes since then are lost, and every table needs a new copy. Keep slot and lake. Start the"
                " service again, which creates the publication and logs the path of its pipeline file; then"
                " begin a new epoch with that file: pgrepl snapshot FILE.json --new-epoch",
            )
        return found.tables

    def replaced_slot(self) -> Slot | None:
        """Return creek's own slot, or None if it does not exist any more."""
        return read_slot(self._connected(), self._deployment.replaced_slot)

    def has_news(self) -> bool:
        """Return True if a table was added or removed since the last call, as far as the connection was
        notified."""
        try:
            connection = self._connected()
            with source_errors("listening"):
                connection.poll()
        except PgReplError as error:
            log.warning(
                "the connection that notifies of added tables failed; trying again: %s", error.message
            )
            self.close()
            return False
        heard = bool(connection.notifies)
        connection.notifies = []
        return heard

    def _connected(self) -> Connection:
        if self._connection is None or self._connection.closed:
            self._connection = connect(self._deployment.dsn, "creek")
            with source_errors("listening"):
                _execute(self._connection, "LISTEN creek")
        return self._connection

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _make(connection: Connection, function: str) -> None:
    """Create a function of schema _creek if none of its name and arguments exists.

    An existing function is replaced only if an earlier version of this package created it and it is
    unchanged.
    """
    match = _SIGNATURE.match(function)
    assert match is not None
    name, body = match[1], function.split("$$")[1]
    found = rows(connection, _SOURCE, (f"{name}(text, regclass)",))
    if not found or _is_earlier(*found[0]):
        _execute(connection, function)
    elif found[0][0] != body:
        log.warning(
            "the function %s was not made by this package, and stays. To have the table checked and locked"
            " first, drop it and start again",
            name,
        )


def _is_earlier(body: str, has_no_settings: bool) -> bool:
    return has_no_settings and sha256(body.encode()).hexdigest() in _EARLIER


def _execute(connection: Connection, command: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(command)


class ChildProcess:
    """A child process that runs an app. The constructor does not start it.

    It has the environment variables of this process, and those in `environment`.
    """

    def __init__(self, app: str, arguments: list[str], environment: Mapping[str, str]) -> None:
        self.app = app
        # Do not use spark-submit: its JVM would outlive this process when that is killed, and the app with
        # it.
        self._command = [sys.executable, spark_submit.application(app), *arguments]
        self._environment = {**os.environ, **spark_submit.quiet_logging(), **environment}
        self._process: subprocess.Popen[bytes] | None = None
        self._due = 0.0

    def start(self) -> None:
        """Start the process. It writes its log to this process's stderr."""
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )

    def ended(self) -> int | None:
        """Return the exit code once after the end; None while the process runs, or if it was not started."""
        code = None if self._process is None else self._process.poll()
        if code is not None:
            self._process, self._due = None, time.monotonic() + _PAUSE_S
        return code

    @property
    def is_due(self) -> bool:
        """Return True if the process does not run, and `ended` has reported no end within the last 5 s."""
        return self._process is None and time.monotonic() >= self._due

    def ask_to_end(self) -> None:
        """Send SIGTERM to the process, which then ends between two transactions."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def wait(self) -> None:
        """Wait until the process has ended. After 120 s it is killed, which loses nothing."""
        if self._process is None:
            return
        try:
            self._process.wait(_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            log.error("%s did not end in time, and is killed", self.app)
            self._process.kill()
            self._process.wait()
        self._process = None


def _end_with_parent() -> None:
    """Ask Linux for a SIGTERM if the parent process is killed. Runs in the child before the app starts."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
