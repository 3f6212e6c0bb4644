"""The JSON documents of the page: pipelines with their problems, tables, and one table with its history.

State databases may not answer: each question has a limit, and none waits for another database.

The problems are those that the state database alone shows; `status/health.py` also asks the source and the
lake. The limits are those of its HealthLimits: importing them would load pyarrow in Airflow's API server.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Any, Generic, Literal, TypeVar

from airflow_provider_pgrepl.errors import SourceConnectionError, StateError
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.state.overview import (
    LAG_STEP,
    OverviewRecords,
    PipelineRow,
    TableRow,
)
from airflow_provider_pgrepl.replication.state.recorded_events import RecordedEvent
from airflow_provider_pgrepl.replication.state.reports import CopyProgress, PublisherReport
from airflow_provider_pgrepl.replication.state.samples import TableSample, table_sample_interval_s
from airflow_provider_pgrepl.replication.state.tables import TableState

LIMIT_S = 2.0
"""The seconds after which a database counts as not answering, when all are asked."""
DETAIL_TIMEOUT_S = 10.0
"""The same when the tables of one pipeline are asked for: there may be thousands, and nothing else waits."""
_MOST_AT_ONCE = 4
"""The most questions to a database at the same time: a page asks one, and equal ones share an answer."""
Answer = TypeVar("Answer")
Document = dict[str, Any]
_STARTED_BY = re.compile(r"started by task (?P<task>\S+) of (?P<dag>\S+), run (?P<run>.+), try (?P<try>\d+)$")
_EVENTS = 200
"""The most events of a table that the page shows."""
_SAMPLED = timedelta(days=1)
LAG_S, WAL_WARNING, WAL_FAILURE, HEARTBEAT_S = 300.0, 0.5, 0.8, 60.0
_PRESENT_S = 180.0
"""The age up to which a sample shows the present: there is one a minute."""


class Databases(Generic[Answer]):
    """Asks databases in threads, and limits the time for an answer. May be used from any thread.

    A question that is asked again before it is answered is sent once. While a question to a database is
    overdue, others to it fail at once: threads that wait for a dead database do not pile up.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[str, dict[Hashable, tuple[float, Future[Answer]]]] = {}

    def ask(
        self, database: str, question: Hashable, answer: Callable[[], Answer], limit_s: float = LIMIT_S
    ) -> Answer:
        """Return what `answer` returns, or raise what it raises.

        Raises SourceConnectionError if the database does not answer within `limit_s` seconds.
        """
        future = self._begin(database, question, answer, limit_s)
        if future is None:
            raise _silent(database, limit_s)
        if not wait((future,), limit_s).done:
            raise _silent(database, limit_s)
        return future.result()

    def _begin(
        self, database: str, question: Hashable, answer: Callable[[], Answer], limit_s: float
    ) -> Future[Answer] | None:
        with self._lock:
            pending = self._pending.setdefault(database, {})
            if any(monotonic() > deadline for deadline, _ in pending.values()):
                return None
            if question in pending:
                return pending[question][1]
            if len(pending) >= _MOST_AT_ONCE:
                return None
            future: Future[Answer] = Future()
            pending[question] = monotonic() + limit_s, future
        arguments = (database, question, answer, future)
        threading.Thread(target=self._run, args=arguments, name="pgrepl-page", daemon=True).start()
        return future

    def _run(
        self, database: str, question: Hashable, answer: Callable[[], Answer], future: Future[Answer]
    ) -> None:
        try:
            found = answer()
        except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
            self._end(database, question)
            future.set_exception(error)
        else:
            self._end(database, question)
            future.set_result(found)

    def _end(self, database: str, question: Hashable) -> None:
        with self._lock:
            self._pending[database].pop(question)


def _silent(database: str, limit_s: float) -> SourceConnectionError:
    return SourceConnectionError(
        f"the state database of connection {database} has not answered within {limit_s:g} s",
        "check host, port and firewall of the connection; the page asks again automatically",
    )


def read_pipelines(dsn: str, limit_s: float = LIMIT_S, *, must_have_state: bool = True) -> Document:
    """Return the document of all pipelines of a state database.

    :param must_have_state: raise StateError if the database has no state, because the configuration names
        it. Otherwise return no pipelines for such a database.
    """
    with OverviewRecords(dsn, limit_s) as records:
        if not records.is_set_up():
            if must_have_state:
                raise StateError(
                    "schema _pgrepl does not exist in this database",
                    "list only connections of state databases in [pgrepl] state_conn_ids",
                )
            return {"pipelines": []}
        return {"pipelines": [pipeline_document(row) for row in records.read_pipelines()]}


def read_tables(dsn: str, pipeline: str, limit_s: float = DETAIL_TIMEOUT_S) -> Document:
    """Return the document of the tables of a pipeline."""
    with OverviewRecords(dsn, limit_s) as records:
        return {"tables": [table_document(row) for row in records.read_table_rows(pipeline)]}


def read_table(dsn: str, pipeline: str, table: TableName, limit_s: float = DETAIL_TIMEOUT_S) -> Document:
    """Return the document of a table: columns, newest events, lag during the last day, and its publishers.

    Events are newest first. `lags`: lags in seconds, oldest first.
    """
    with OverviewRecords(dsn, limit_s) as records:
        relation = records.read_relation(pipeline, table)
        events = records.read_events(pipeline, table, limit=_EVENTS)
        now = datetime.now(UTC)
        samples = records.read_table_samples(pipeline, table, since=now - _SAMPLED)
        tables = records.count_tables(pipeline)
        publishers = records.read_publishers(pipeline)
    return {
        "columns": [] if relation is None else column_documents(relation),
        "events": [event_document(event) for event in reversed(events)],
        "lags": table_lags(samples, now, tables),
        "publishers": [
            publisher_document(report, table) for report in publishers if _may_publish(report, table)
        ],
    }


def publisher_document(report: PublisherReport, table: TableName) -> Document:
    """Return how far a publisher is with a table. `stopped`: why it no longer sends the table's events."""
    name = str(table)
    stopped = next((one for one in report.stopped if name in one.names), None)
    return {
        "name": report.name,
        "target": report.target,
        "published_lsn": str(report.published_lsn),
        "reported_at": _text(report.updated_at),
        "holder": report.holder,
        "stopped": None if stopped is None else asdict(stopped),
    }


def _may_publish(report: PublisherReport, table: TableName) -> bool:
    """Return True if the publisher sends the table. Not by TableSelection, whose module loads deltalake."""
    return report.tables is None or any(_selects(pattern, table) for pattern in report.tables)


def _selects(pattern: str, table: TableName) -> bool:
    if pattern.endswith(".*"):
        return TableName.parse(f"{pattern[:-1]}any").schema == table.schema
    return TableName.parse(pattern) == table


def pipeline_document(row: PipelineRow) -> Document:
    """Return a pipeline as the page shows it. `lags`: the largest lag of each quarter of an hour, oldest
    first, None where nothing was sampled."""
    sample = row.sample
    return {
        "name": row.name,
        "id": row.id,
        "slot": row.slot,
        "lake": row.lake,
        "state": state_of(row),
        "problems": [asdict(problem) for problem in find_problems(row)],
        "tables": dict(row.states),
        "applied_lsn": row.applied_lsn,
        "changes_per_s": row.changes_per_s,
        "holder": row.holder,
        "reported_at": _text(row.reported_at),
        "now": _text(row.now),
        "run": None if row.run is None else _run(row.run.actor, row.run.kind, row.run.time),
        "sample": None if sample is None else {**asdict(sample), "time": _text(sample.time)},
        "last_error": _last_error(row),
        "lags": _line(row.lags, row.now),
    }


def table_document(row: TableRow) -> Document:
    """Return a table of a list. `name` is unquoted, `table` is its name in SQL and in commands."""
    fields = {name: _text(value) for name, value in vars(row).items() if name not in ("table", "copying")}
    copying = None if row.copying is None else _copying(row.copying)
    name = {"table": str(row.table), "schema": row.table.schema, "name": row.table.name}
    return {**name, **fields, "copying": copying}


def _copying(progress: CopyProgress) -> Document:
    """Return the progress of a copy. `done`: the finished share of its bytes, from 0 to 1."""
    return {"text": progress.to_text(), "done": progress.bytes / max(progress.total_bytes, 1)}


def column_documents(relation: Relation) -> list[Document]:
    """Return the columns of a relation, in the order of the source."""
    return [
        {
            "name": column.name,
            "type": column.type_name,
            "is_key": column.is_key,
            "not_null": column.not_null,
        }
        for column in relation.columns
    ]


def event_document(event: RecordedEvent) -> Document:
    """Return an event with the Airflow task that caused it, if its actor names one."""
    return {
        "time": _text(event.time),
        "kind": event.kind,
        "from_state": event.from_state,
        "to_state": event.to_state,
        "actor": event.actor,
        "task": task_of_actor(event.actor),
        "error": event.error,
        "reason": event.reason,
        "hint": event.hint,
        "lsn": None if event.lsn is None else str(event.lsn),
        "details": dict(event.details),
    }


def task_of_actor(actor: str) -> dict[str, str] | None:
    """Return `dag`, `run`, `task` and `try` of the Airflow task in an actor, or None without a task."""
    found = _STARTED_BY.search(actor)
    return None if found is None else found.groupdict()


def _run(actor: str, kind: str, time: datetime) -> Document:
    return {"kind": kind, "time": _text(time), "actor": actor, "task": task_of_actor(actor)}


def _last_error(row: PipelineRow) -> Document | None:
    found: list[Document] = []
    if row.run is not None and row.run.kind == "failed":
        found.append(_error(None, row.run.time, row.run.error, row.run.reason, row.run.hint))
    if (table := row.errored) is not None:
        found.append(_error(table.table, table.since, table.error, table.reason, table.hint))
    return max(found, key=_time, default=None)


def _error(table: TableName | None, time: datetime, error: str, reason: str, hint: str) -> Document:
    name = None if table is None else str(table)
    return {"table": name, "time": _text(time), "error": error, "reason": reason, "hint": hint}


def _time(document: Document) -> str:
    return str(document["time"])


def table_lags(samples: Sequence[TableSample], now: datetime, tables: int) -> list[float | None]:
    """Return the largest lag of each step of the last day, oldest first, None where nothing was sampled.

    :param tables: the number of tables of the pipeline. With many tables, samples are so rare that a step is
        longer than LAG_STEP: otherwise steps between two samples would look like an outage.
    """
    shortest = 1.5 * timedelta(seconds=table_sample_interval_s(tables))
    return _line([(sample.time, sample.lag_seconds) for sample in samples], now, -(-shortest // LAG_STEP))


def _line(lags: Sequence[tuple[datetime, float | None]], now: datetime, steps: int = 1) -> list[float | None]:
    """Return the largest lag of each `steps` LAG_STEPs of the last day, so that a gap in the samples is a gap
    in the line."""
    if not lags:
        return []
    step_s = steps * LAG_STEP.total_seconds()
    known: dict[int, float] = {}
    for at, seconds in lags:
        if seconds is not None:
            step = int(at.timestamp() // step_s)
            known[step] = max(seconds, known.get(step, seconds))
    last = int(now.timestamp() // step_s)
    return [known.get(step) for step in range(last - int(_SAMPLED.total_seconds() / step_s) + 1, last + 1)]


def _text(value: Any) -> Any:
    return value.astimezone(UTC).isoformat() if isinstance(value, datetime) else value


@dataclass(frozen=True)
class PageProblem:
    """A problem of a pipeline. `reason`: a sentence. `hint`: the next step."""

    severity: Literal["failure", "warning"]
    reason: str
    hint: str = ""


def find_problems(row: PipelineRow) -> list[PageProblem]:
    """Return the problems of a pipeline, failures first."""
    found = [*_of_application(row), *_of_tables(row), *_of_sample(row)]
    return sorted(found, key=lambda problem: problem.severity == "warning")


def is_running(row: PipelineRow) -> bool:
    """Return True if the replication app has reported within HEARTBEAT_S seconds, and has not ended since."""
    if row.reported_at is None:
        return False
    has_ended = row.run is not None and row.run.has_ended_since(row.reported_at)
    return not has_ended and _age(row, row.reported_at) < HEARTBEAT_S


def state_of(row: PipelineRow) -> str:
    """Return the state of a pipeline: `running`, `failed`, `stopped`, `silent` or `not_started`."""
    if is_running(row):
        return "running"
    if row.run is not None and row.run.has_ended:
        return row.run.kind
    return "not_started" if row.reported_at is None else "silent"


def _of_application(row: PipelineRow) -> Iterator[PageProblem]:
    match state_of(row):
        case "failed":
            assert row.run is not None
            reason = f"the replication app failed: {row.run.error}: {row.run.reason}"
            yield PageProblem("failure", reason, row.run.hint)
        case "stopped":
            hint = "run the DAG that replicates, unless the pipeline runs on a schedule"
            yield PageProblem("warning", "the replication app was stopped", hint)
        case "silent":
            hint = "see the log of the task that replicates; its process or host may be gone"
            yield PageProblem("failure", "the replication app no longer reports", hint)
        case "not_started":
            hint = "run the DAG that replicates once the snapshot is done"
            yield PageProblem("warning", "the replication app has never reported", hint)


def _of_tables(row: PipelineRow) -> Iterator[PageProblem]:
    if count := row.states.get(TableState.ERRORED, 0):
        tables = "1 table is" if count == 1 else f"{count} tables are"
        yield PageProblem("failure", f"{tables} errored", "each table shows its error and a hint")


def _of_sample(row: PipelineRow) -> Iterator[PageProblem]:
    sample = row.sample
    if sample is None or not is_running(row) or _age(row, sample.time) > _PRESENT_S:
        return
    if sample.lag_seconds is not None and sample.lag_seconds >= LAG_S:
        hint = "see the log of the replication app for slow merges and waiting tables"
        yield PageProblem("failure", f"the lake lags {sample.lag_seconds:,.0f} s behind the source", hint)
    if sample.slot_active is False:
        hint = "see the log of the replication app: it cannot read the slot"
        yield PageProblem("failure", f"slot {row.slot} is not read by any process", hint)
    if sample.wal_limit_bytes and sample.wal_retained_bytes is not None:
        share = sample.wal_retained_bytes / sample.wal_limit_bytes
        if share >= WAL_WARNING:
            reason = f"slot {row.slot} retains {share:.0%} of its WAL limit (max_slot_wal_keep_size)"
            hint = "check in the app's log that it receives changes; do not drop the slot"
            yield PageProblem("failure" if share >= WAL_FAILURE else "warning", reason, hint)


def _age(row: PipelineRow, time: datetime) -> float:
    return (row.now - time).total_seconds()
