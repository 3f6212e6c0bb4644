"""The values of the source's sequences in the lake: one row for each sequence, replaced in one commit.

The Delta table `<lake>/_pgrepl/sequences` has one file. A row means: its value was read from the source after
all transactions up to `lsn` of `epoch` were in the lake. So it is not before any value that these
transactions took. A sequence that was never read has a row with the reason and without a value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, Transaction
from deltalake.exceptions import DeltaError, TableNotFoundError

from airflow_provider_pgrepl.errors import FencedError, LakeError
from airflow_provider_pgrepl.replication.changelog.layout import METADATA_KEY, SEQUENCES, own_table_uri
from airflow_provider_pgrepl.replication.delta.log import added_action, removed_action
from airflow_provider_pgrepl.replication.delta.recovery import find_torn_by_crash
from airflow_provider_pgrepl.replication.delta.single_writer_log import AppLog, FencedCommitError
from airflow_provider_pgrepl.replication.delta.table import create_delta, open_delta, write_file
from airflow_provider_pgrepl.replication.lake.delta.ownership import lake_mark, read_apps, reason_of_lake
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import ColumnName, TableName
from airflow_provider_pgrepl.replication.runtime.quantities import show_list
from airflow_provider_pgrepl.replication.source.catalog.sequences import Sequence as SourceSequence
from airflow_provider_pgrepl.replication.source.catalog.sequences import SequenceValue
from airflow_provider_pgrepl.replication.storage import (
    is_storage_error,
    open_storage,
    parse_parquet,
    read_file,
    storage_error,
    storage_errors,
)

SCHEMA = pa.schema(
    [
        ("schema", pa.string()),
        ("sequence", pa.string()),
        ("table", pa.string()),
        ("column", pa.string()),
        ("data_type", pa.string()),
        ("last_value", pa.int64()),
        ("is_called", pa.bool_()),
        ("increment", pa.int64()),
        ("epoch", pa.int64()),
        ("lsn", pa.int64()),
        ("recorded_at", pa.timestamp("us", "UTC")),
        ("unread", pa.string()),
    ]
)
SEQUENCES_APP = "pgrepl-sequences"
"""Delta app ID of the process that records values. Its version counts the commits."""
_CHECKPOINT_EVERY = 100
_TABLE_PROPERTIES = {
    "delta.checkpointInterval": str(_CHECKPOINT_EVERY),
    "delta.enableExpiredLogCleanup": "false",
    # Values change too fast for statistics to help a reader, and the table has one file.
    "delta.dataSkippingStatsColumns": "epoch",
}
_WAY_OUT = "move the folder away: the replication app records the values again, in a new table"


@dataclass(frozen=True)
class RecordedValue:
    """A row: the value of a sequence, valid for all transactions up to `lsn` of `epoch`.

    `recorded_at`: the time of the reading, by the source's clock.
    """

    value: SequenceValue
    epoch: int
    lsn: LSN
    recorded_at: datetime

    @property
    def name(self) -> TableName:
        return self.value.sequence.name

    @property
    def point(self) -> tuple[int, LSN]:
        """Epoch and LSN, in the order of points."""
        return self.epoch, self.lsn


@dataclass(frozen=True)
class Recorded:
    """All rows: the recorded values, ordered by name, and for each sequence without one the reason."""

    values: Sequence[RecordedValue] = ()
    unread: Mapping[TableName, str] = field(default_factory=dict)


def show_unread(unread: Mapping[TableName, str]) -> str:
    """Return the names of sequences that could not be read, in order, each with the reason."""
    return show_list([f"{name} ({why})" for name, why in sorted(unread.items())])


def sequences_uri(lake_root: str) -> str:
    """Return the URI of the Delta table of sequences' values."""
    return own_table_uri(lake_root, SEQUENCES)


def read_recorded(lake_root: str) -> Recorded:
    """Return the recorded values. Empty if there is no table yet.

    Raises LakeError if the table is damaged or of another lake, LakeUnavailableError.
    """
    table = _open(lake_root)
    return Recorded() if table is None else _read(sequences_uri(lake_root), table)


class SequenceTable:
    """The table as one process writes it. Its methods raise LakeError and LakeUnavailableError.

    After an error, or if another process has committed, it is read again before the next commit.
    """

    def __init__(self, lake_root: str) -> None:
        self._root, self._uri = lake_root, sequences_uri(lake_root)
        self._log: AppLog | None = None
        self._files: list[str] = []
        self._recorded: Recorded | None = None
        self._marks: list[Transaction] = []

    def read(self) -> Recorded:
        """Return the recorded values. The table is read only once.

        Sets aside the last commits of a crashed host that are not whole.
        """
        if self._recorded is None:
            find_torn_by_crash(self._uri, SEQUENCES_APP).set_aside()
            table = _open(self._root)
            self._recorded = Recorded() if table is None else _read(self._uri, table)
            self._files = [] if table is None else _paths(table)
            self._log = None if table is None else self._open_log(table)
        return self._recorded

    def write(self, recorded: Recorded, epoch: int, lsn: LSN) -> None:
        """Replace all rows by these, in one commit. Creates the table if it does not exist.

        :param epoch: the epoch of `lsn`
        :param lsn: the consistent point after which the values were read
        :raises FencedError: if another process has committed, or if a value of a later point is recorded
        """
        latest = max((one.point for one in self.read().values), default=(0, LSN(0)))
        if latest > (epoch, lsn):
            raise _later_recorded(latest, (epoch, lsn))
        rows = [*map(_to_row, recorded.values)]
        rows += [_to_unread_row(name, why, epoch, lsn) for name, why in sorted(recorded.unread.items())]
        log = self._log or self._create()
        # Until the commit has succeeded, the next call reads the table again.
        self._log, before, self._recorded = None, self._files, None
        try:
            with storage_errors(self._uri):
                added = write_file(self._uri, pa.Table.from_pylist(rows, SCHEMA))
            log.commit(
                "WRITE",
                [*map(removed_action, before), added_action(added)],
                metadata={METADATA_KEY: json.dumps({"kind": "sequences", "epoch": epoch, "lsn": str(lsn)})},
                apps=self._marks,
            )
        except FencedCommitError:
            raise _fenced() from None
        except (DeltaError, OSError) as error:
            raise storage_error("the sequences' values cannot be written", error) from None
        self._log, self._files, self._recorded, self._marks = log, [added.path], recorded, []

    def _create(self) -> AppLog:
        with suppress(DeltaError), storage_errors(self._uri):
            create_delta(self._uri, SCHEMA, _TABLE_PROPERTIES)
        table = _open(self._root)
        if table is None:
            raise LakeError(f"the table {self._uri} cannot be created", _WAY_OUT)
        return self._open_log(table)

    def _open_log(self, table: DeltaTable) -> AppLog:
        mark = lake_mark(self._root)
        is_marked = mark is None or table.transaction_version(mark) is not None
        self._marks = [] if is_marked or mark is None else [Transaction(mark, 1)]
        return AppLog(self._uri, table, SEQUENCES_APP, _CHECKPOINT_EVERY, knows_files=True)


def _open(lake_root: str) -> DeltaTable | None:
    uri = sequences_uri(lake_root)
    try:
        table = open_delta(uri)
    except TableNotFoundError:
        return None
    except (DeltaError, OSError) as error:
        if is_storage_error(error):
            raise storage_error(f"{uri} cannot be opened", error) from None
        raise _damaged(uri, "its log is not whole") from None
    mark = lake_mark(lake_root)
    if mark is not None and table.transaction_version(mark) is not None:
        return table
    # Only in this case, because this reads the log once more.
    if reason := reason_of_lake(uri, read_apps(uri)):
        raise LakeError(f"the sequences' values in {uri} are not those of this lake: {reason}", _WAY_OUT)
    return table


def _paths(table: DeltaTable) -> list[str]:
    paths: list[str] = pa.table(table.get_add_actions())["path"].to_pylist()
    return paths


def _read(uri: str, table: DeltaTable) -> Recorded:
    filesystem, root = open_storage(uri)
    rows: list[dict[str, Any]] = []
    for path in _paths(table):
        content = None
        with storage_errors(uri, "read"), suppress(FileNotFoundError):
            content = read_file(filesystem, f"{root}/{path}")
        if content is None:
            raise _damaged(uri, f"the file {path} is not there")
        try:
            rows += parse_parquet(content).to_pylist()
        except ValueError:
            raise _damaged(uri, f"the file {path} is damaged") from None
    values = [_from_row(row) for row in rows if row["unread"] is None]
    unread = {TableName(row["schema"], row["sequence"]): row["unread"] for row in rows if row["unread"]}
    return Recorded(sorted(values, key=lambda one: one.name), dict(sorted(unread.items())))


def _to_row(one: RecordedValue) -> dict[str, Any]:
    sequence = one.value.sequence
    column = sequence.column
    return {
        "schema": sequence.name.schema,
        "sequence": sequence.name.name,
        "table": None if column is None else str(column.table),
        "column": None if column is None else column.name,
        "data_type": sequence.data_type,
        "last_value": one.value.last_value,
        "is_called": one.value.is_called,
        "increment": sequence.increment,
        "epoch": one.epoch,
        "lsn": one.lsn,
        "recorded_at": one.recorded_at,
    }


def _to_unread_row(name: TableName, why: str, epoch: int, lsn: LSN) -> dict[str, Any]:
    """Return a row without a value. Columns that are left out become null."""
    return {"schema": name.schema, "sequence": name.name, "epoch": epoch, "lsn": lsn, "unread": why}


def _from_row(row: dict[str, Any]) -> RecordedValue:
    column = None if row["table"] is None else ColumnName(TableName.parse(row["table"]), row["column"])
    name = TableName(row["schema"], row["sequence"])
    sequence = SourceSequence(name, column, row["data_type"], row["increment"])
    value = SequenceValue(sequence, row["last_value"], row["is_called"])
    return RecordedValue(value, row["epoch"], LSN(row["lsn"]), row["recorded_at"].astimezone(UTC))


def _damaged(uri: str, reason: str) -> LakeError:
    return LakeError(f"the sequences' values in {uri} cannot be read: {reason}", _WAY_OUT)


def _later_recorded(recorded: tuple[int, LSN], given: tuple[int, LSN]) -> FencedError:
    return FencedError(
        f"values of sequences are recorded at {recorded[1]} of epoch {recorded[0]}, after the point"
        f" {given[1]} of epoch {given[0]}",
        "if another replication app runs for this lake, stop one. If the lake was restored to an earlier"
        f" state without the folder _pgrepl/{SEQUENCES}, {_WAY_OUT}",
    )


def _fenced() -> FencedError:
    return FencedError(
        "another process records the sequences' values of this lake",
        "only one replication app may run for a lake",
    )
