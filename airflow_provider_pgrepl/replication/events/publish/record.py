"""PublisherLog: where a publisher is, in the lake beside the changelog.

A Delta table of its own: a property of it is the record, its rows are events that were passed over. Commits
count under one app id: a second publisher's makes every later commit of the first one fail.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import DeltaError, TableNotFoundError

from airflow_provider_pgrepl.errors import ChangelogError, FencedError, LakeError
from airflow_provider_pgrepl.replication.changelog import own_tables
from airflow_provider_pgrepl.replication.changelog.layout import system_folder
from airflow_provider_pgrepl.replication.delta import recovery
from airflow_provider_pgrepl.replication.delta.log import added_action, metadata_action
from airflow_provider_pgrepl.replication.delta.single_writer_log import AppLog, TakenOverError
from airflow_provider_pgrepl.replication.delta.table import create_delta, open_delta, write_file
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.publish.stopped_table import StoppedTable
from airflow_provider_pgrepl.replication.storage import refusal

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


_ERROR = ("error", "reason", "hint")


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
