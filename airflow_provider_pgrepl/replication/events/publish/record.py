"""PublisherLog: where a publisher is, in the lake beside the changelog.

A Delta table of its own: a property of it is the record, its rows are events that were passed over. Commits
count under one app id: a second publisher's makes every later commit of the first one fail.
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
from airflow_provider_pgrepl.replication.delta.single_writer_log import AppLog, TakenOverError
from airflow_provider_pgrepl.replication.delta.table import create_delta, open_delta, write_file
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.publish.progress import PublisherProgress
from airflow_provider_pgrepl.replication.events.relations import TableGroup, TableSelection
from airflow_provider_pgrepl.replication.events.targets.base import Refusal
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.storage import refusal

_AGAIN = "start the publisher again: it begins with this table. Or let on_error be skip_and_record"
_ROUTED = "bind a queue, or let unrouted be drop"
_SMALLER = "leave the large column out (exclude_columns), or have the target take it"
_OTHERWISE = "have what makes the event give it another route, other headers or less content"
PUBLISHER_APP = "pgrepl-publisher"
LAYOUT, _WITH_COLUMNS = 1, 2
"""Layouts of a record; a publisher of an earlier version would publish new columns in spite of the second."""
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
# A table's description holds no more than 4,000 characters.
_RECORD = "pgrepl.publisher"
_DOING = "where the publisher is cannot be written"
_ERROR = ("error", "reason", "hint")
log = logging.getLogger(__name__)
_SAVE_S, _SAVE_IDLE_S = 1.0, 60.0


@dataclass(frozen=True)
class StoppedTable:
    """Its events, and those of whichever table has one of its names, wait after a position; the rest says
    why."""

    table: str
    names: tuple[str, ...]
    after: EventPosition
    error: str
    reason: str
    hint: str

    @property
    def table_names(self) -> frozenset[TableName]:
        """Those of its names that are a table's: one that nobody knows by name is known by its oid."""
        found = set()
        for name in self.names:
            with suppress(ValueError):
                found.add(TableName.parse(name))
        return frozenset(found)

    @property
    def is_lost(self) -> bool:
        """Whether changes that it waits for are gone."""
        return self.error == ChangelogError.__name__


def group_of(stopped: Mapping[int, StoppedTable]) -> TableGroup:
    """Which tables' events wait. `stopped`: by oid."""
    names = frozenset[TableName]().union(*(table.table_names for table in stopped.values()))
    return TableGroup(frozenset(stopped), names)


def stopped_by(names: Sequence[str], after: EventPosition, why: PgReplError | Refusal) -> StoppedTable:
    """A table that stops by an error of its changes, or by a target's refusal."""
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
            "have readers take the table from the lake at a consistent point, let on_error be"
            " skip_and_record, and start the publisher again"
        )
    return f"{error.hint}; then {_AGAIN}" if error.hint else _AGAIN


@dataclass(frozen=True)
class PublisherRecord:
    """All up to `position` is published, but for what `stopped` holds, by oid. `generation`: that of the last
    connection; `stamp`: as a target has it; `place`: where the events went. `columns`: the attnums that the
    publisher began with, by oid, if new_columns is `stop`. `error`: what ended the publisher, if it was an
    error; `holder`: who published last."""

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
        """After which position this publisher has a right to changes."""
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
        """Raises LakeError when it is not ours or of a newer layout."""
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
    """As `1-5 7`: the record is written every second."""
    first = (one for one in sorted(numbers) if one - 1 not in numbers)
    last = (one for one in sorted(numbers) if one + 1 not in numbers)
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(first, last, strict=True))


def _of_ranges(text: str) -> frozenset[int]:
    """Raises ValueError."""
    pairs = (part.partition("-") for part in text.split())
    return frozenset(n for a, _, b in pairs for n in range(int(a), int(b or a) + 1))


def publisher_uri(lake_root: str, name: str) -> str:
    """The Delta table of one publisher."""
    return f"{system_folder(lake_root)}/publishers/{name}"


def read_record(lake_root: str, name: str) -> PublisherRecord | None:
    """Where a publisher is; None when it never began. Raises LakeError, LakeUnavailableError."""
    table = _open(publisher_uri(lake_root, name))
    return None if table is None else _record(table)


def read_columns(lake_root: str, name: str) -> Mapping[int, frozenset[int]] | None:
    """The columns that a publisher began with, by relation; None if it sends new ones, or never began.

    Raises LakeError, LakeUnavailableError.
    """
    record = read_record(lake_root, name)
    return None if record is None else record.columns


def missed(error: ChangelogError, record: PublisherRecord, name: str) -> ChangelogError:
    """Changes after the record's position are gone, or in another epoch: who reads the events has a gap."""
    return ChangelogError(
        f"{error.message}. Published is all up to {record.position}",
        "have consumers read the tables from the lake at a consistent point, which pgrepl status names, and"
        f" begin again there: pgrepl publish FILE.json --publisher {name} --after LSN",
    )


class PublisherLog:
    """For the one process that publishes: from `take` on, whoever did before cannot write any more."""

    def __init__(self, lake_root: str, name: str) -> None:
        self._lake_root, self._uri = lake_root, publisher_uri(lake_root, name)
        self._name = name
        self._table: DeltaTable | None = None
        self._log: AppLog | None = None

    def take(self, begin: PublisherRecord, holder: str, *, is_anew: bool = False) -> PublisherRecord:
        """The record as it stands; `begin` when there is none yet. `is_anew`: it does not matter what was.

        Raises FencedError when another takes it at the same time, LakeUnavailableError, LakeError, also when
        the table that the publisher has had is out of sight.
        """
        recovery.find_torn_by_crash(self._uri, PUBLISHER_APP).set_aside()
        if not is_anew:
            own_tables.check_publisher(self._lake_root, self._name)
        self._table = _open(self._uri)
        if self._table is None:
            self._create()
            self._table = _open(self._uri)
        assert self._table is not None
        try:
            self._log = AppLog(self._uri, self._table, PUBLISHER_APP, _CHECKPOINT_EVERY)
        except OSError as error:
            raise refusal(_DOING, error) from error
        record = replace(_record(self._table) or begin, holder=holder)
        self.save(record)
        own_tables.record_publisher(self._lake_root, self._name)
        return record

    def save(self, record: PublisherRecord) -> None:
        """Write the record down, on the disk. Raises FencedError, LakeUnavailableError."""
        assert self._table is not None
        self._commit("SET TBLPROPERTIES", [metadata_action(self._table, {_RECORD: record.to_json()})])

    def add_skipped(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Write down events that are passed over, on the disk. Raises FencedError, LakeUnavailableError."""
        try:
            file = write_file(self._uri, pa.Table.from_pylist(list(rows), SKIPPED_SCHEMA))
        except OSError as error:
            raise refusal(_DOING, error) from error
        self._commit("WRITE", [added_action(file)])

    def _commit(self, operation: str, actions: Sequence[Mapping[str, Any]]) -> None:
        assert self._log is not None
        try:
            self._log.commit(operation, actions)
        except TakenOverError:
            raise self._fenced() from None
        except (DeltaError, OSError) as error:
            raise refusal(_DOING, error) from error

    def _fenced(self) -> FencedError:
        return FencedError(
            f"publisher {self._name}: another process has taken its place", "let that one go on"
        )

    def _create(self) -> None:
        properties = CommitProperties(app_transactions=[Transaction(PUBLISHER_APP, 1)])
        try:
            create_delta(self._uri, SKIPPED_SCHEMA, _PROPERTIES, properties)
        except (DeltaError, OSError) as error:
            raise refusal(_DOING, error) from error


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
    """By oid; `now`: those that stopped in this run, which are not tried again before the next."""

    def __init__(self, stopped: Mapping[int, StoppedTable]) -> None:
        self.tables = dict(stopped)
        self.now: set[int] = set()

    def is_stopped_before(self, oid: int, after: EventPosition) -> bool:
        """Whether something went wrong with a table in this run earlier, or for good: that counts."""
        known = self.tables.get(oid)
        return known is not None and (known.is_lost or (oid in self.now and known.after <= after))

    def stop(
        self, oid: int, names: Collection[str], after: EventPosition, why: PgReplError | Refusal
    ) -> StoppedTable:
        """A table stops in this run."""
        known = self.tables.get(oid)
        stopped = stopped_by(sorted({*names, *(known.names if known else ())}), after, why)
        self.now.add(oid)
        self.tables[oid] = stopped
        return stopped

    def lose(self, oid: int, error: PgReplError) -> None:
        """Changes for which a table waits are gone."""
        table = self.tables[oid]
        self.tables[oid] = stopped_by(table.names, table.after, error)

    def leave_out(self, selection: TableSelection) -> list[StoppedTable]:
        """Those that are not wanted any more wait no more; they."""
        unwanted = [oid for oid, one in self.tables.items() if not _is_wanted(oid, one, selection)]
        return [self.tables.pop(oid) for oid in unwanted]

    def learn_names(self, oid: int, names: Iterable[str]) -> None:
        """Of one that was renamed since it stopped: whoever had its new name comes again, after it."""
        table = self.tables[oid]
        self.tables[oid] = replace(table, names=tuple(sorted({*table.names, *names})))

    def has_caught_up_to(self, position: EventPosition, oids: Iterable[int]) -> None:
        """Those that have not stopped again wait from there on."""
        for oid in set(oids) - self.now:
            self.tables[oid] = replace(self.tables[oid], after=max(self.tables[oid].after, position))

    def go_on_with(self, oids: Iterable[int]) -> list[StoppedTable]:
        """Those that have not stopped again wait no more; they."""
        return [self.tables.pop(oid) for oid in sorted(set(oids) - self.now)]

    def group(self, oids: Iterable[int]) -> TableGroup:
        """Who waits with these."""
        return group_of({oid: self.tables[oid] for oid in oids})


def _is_wanted(oid: int, table: StoppedTable, selection: TableSelection) -> bool:
    if oid == NO_RELATION:
        return selection.has_messages
    names = table.table_names
    return not names or selection.has(oid, names)


class KeptRecord:
    """Of one run. Saving raises FencedError once another publisher has begun, LakeUnavailableError."""

    def __init__(
        self, publisher_log: PublisherLog, record: PublisherRecord, stamp: Callable[[], int]
    ) -> None:
        """`record`: as the log has it; `stamp`: gives that of the target."""
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
        """All up to there is published, but for what stopped."""
        self.record = replace(self.record, position=max(self.position, position))
        self.progress.published_lsn = self.position.commit_lsn

    def add_published(self, count: int) -> None:
        self.progress.published += count
        self.record = replace(self.record, published=self.record.published + count)
        self.need_saving()

    def add_skipped(self, events: Collection[tuple[str, str, str]]) -> None:
        """Events that are passed over, by id, table and reason: written down at once."""
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
        """Whoever has taken this publisher's place makes this fail, before anything is sent.

        By the clock, so that it grows though the record, or the lake, was lost and begun again.
        """
        generation = max(self.record.generation + 1, int(time.time()))
        self.record = replace(self.record, generation=generation)
        self.save()
        return generation

    def note_failure(self, error: PgReplError) -> None:
        """What ended the run."""
        kind = type(error).__name__
        self.record = replace(self.record, error=kind, reason=error.message, hint=error.hint)
        # What ended it is what counts, though it could not be written down.
        with suppress(PgReplError):
            self.save()

    def need_saving(self) -> None:
        """Soon, not with the next sign of life."""
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
