"""The record of a publisher in a Delta table next to the changelog: its position and its skipped events. Also
the counters of a run, for log lines and metrics.

The record is a property of the table, its rows are the
skipped events. All commits are counted under one app id: after a second publisher has committed, every commit
of the first one fails.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import DeltaError, TableNotFoundError

from airflow_provider_pgrepl.errors import (
    ChangelogError,
    FencedError,
    GapError,
    LakeError,
    PgReplError,
    ValueRangeError,
)
from airflow_provider_pgrepl.replication.changelog import own_tables
from airflow_provider_pgrepl.replication.changelog.gaps import NO_RELATION
from airflow_provider_pgrepl.replication.changelog.layout import system_folder
from airflow_provider_pgrepl.replication.delta import recovery
from airflow_provider_pgrepl.replication.delta.log import added_action, metadata_action
from airflow_provider_pgrepl.replication.delta.single_writer_log import AppLog, FencedCommitError
from airflow_provider_pgrepl.replication.delta.table import create_delta, open_delta, write_file
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.relations import TableGroup, TableSelection
from airflow_provider_pgrepl.replication.events.targets.base import Refusal
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.storage import storage_error

_AGAIN = (
    "start the publisher again: it begins with this table. To send on without the event, set on_error to"
    " skip_and_record until it is passed: consumers do not get skipped events, of any table"
)
_ROUTED = "bind a queue, or let unrouted be drop"
_SMALLER = "leave the large column out (exclude_columns), or have the target take it"
_OTHERWISE = "have what makes the event give it another route, other headers or less content"
PUBLISHER_APP = "pgrepl-publisher"
LAYOUT, _WITH_COLUMNS = 1, 2
"""Layouts of a record. An older version must not read the second: it would publish new columns all the
same."""
SKIPPED_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("table", pa.string()),
        ("reason", pa.string()),
        ("skipped_at", pa.timestamp("us", "UTC")),
    ]
)
_CHECKPOINT_EVERY = 100
_PROPERTIES = {
    "delta.checkpointInterval": str(_CHECKPOINT_EVERY),
    "delta.enableExpiredLogCleanup": "false",
}
# The description of a table is limited to 4,000 characters.
_RECORD = "pgrepl.publisher"
_DOING = "where the publisher is cannot be written"
_ERROR = ("error", "reason", "hint")
log = logging.getLogger(__name__)
_SAVE_S, _SAVE_IDLE_S = 1.0, 60.0


@dataclass
class PublisherProgress:
    """The progress of a publisher.

    `published`, `resent`, `skipped`, `dropped`: numbers of events. `reconnects`: how often the connection to
    the target was lost. `published_lsn`: everything that committed at or before it is published, except for
    `stopped` tables.
    """

    published: int = 0
    resent: int = 0
    skipped: int = 0
    dropped: int = 0
    reconnects: int = 0
    published_lsn: LSN = LSN(0)  # noqa: RUF009 - immutable
    durable_lsn: LSN = LSN(0)  # noqa: RUF009 - immutable
    is_connected: bool = False
    stopped: int = 0


@dataclass(frozen=True)
class StoppedTable:
    """A table whose events wait.

    `after`: the position after which its events, and those of any table with one of its `names`, wait.
    `error`, `reason` and `hint`: the cause.
    """

    table: str
    names: tuple[str, ...]
    after: EventPosition
    error: str
    reason: str
    hint: str

    @property
    def table_names(self) -> frozenset[TableName]:
        """Return the valid table names among `names`.

        Other entries describe a table that is known by its oid only.
        """
        found = set()
        for name in self.names:
            with suppress(ValueError):
                found.add(TableName.parse(name))
        return frozenset(found)

    @property
    def is_lost(self) -> bool:
        """Return True if changes that the table waits for are gone from the changelog."""
        return self.error == ChangelogError.__name__


def group_of(stopped: Mapping[int, StoppedTable]) -> TableGroup:
    """Return the tables whose events wait. `stopped`: by oid."""
    names = frozenset[TableName]().union(*(table.table_names for table in stopped.values()))
    return TableGroup(frozenset(stopped), names)


def stopped_by(names: Sequence[str], after: EventPosition, why: PgReplError | Refusal) -> StoppedTable:
    """Return a table that an error of its changes, or a refusal of the target, has stopped."""
    table = " or ".join(names)
    if isinstance(why, Refusal):
        said_otherwise = _SMALLER if why.event.business is None else _OTHERWISE
        mend = _ROUTED if why.is_unrouted else said_otherwise
        reason, hint = f"{why.event.id}: {why.reason}", f"{mend}, then {_AGAIN}"
        return StoppedTable(table, tuple(names), after, "TargetError", reason, hint)
    return StoppedTable(table, tuple(names), after, type(why).__name__, why.message, _hint(why))


def _hint(error: PgReplError) -> str:
    if isinstance(error, ValueRangeError):
        return f"list the column in text_columns, then {_AGAIN}"
    if isinstance(error, GapError | ChangelogError):
        return (
            "its missing events cannot be sent. Have consumers reload the table from the lake at a consistent"
            " point, set on_error to skip_and_record, start the publisher, and set on_error back once the"
            " table is published again"
        )
    return f"{error.hint}; then {_AGAIN}" if error.hint else _AGAIN


@dataclass(frozen=True)
class PublisherRecord:
    """The state of a publisher.

    Everything up to `position` is published, except for the tables in `stopped`, by oid. `generation`: of the
    last connection. `stamp`: the target's highest stamp. `place`: the destination of the events. `holder`:
    the last process that published.

    `columns`: the attnums of each table, by oid, when the publisher began; set if new_columns is `stop`.
    `error`, `reason`, `hint`: the error that ended the publisher, if any.
    """

    position: EventPosition
    generation: int = 0
    stamp: int = 0
    published: int = 0
    skipped: int = 0
    holder: str = ""
    place: str = ""
    saved_at: datetime | None = None
    stopped: Mapping[int, StoppedTable] = field(default_factory=dict)
    columns: Mapping[int, frozenset[int]] | None = None
    error: str = ""
    reason: str = ""
    hint: str = ""

    @property
    def needed_after(self) -> EventPosition:
        """Return the position after which the changelog must keep changes for this publisher."""
        waiting = [table.after for table in self.stopped.values() if not table.is_lost]
        return min([self.position, *waiting])

    def to_json(self) -> str:
        stopped = {str(oid): {**asdict(one), "after": str(one.after)} for oid, one in self.stopped.items()}
        saved_at = self.saved_at.isoformat() if self.saved_at else None
        columns = {str(oid): _to_ranges(attnums) for oid, attnums in (self.columns or {}).items()}
        return json.dumps(
            {
                **{
                    name: getattr(self, name)
                    for name in ("generation", "stamp", "published", "skipped", "holder", "place", *_ERROR)
                },
                "layout": LAYOUT if self.columns is None else _WITH_COLUMNS,
                "position": str(self.position),
                "saved_at": saved_at,
                "stopped": stopped,
                **({} if self.columns is None else {"columns": columns}),
            }
        )

    @classmethod
    def from_json(cls, text: str | None) -> PublisherRecord:
        """Parse a record. Raises LakeError if it is not a publisher's record or has a newer layout."""
        try:
            fields = json.loads(text or "")
            if fields.pop("layout") > _WITH_COLUMNS:
                raise LakeError(
                    "a publisher's record is of a newer layout", "upgrade airflow-provider-pgrepl"
                )
            saved_at = fields.pop("saved_at")
            stopped = {
                int(oid): StoppedTable(
                    **{**one, "after": EventPosition.parse(one["after"]), "names": tuple(one["names"])}
                )
                for oid, one in fields.pop("stopped").items()
            }
            columns = fields.pop("columns", None)
            return cls(
                **{**fields, "position": EventPosition.parse(fields["position"])},
                saved_at=datetime.fromisoformat(saved_at) if saved_at else None,
                stopped=stopped,
                columns=None
                if columns is None
                else {int(oid): _of_ranges(ranges) for oid, ranges in columns.items()},
            )
        except (ValueError, KeyError, TypeError):
            raise LakeError(
                "a table in _pgrepl/publishers was not written by this product",
                "move it away, and begin the publisher again with --after",
            ) from None


def _to_ranges(numbers: frozenset[int]) -> str:
    """Return the numbers as ranges, such as `1-5 7`: the record is written every second and must be small."""
    first = (one for one in sorted(numbers) if one - 1 not in numbers)
    last = (one for one in sorted(numbers) if one + 1 not in numbers)
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(first, last, strict=True))


def _of_ranges(text: str) -> frozenset[int]:
    """Parse the text of `_to_ranges`. Raises ValueError."""
    pairs = (part.partition("-") for part in text.split())
    return frozenset(n for a, _, b in pairs for n in range(int(a), int(b or a) + 1))


def publisher_uri(lake_root: str, name: str) -> str:
    """Return the URI of a publisher's Delta table."""
    return f"{system_folder(lake_root)}/publishers/{name}"


def read_record(lake_root: str, name: str) -> PublisherRecord | None:
    """Return the record of a publisher, or None if it never began. Raises LakeError, LakeUnavailableError."""
    table = _open(publisher_uri(lake_root, name))
    return None if table is None else _record(table)


def read_columns(lake_root: str, name: str) -> Mapping[int, frozenset[int]] | None:
    """Return the attnums that a publisher began with, by table oid.

    Returns None if it sends new columns, or never began. Raises LakeError, LakeUnavailableError.
    """
    record = read_record(lake_root, name)
    return None if record is None else record.columns


def missed(error: ChangelogError, record: PublisherRecord, name: str) -> ChangelogError:
    """Return the error for changes after the record's position that are gone, or in another epoch.

    Consumers of the events have a gap then.
    """
    return ChangelogError(
        f"{error.message}. Published is all up to {record.position}",
        "the changes in between cannot be sent. Have consumers reload the tables from the lake at a"
        " consistent point (pgrepl status FILE.json shows its LSN), then publish after that LSN: pgrepl"
        f" publish FILE.json --publisher {name} --after LSN",
    )


class PublisherLog:
    """The Delta table of the one process that publishes. After `take`, commits of an earlier process fail."""

    def __init__(self, lake_root: str, name: str) -> None:
        self._lake_root, self._uri = lake_root, publisher_uri(lake_root, name)
        self._name = name
        self._table: DeltaTable | None = None
        self._log: AppLog | None = None

    def take(self, begin: PublisherRecord, holder: str, *, is_new: bool = False) -> PublisherRecord:
        """Take over the table, and return its record, or `begin` if it has none.

        `is_new`: do not check whether the table is the one that the publisher had. Raises FencedError if
        another process takes it at the same time, LakeUnavailableError, and LakeError, also if the
        publisher's earlier table is missing or was replaced.
        """
        recovery.find_torn_by_crash(self._uri, PUBLISHER_APP).set_aside()
        if not is_new:
            own_tables.check_publisher(self._lake_root, self._name)
        self._table = _open(self._uri)
        if self._table is None:
            self._create()
            self._table = _open(self._uri)
        assert self._table is not None
        try:
            self._log = AppLog(self._uri, self._table, PUBLISHER_APP, _CHECKPOINT_EVERY)
        except OSError as error:
            raise storage_error(_DOING, error) from error
        record = replace(_record(self._table) or begin, holder=holder)
        self.save(record)
        own_tables.record_publisher(self._lake_root, self._name)
        return record

    def save(self, record: PublisherRecord) -> None:
        """Commit the record durably. Raises FencedError, LakeUnavailableError."""
        assert self._table is not None
        self._commit("SET TBLPROPERTIES", [metadata_action(self._table, {_RECORD: record.to_json()})])

    def add_skipped(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Commit skipped events durably. Raises FencedError, LakeUnavailableError."""
        try:
            file = write_file(self._uri, pa.Table.from_pylist(list(rows), SKIPPED_SCHEMA))
        except OSError as error:
            raise storage_error(_DOING, error) from error
        self._commit("WRITE", [added_action(file)])

    def _commit(self, operation: str, actions: Sequence[Mapping[str, Any]]) -> None:
        assert self._log is not None
        try:
            self._log.commit(operation, actions)
        except FencedCommitError:
            raise self._fenced() from None
        except (DeltaError, OSError) as error:
            raise storage_error(_DOING, error) from error

    def _fenced(self) -> FencedError:
        return FencedError(
            f"publisher {self._name}: another process publishes for it now",
            "keep one of the two: if both are restarted, as by two DAGs, they replace each other",
        )

    def _create(self) -> None:
        properties = CommitProperties(app_transactions=[Transaction(PUBLISHER_APP, 1)])
        try:
            create_delta(self._uri, SKIPPED_SCHEMA, _PROPERTIES, properties)
        except (DeltaError, OSError) as error:
            raise storage_error(_DOING, error) from error


def _record(table: DeltaTable) -> PublisherRecord | None:
    text = table.metadata().configuration.get(_RECORD)
    return None if text is None else PublisherRecord.from_json(text)


def _open(uri: str) -> DeltaTable | None:
    try:
        return open_delta(uri)
    except TableNotFoundError:
        return None
    except (DeltaError, OSError) as error:
        name = own_tables.publisher_table(uri.rsplit("/", 1)[1])
        raise own_tables.unreadable(uri, name, error) from None


class StoppedTables:
    """The stopped tables, by oid. `now`: the oids that stopped in this run, which the next run retries."""

    def __init__(self, stopped: Mapping[int, StoppedTable]) -> None:
        self.tables = dict(stopped)
        self.now: set[int] = set()

    def is_stopped_before(self, oid: int, after: EventPosition) -> bool:
        """Return True if the table is lost, or stopped earlier in this run at or before `after`."""
        known = self.tables.get(oid)
        return known is not None and (known.is_lost or (oid in self.now and known.after <= after))

    def stop(
        self, oid: int, names: Collection[str], after: EventPosition, why: PgReplError | Refusal
    ) -> StoppedTable:
        """Stop a table in this run, and return it."""
        known = self.tables.get(oid)
        stopped = stopped_by(sorted({*names, *(known.names if known else ())}), after, why)
        self.now.add(oid)
        self.tables[oid] = stopped
        return stopped

    def lose(self, oid: int, error: PgReplError) -> None:
        """Mark a table as lost: changes that it waits for are gone from the changelog."""
        table = self.tables[oid]
        self.tables[oid] = stopped_by(table.names, table.after, error)

    def leave_out(self, selection: TableSelection) -> list[StoppedTable]:
        """Remove and return the tables that the selection no longer includes."""
        unwanted = [oid for oid, one in self.tables.items() if not _is_wanted(oid, one, selection)]
        return [self.tables.pop(oid) for oid in unwanted]

    def learn_names(self, oid: int, names: Iterable[str]) -> None:
        """Add names to a table that was renamed after it stopped.

        Events of another table that had the new name then wait too.
        """
        table = self.tables[oid]
        self.tables[oid] = replace(table, names=tuple(sorted({*table.names, *names})))

    def has_caught_up_to(self, position: EventPosition, oids: Iterable[int]) -> None:
        """Advance the positions of these tables, except for those that stopped again."""
        for oid in set(oids) - self.now:
            self.tables[oid] = replace(self.tables[oid], after=max(self.tables[oid].after, position))

    def go_on_with(self, oids: Iterable[int]) -> list[StoppedTable]:
        """Remove and return these tables, except for those that stopped again."""
        return [self.tables.pop(oid) for oid in sorted(set(oids) - self.now)]

    def group(self, oids: Iterable[int]) -> TableGroup:
        """Return the group of these tables and of all their names."""
        return group_of({oid: self.tables[oid] for oid in oids})


def _is_wanted(oid: int, table: StoppedTable, selection: TableSelection) -> bool:
    if oid == NO_RELATION:
        return selection.has_messages
    names = table.table_names
    return not names or selection.has(oid, names)


class PublisherState:
    """The record of one run.

    Saving raises FencedError after another publisher has begun, LakeUnavailableError.
    """

    def __init__(
        self, publisher_log: PublisherLog, record: PublisherRecord, stamp: Callable[[], int]
    ) -> None:
        """`record`: the record in the log. `stamp`: returns the target's stamp."""
        self._log, self._stamp = publisher_log, stamp
        self.record = replace(record, error="", reason="", hint="")
        self.stopped = StoppedTables(record.stopped)
        self.progress = PublisherProgress(
            published_lsn=record.position.commit_lsn, stopped=len(record.stopped)
        )
        self._is_saved, self._saved_at = True, time.monotonic()

    @property
    def position(self) -> EventPosition:
        return self.record.position

    def advance(self, position: EventPosition) -> None:
        """Record that everything up to `position` is published, except for stopped tables."""
        self.record = replace(self.record, position=max(self.position, position))
        self.progress.published_lsn = self.position.commit_lsn

    def add_published(self, count: int) -> None:
        self.progress.published += count
        self.record = replace(self.record, published=self.record.published + count)
        self.need_saving()

    def add_skipped(self, events: Collection[tuple[str, str, str]]) -> None:
        """Commit skipped events at once, given as (id, table, reason)."""
        now = datetime.now(UTC)
        for event, table, reason in events:
            log.warning("skipped %s of %s: %s", event, table, reason)
        rows = [
            {"id": event, "table": table, "reason": reason, "skipped_at": now}
            for event, table, reason in events
        ]
        self._log.add_skipped(rows)
        self.record = replace(self.record, skipped=self.record.skipped + len(events))
        self.progress.skipped += len(events)
        self.need_saving()

    def begin_generation(self) -> int:
        """Return a new generation, after saving it.

        Raises FencedError if another process has taken over the publisher. The generation is at least the
        current Unix time in seconds, so that it grows even if the record or the lake was lost.
        """
        generation = max(self.record.generation + 1, int(time.time()))
        self.record = replace(self.record, generation=generation)
        self.save()
        return generation

    def note_failure(self, error: PgReplError) -> None:
        """Record the error that ended the run."""
        kind = type(error).__name__
        self.record = replace(self.record, error=kind, reason=error.message, hint=error.hint)
        # An error while saving must not hide the error that ended the run.
        with suppress(PgReplError):
            self.save()

    def need_saving(self) -> None:
        """Save within one second instead of with the next idle save."""
        self._is_saved = False

    def save_when_due(self) -> None:
        waited_s = time.monotonic() - self._saved_at
        if waited_s >= (_SAVE_IDLE_S if self._is_saved else _SAVE_S):
            self.save()

    def save(self) -> None:
        self.record = replace(
            self.record,
            saved_at=datetime.now(UTC),
            stamp=self._stamp(),
            stopped=dict(self.stopped.tables),
        )
        self.progress.stopped = len(self.stopped.tables)
        self._log.save(self.record)
        self._is_saved, self._saved_at = True, time.monotonic()
