"""The diagnosis of a pipeline: findings of checks. Starts no Spark, and changes nothing at the source."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from airflow_provider_pgrepl.errors import SNAPSHOT, PgReplError, ToolError, document, one_line
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.status.health import HealthLimits, Severity, find_health_problems
from airflow_provider_pgrepl.replication.app.status.status import read_status
from airflow_provider_pgrepl.replication.app.tables import requested_at
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.runtime import spark_submit
from airflow_provider_pgrepl.replication.runtime.host import check_libraries
from airflow_provider_pgrepl.replication.runtime.quantities import show_bytes, show_duration
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog.sequences import refused_sequences
from airflow_provider_pgrepl.replication.source.connection import Connection, address, connect, row, rows
from airflow_provider_pgrepl.replication.source.failover import failover_problems, failover_warnings
from airflow_provider_pgrepl.replication.source.preflight.check import (
    replication_problems,
    role_problems,
    server_problems,
    server_warnings,
    slot_problems,
    table_faults,
)
from airflow_provider_pgrepl.replication.source.preflight.selection import resolve_tables
from airflow_provider_pgrepl.replication.source.preflight.tables import table_warnings
from airflow_provider_pgrepl.replication.source.server import read_server, read_slot_limits
from airflow_provider_pgrepl.replication.source.server_errors import source_errors
from airflow_provider_pgrepl.replication.source.slot import read_slot
from airflow_provider_pgrepl.replication.spark.connectors import JARS_VARIABLE, delta_jars
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.storage.probe import (
    UNKNOWN_MARGIN,
    check_directory,
    check_store,
    storage_lead,
)

_PACKAGES = ("airflow-provider-pgrepl", "deltalake", "pyarrow", "psycopg2-binary", "psycopg", "pyspark")
_CLOCK_S = 5.0
"""The difference of clocks in seconds from which on ages and lags are misleading."""
_JAVA_S = 20.0
_LEFT_OVER = """
SELECT slot_name::text, pg_catalog.pg_wal_lsn_diff(CASE WHEN pg_catalog.pg_is_in_recovery()
    THEN pg_catalog.pg_last_wal_replay_lsn() ELSE pg_catalog.pg_current_wal_lsn() END, restart_lsn)::bigint
FROM pg_catalog.pg_replication_slots
WHERE pg_catalog.starts_with(slot_name::text, 'pgrepl_') AND NOT active AND NOT temporary
    AND slot_name <> %s AND database = pg_catalog.current_database()
ORDER BY 1
"""
_SHOWN = """
SELECT name, pg_catalog.current_setting(name) FROM pg_catalog.pg_settings
WHERE name IN ('wal_level', 'max_replication_slots', 'max_wal_senders', 'wal_sender_timeout')
ORDER BY name
"""


class CheckStatus(StrEnum):
    """The result of a check."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """The result of a check: `text` is a sentence, `hint` the next step."""

    level: CheckStatus
    check: str
    text: str
    hint: str = ""

    def to_dict(self) -> dict[str, str]:
        return {"level": str(self.level), "check": self.check, "text": self.text, "hint": self.hint}


@dataclass(frozen=True)
class Diagnosis:
    """The findings about a pipeline, in the order of the checks."""

    pipeline: str
    findings: tuple[Finding, ...]

    @property
    def has_problems(self) -> bool:
        return any(finding.level is CheckStatus.PROBLEM for finding in self.findings)

    def to_text(self) -> str:
        """Return a table of the findings, with the hint below its finding."""
        lines = []
        for finding in self.findings:
            head = f"{finding.level:<8} {finding.check:<12} "
            first, *more = finding.text.splitlines() or [""]
            lines.append(f"{head}{first}")
            indent = " " * len(head)
            lines += [f"{indent}{line.strip()}" for line in more]
            lines += [f"{indent}hint: {line.strip()}" for line in finding.hint.splitlines()[:1]]
            lines += [f"{indent}{line.strip()}" for line in finding.hint.splitlines()[1:]]
        count = sum(finding.level is CheckStatus.PROBLEM for finding in self.findings)
        warnings = sum(finding.level is CheckStatus.WARNING for finding in self.findings)
        return "\n".join([*lines, "", f"pipeline {self.pipeline}: {count} problems, {warnings} warnings"])

    def to_dict(self) -> dict[str, Any]:
        return {
            "pipeline": self.pipeline,
            "findings": [finding.to_dict() for finding in self.findings],
        }


def diagnose(access: Access) -> Diagnosis:
    """Run every check. An error of a check is a problem in the result."""
    pipeline = access.pipeline
    found = [
        *_guarded("packages", _packages),
        *(_guarded("spark", _spark) if pipeline.has_lake_tables else ()),
        *_guarded("lake", lambda: _lake(pipeline)),
        *_guarded("source", lambda: _source(access)),
    ]
    # The status of a pipeline that has begun repeats what the checks of its source have found.
    said = {(finding.level, finding.text) for finding in found}
    found += [
        finding
        for finding in _guarded("state", lambda: _state(access))
        if finding.check != "pipeline" or (finding.level, finding.text) not in said
    ]
    return Diagnosis(pipeline.name, tuple(found))


def _guarded(check: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from look()
    except PgReplError as error:
        yield _problem(check, error)


def _problem(check: str, error: PgReplError) -> Finding:
    return Finding(CheckStatus.PROBLEM, check, error.message, error.hint)


def _ok(check: str, text: str) -> Finding:
    return Finding(CheckStatus.OK, check, text)


def _packages() -> Iterator[Finding]:
    check_libraries()
    found = [f"Python {platform.python_version()}", *map(_version, _PACKAGES)]
    yield _ok("packages", ", ".join(text for text in found if text))


def _version(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return ""


def _spark() -> Iterator[Finding]:
    java = spark_submit.java()
    yield _ok("spark", f"{_java_version(java)} at {java}")
    yield _ok("spark", spark_submit.spark_submit())
    spark_submit.allow_open_files()
    try:
        jars = [jar.name for jar in delta_jars()]
    except ToolError as error:
        text = f"{error.message}. Only readers with Spark need them"
        status = CheckStatus.WARNING if os.environ.get(JARS_VARIABLE) else CheckStatus.OK
        yield Finding(status, "jars", text, error.hint)
        return
    yield _ok("jars", ", ".join(jars) if jars else "Delta's jars are in pyspark's own folder")


def _java_version(java: str) -> str:
    try:
        done = subprocess.run(
            [java, "-version"], capture_output=True, text=True, check=False, timeout=_JAVA_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return "Java of an unknown version"
    return (done.stderr or done.stdout).partition("\n")[0].strip() or "Java of an unknown version"


def _lake(pipeline: Pipeline) -> Iterator[Finding]:
    root = pipeline.lake_root
    check_directory(root)
    check_store(root)
    yield _ok("lake", f"{root} can be written")
    lead = storage_lead(f"{root}/_pgrepl", datetime.now(UTC))
    if lead != UNKNOWN_MARGIN and lead.total_seconds() > _CLOCK_S:
        ahead = show_duration(lead.total_seconds())
        text = f"this host's clock is {ahead} ahead of the lake's storage"
        yield Finding(CheckStatus.WARNING, "clock", text, "synchronize the clock of this host (NTP)")


def _source(access: Access) -> Iterator[Finding]:
    pipeline = access.pipeline
    with closing(connect(access.dsn, "doctor")) as connection:
        server = read_server(connection)
        major = server.version_num // 10000
        yield _ok("source", f"{address(access.dsn)}: PostgreSQL {major}.{server.version_num % 10000}")
        yield from _pooler(connection)
        problems = [
            *server_problems(
                connection, server, pipeline.slot, makes_slot=read_slot(connection, pipeline.slot) is None
            ),
            *failover_problems(server, pipeline.failover),
            *replication_problems(access.dsn, server),
        ]
        yield from (_problem("settings", error) for error in problems)
        yield from _settings(connection)
        yield from (_problem("role", error) for error in role_problems(connection, pipeline))
        yield from (_problem("slot", error) for error in slot_problems(connection, pipeline, new_epoch=False))
        yield from (
            Finding(CheckStatus.WARNING, "settings", text)
            for text in server_warnings(connection, pipeline.slot)
        )
        yield from (
            Finding(CheckStatus.WARNING, "failover", text)
            for text in failover_warnings(connection, pipeline.slot, pipeline.failover)
        )
        yield from _left_over(connection, pipeline)
        yield from _clock(connection)
        yield from _guarded("tables", lambda: _tables(connection, access))


def _pooler(connection: Connection) -> Iterator[Finding]:
    """Yield a warning if another program answers the login: the pid of the login is not the session's."""
    with source_errors("asking for the session's pid"):
        pids = {row(connection, "SELECT pg_catalog.pg_backend_pid()")[0] for _ in range(2)}
    if pids == {connection.info.backend_pid}:
        yield _ok("pooler", "none found: the server itself answers")
        return
    yield Finding(
        CheckStatus.WARNING,
        "pooler",
        "a pooler or proxy is between this host and the server: the session's pid is not that of the login",
        "use the server's direct address and port (PgBouncer, RDS Proxy, Supavisor, Neon's -pooler host)",
    )


def _settings(connection: Connection) -> Iterator[Finding]:
    with source_errors("asking for settings"):
        found = dict(rows(connection, _SHOWN))
    limits = read_slot_limits(connection)
    found["max_slot_wal_keep_size"] = limits.wal_keep_shown
    if limits.idle_shown:
        found["idle_replication_slot_timeout"] = limits.idle_shown
    yield _ok("settings", ", ".join(f"{name} {value}" for name, value in found.items()))
    if limits.wal_keep_bytes is None:
        yield Finding(
            CheckStatus.WARNING,
            "settings",
            "max_slot_wal_keep_size is -1: the slot of a stopped pipeline retains WAL until the disk is full",
            "set it above the WAL of your longest planned stop, or set wal_budget:"
            f" {document('how-to/be-alerted')}",
        )


def _left_over(connection: Connection, pipeline: Pipeline) -> Iterator[Finding]:
    with source_errors("looking for inactive slots"):
        found = rows(connection, _LEFT_OVER, (pipeline.slot,))
    for name, held in found:
        yield Finding(
            CheckStatus.WARNING,
            "slot",
            f"slot {one_line(name)} is not read by any process, and retains {show_bytes(held or 0)} of WAL",
            "find its pipeline in column slot of _pgrepl.pipelines, in each state database. If it is only"
            " stopped, start it. If it is to go, run pgrepl teardown FILE.json with its file. Only a slot"
            " without a pipeline may be dropped by hand: select"
            f" pg_drop_replication_slot('{one_line(name)}')",
        )


def _clock(connection: Connection) -> Iterator[Finding]:
    before = datetime.now(UTC)
    with source_errors("asking for the time"):
        theirs = row(connection, "SELECT pg_catalog.clock_timestamp()")[0]
    after = datetime.now(UTC)
    ahead = max((before - theirs).total_seconds(), (theirs - after).total_seconds(), 0.0)
    if ahead > _CLOCK_S:
        text = f"the clocks of this host and of the server differ by {show_duration(ahead)}"
        yield Finding(
            CheckStatus.WARNING, "clock", text, "synchronize both clocks (NTP); lags are wrong until then"
        )
    else:
        yield _ok("clock", "this host and the server agree")


def _tables(connection: Connection, access: Access) -> Iterator[Finding]:
    pipeline = access.pipeline
    with StateDatabase(access.state_dsn, f"doctor {pipeline.name}") as state_db:
        requested = requested_at(connection, state_db, pipeline)
    relations = resolve_tables(connection, pipeline, requested)
    faults = table_faults(connection, pipeline, relations)
    yield from (_problem("tables", fault) for fault in faults.values())
    for warning in table_warnings(connection, relations, pipeline):
        yield Finding(CheckStatus.WARNING, "tables", warning)
    if not faults:
        yield _ok("tables", f"{len(relations)} tables can be replicated")
    if pipeline.sequences:
        yield from _sequences(connection, relations)


def _sequences(connection: Connection, relations: Collection[Relation]) -> Iterator[Finding]:
    refused = refused_sequences(connection, [relation.oid for relation in relations])
    for name, why in refused.items():
        yield Finding(CheckStatus.WARNING, "sequences", f"sequence {name}: {why}")
    if not refused:
        yield _ok("sequences", "the values of all sequences can be read")


def _state(access: Access) -> Iterator[Finding]:
    name = access.pipeline.name
    with StateDatabase(access.state_dsn, f"doctor {name}") as state_db:
        if not state_db.is_set_up() or state_db.read_pipeline(name) is None:
            yield _ok("state", f"pipeline {name} is not recorded yet: {SNAPSHOT}")
            return
    yield _ok("state", f"pipeline {name} is recorded")
    report = find_health_problems(read_status(access.pipeline, access), HealthLimits())
    for problem in report.problems:
        level = CheckStatus.PROBLEM if problem.severity is Severity.FAILURE else CheckStatus.WARNING
        yield Finding(level, "pipeline", problem.reason, problem.hint)
