"""Values of the source's sequences: a thread records them in the lake, a status shows them, and a command
prints them with the SQL that sets them at another server.

The thread reads the values after a consistent point was written, so that they are not before any value that
the transactions up to the point took. Points do not wait for it, and an error stops only the recording.
Status and command read only the lake: the source may be lost.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from airflow_provider_pgrepl.errors import (
    SNAPSHOT,
    ConfigError,
    LakeError,
    PgReplError,
    SourceConnectionError,
)
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoint, ConsistentPoints
from airflow_provider_pgrepl.replication.lake.sequences import (
    Recorded,
    RecordedValue,
    SequenceTable,
    read_recorded,
    show_unread,
)
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.runtime.quantities import (
    show_count,
    show_duration,
    show_list,
    show_table,
)
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog.sequences import (
    SequenceReading,
    SequenceValue,
    read_sequences,
)
from airflow_provider_pgrepl.replication.source.connection import Connection, connect, current_database, row
from airflow_provider_pgrepl.replication.source.server import written_lsn
from airflow_provider_pgrepl.replication.source.server_errors import source_errors
from airflow_provider_pgrepl.replication.source.slot import read_slot
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableState
from airflow_provider_pgrepl.trace import trace_of

from .epoch import find_epoch, refuse_without_lake

_LATE_S = 300.0
"""The age in seconds from which values from before the last consistent point are a problem."""
log = logging.getLogger(__name__)
INTERVAL_S = 1.0
"""The least seconds between two readings."""
RENEWAL_S = 60.0
"""Seconds after which the values are read without a new point, or unchanged values get the LSN of a newer
one."""
_REST = 20
"""A reading is followed by a pause of this many times its duration, up to RENEWAL_S."""
_PAUSE_S = 10.0
"""Seconds until the next try after an error."""
_LAST_S = 5.0


@dataclass(frozen=True)
class RecordedSequences:
    """The recorded values, in the order of their names. There is at least one.

    :param epoch: the present epoch
    :param point: the LSN of its newest consistent point, None without one
    :param unread: for each sequence without a recorded value the reason
    """

    values: Sequence[RecordedValue]
    epoch: int
    point: LSN | None
    unread: Mapping[TableName, str] = field(default_factory=dict)

    @property
    def oldest(self) -> RecordedValue:
        """The value that is valid for the fewest transactions."""
        return min(self.values, key=lambda one: (*one.point, one.recorded_at))

    @property
    def problem(self) -> str:
        """Sentences about values that may be too early for transactions in the lake, or empty."""
        return ". ".join(sentence for sentence in (self._former(), self._late()) if sentence)

    @property
    def problems(self) -> list[str]:
        """The sentences of `problem`, and one about sequences without a recorded value."""
        unread = f"no value is recorded of {show_unread(self.unread)}" if self.unread else ""
        return [sentence for sentence in (self._former(), self._late(), unread) if sentence]

    def _former(self) -> str:
        names = [str(one.name) for one in self.values if one.epoch < self.epoch]
        if not names:
            return ""
        return (
            f"{show_list(names)}: recorded in an earlier epoch. The present source is before this value, or"
            " its value could not be read there. Compare the values, and set the sequence at the present"
            " source if it is before the recorded value. The output of pgrepl sequences FILE.json --sql sets"
            " no sequence back"
        )

    def _late(self) -> str:
        point = self.point
        present = [one for one in self.values if one.epoch == self.epoch]
        late = [one for one in present if point is not None and one.lsn < point]
        if not late:
            return ""
        return (
            f"{show_list([str(one.name) for one in late])}: recorded at {min(one.lsn for one in late)},"
            f" before the last consistent point {point}: transactions in between may have taken later values."
            " A running replication app records unchanged values once a minute, and when it ends"
        )

    def describe(self, now: datetime) -> str:
        """Return in a sentence for which transactions the values are valid, and how old they are."""
        oldest = self.oldest
        age = show_duration(max(0.0, (now - oldest.recorded_at).total_seconds()))
        point = "" if self.point is None else f"; the last consistent point is {self.point}"
        return (
            f"{show_count(len(self.values), 'sequence')}, valid for all transactions up to {oldest.lsn} of"
            f" epoch {oldest.epoch}, read {age} ago{point}"
        )


def read_recorded_sequences(pipeline: Pipeline) -> RecordedSequences:
    """Return the recorded values of a pipeline's sequences.

    Raises ConfigError if the pipeline does not record them. Raises LakeError if the lake is missing or is
    another pipeline's, or if no value is recorded; LakeUnavailableError.
    """
    refuse_without_lake(pipeline, "sequences", "there is no consistent point to record values at")
    if not pipeline.sequences:
        raise ConfigError(
            f"pipeline {pipeline.name} does not record values of sequences",
            'set "sequences": true in the pipeline file, and restart the replication app',
        )
    epoch = find_epoch(pipeline)
    if epoch is None:
        raise LakeError(
            f"there is no changelog in the lake {pipeline.lake_root}",
            f"check that it is mounted on this host; before the first snapshot, {SNAPSHOT}",
        )
    recorded = read_recorded(pipeline.lake_root)
    if not recorded.values:
        why = f": {show_unread(recorded.unread)}" if recorded.unread else ""
        raise LakeError(
            f"no values of sequences are recorded in the lake {pipeline.lake_root}{why}",
            "run pgrepl replicate FILE.json, or PgReplicationOperator: it records them after its first"
            " consistent point, and logs what it cannot read. A source without sequences has none",
        )
    point = ConsistentPoints(pipeline.lake_root).latest()
    is_present = point is not None and point.epoch == epoch.epoch
    lsn = LSN(point.lsn) if is_present and point else None
    return RecordedSequences(recorded.values, epoch.epoch, lsn, recorded.unread)


def to_text(found: RecordedSequences, now: datetime) -> str:
    """Return the values as an aligned table, with a line that describes them, and one for each problem."""
    rows = [("sequence", "used by", "type", "increment", "last value", "is called", "epoch", "LSN")]
    for one in found.values:
        value, sequence = one.value, one.value.sequence
        rows.append(
            (
                str(sequence.name),
                "-" if sequence.column is None else str(sequence.column),
                sequence.data_type,
                str(sequence.increment),
                str(value.last_value),
                str(value.is_called).lower(),
                str(one.epoch),
                str(one.lsn),
            )
        )
    return "\n".join([*show_table(rows, right={3, 4}), "", found.describe(now), *found.problems])


def to_json(found: RecordedSequences) -> str:
    """Return the values as one JSON object. LSNs are X/X, times are in ISO 8601."""
    content: dict[str, Any] = {
        "epoch": found.epoch,
        "consistent_point": None if found.point is None else str(found.point),
        "lsn": str(found.oldest.lsn),
        "recorded_at": found.oldest.recorded_at.isoformat(),
        "problem": found.problem,
        "sequences": [
            {
                "schema": one.name.schema,
                "sequence": one.name.name,
                "column": None if one.value.sequence.column is None else str(one.value.sequence.column),
                "data_type": one.value.sequence.data_type,
                "increment": one.value.sequence.increment,
                "last_value": one.value.last_value,
                "is_called": one.value.is_called,
                "epoch": one.epoch,
                "lsn": str(one.lsn),
                "recorded_at": one.recorded_at.isoformat(),
            }
            for one in found.values
        ],
        "unread": [
            {"schema": name.schema, "sequence": name.name, "reason": why}
            for name, why in found.unread.items()
        ],
    }
    return json.dumps(content, indent=2)


def to_sql(found: RecordedSequences) -> str:
    """Return SQL for psql that sets the sequences, none of them back. It consists of ASCII characters.

    Statements of all epochs are printed: a server that is restored from the lake needs all of them.
    """
    said = [
        found.describe(datetime.now(UTC)),
        "A sequence that is ahead of the recorded value stays.",
        *found.problems,
    ]
    comments = (f"-- {line}".encode("ascii", "backslashreplace").decode() for line in said)
    return "\n".join([*comments, *map(_statement, found.values)])


def _statement(one: RecordedValue) -> str:
    """Return a line of SQL that sets a sequence if its value is before the recorded one."""
    value, name = one.value, ".".join(map(_identifier, (one.name.schema, one.name.name)))
    # PostgreSQL reads a number below -(2^63 - 1) as numeric, because the sign is an operator.
    last = str(value.last_value) if value.last_value > -(2**63) else f"'{value.last_value}'"
    is_called = str(value.is_called).lower()
    before, after = ("last_value", last) if value.sequence.increment > 0 else (last, "last_value")
    # A value that was not called is before the same value that was called, in both directions.
    condition = f"({before}, is_called) < ({after}, {is_called})"
    literal = _literal(one.name)
    # This locks the sequence, and fails if the name is a view's: a SELECT on it would run its owner's code.
    locking = f"select pg_catalog.pg_sequence_last_value({literal})"
    setting = f"select pg_catalog.setval({literal}, {last}, {is_called}) from {name}"  # noqa: S608 - quoted names
    return f"begin; {locking}; {setting} where {condition}; commit;"


def _identifier(name: str) -> str:
    """Return a quoted identifier that means the same in every client encoding."""
    quoted = name.replace('"', '""')
    if _is_ascii(name):
        return f'"{quoted}"'
    # https://www.postgresql.org/docs/current/sql-syntax-lexical.html#SQL-SYNTAX-IDENTIFIERS
    letters = (
        one if _is_ascii(one) else _escape(one, "\\{:04X}", "\\+{:06X}")
        for one in quoted.replace("\\", "\\\\")
    )
    return f'U&"{"".join(letters)}"'


def _literal(name: TableName) -> str:
    """Return a name as a string constant that has the same value in every session and client encoding."""
    text = name.sql.replace("\\", "\\\\").replace("'", "''")
    # https://www.postgresql.org/docs/current/sql-syntax-lexical.html#SQL-SYNTAX-STRINGS-ESCAPE
    escaped = "".join(one if _is_ascii(one) else _escape(one, "\\u{:04X}", "\\U{:08X}") for one in text)
    return f"E'{escaped}'" if "\\" in escaped else f"'{escaped}'"


def _is_ascii(text: str) -> bool:
    return all(" " <= one <= "~" for one in text)


def _escape(letter: str, small: str, large: str) -> str:
    """Return the escape of a letter. `small` and `large`: the formats of one with up to 16 bits, and more."""
    code = ord(letter)
    return (small if code < 1 << 16 else large).format(code)


@dataclass(frozen=True)
class SequencesStatus:
    """The recorded values: their number, and the point up to which all of them are valid.

    `recorded_at`: the time of the oldest reading, by the source's clock.
    """

    count: int
    epoch: int
    lsn: LSN
    recorded_at: datetime


def read_sequences_status(
    pipeline: Pipeline, epoch: EpochRecord | None, point: ConsistentPoint | None, now: datetime
) -> tuple[SequencesStatus | None, tuple[str, ...]]:
    """Return the status, None without recorded values, and the problems as sentences.

    :param epoch: the present epoch
    :param point: its newest consistent point
    """
    if not pipeline.sequences or epoch is None:
        return None, ()
    try:
        values = read_recorded(pipeline.lake_root).values
    except LakeError as error:
        return None, (error.message,)
    if not values:
        return None, ()
    found = RecordedSequences(values, epoch.epoch, None if point is None else LSN(point.lsn))
    oldest = found.oldest
    status = SequencesStatus(len(values), oldest.epoch, oldest.lsn, oldest.recorded_at)
    # Sequences without a value are named by what is asked from the source, with the GRANT to run.
    is_late = oldest.epoch < found.epoch or (now - oldest.recorded_at).total_seconds() >= _LATE_S
    return status, (f"sequences: {found.problem}",) if found.problem and is_late else ()


class SequenceRecorder:
    """Reads the values after each new consistent point, once per second at most, and records changed ones.

    Values that did not change get the LSN of the newest point once a minute, if there is a newer one. A value
    that cannot be read keeps its row, with its LSN. So does a value of an earlier epoch as long as that of
    the source is before it: the source was made from a copy, and its sequence was not set yet.

    :param applied: returns the LSN of the newest point of this run, 0 before the first
    """

    def __init__(
        self,
        dsn: str,
        pipeline: Pipeline,
        state_db: StateDatabase,
        record: EpochRecord,
        applied: Callable[[], LSN],
    ) -> None:
        self._dsn = dsn
        self._pipeline = pipeline
        self._state_db = state_db
        self._record = record
        self._applied = applied
        self._table = SequenceTable(pipeline.lake_root)
        self._connection: Connection | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pgrepl-sequences", daemon=True)
        self._read_for = LSN(0)
        self._next = self._next_without_point = 0.0
        self._renews_at = 0.0
        self._problem = ""

    def start(self) -> None:
        """Start the thread. Does nothing if the setting `sequences` is false."""
        if self._pipeline.sequences:
            self._thread.start()

    def stop(self) -> None:
        """Record the values once more if there is a newer point, and end. Waits up to 5 s."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_LAST_S)

    def look(self, *, is_last: bool = False) -> None:
        """Read the values, and record them for the newest point. Does nothing before the first point.

        Raises PgReplError.

        :param is_last: also record unchanged values if there is a newer point
        """
        # Take the LSN before the reading: the values are those after it.
        lsn, began = self._applied(), time.monotonic()
        if not lsn:
            return
        source = self._connect()
        if not self._serves(source, lsn):
            return
        reading = self._read(source, is_last=is_last)
        if self._stopping.is_set() and not is_last:
            return  # It is perhaps not complete, and the last reading follows.
        with source_errors("asking for the time"):
            now: datetime = row(source, "SELECT pg_catalog.clock_timestamp()")[0]
        self._record_values(reading, lsn, now, is_last=is_last)
        ended = time.monotonic()
        self._read_for, self._next_without_point = lsn, ended + RENEWAL_S
        self._next = ended + min(RENEWAL_S, max(INTERVAL_S, _REST * (ended - began)))
        self._report(show_unread(reading.unread))

    def _connect(self) -> Connection:
        if self._connection is None:
            self._connection = connect(self._dsn, f"sequences {self._pipeline.name}", read_only=True)
        return self._connection

    def _serves(self, source: Connection, lsn: LSN) -> bool:
        """Return True if this server serves the slot, and False if the receiver is not connected to it now.

        Raises SourceConnectionError if it does not have the slot, or not the WAL up to the point. Another
        server that the connection string leads to, such as a standby that is behind or a former primary, may
        have values from before the point.
        """
        slot = read_slot(source, self._record.slot)
        is_here = slot is not None and slot.database == current_database(source)
        if not is_here or written_lsn(source) <= lsn:
            raise SourceConnectionError(
                f"the connection leads to a server or database that does not serve slot {self._record.slot}",
                "this is tried again. If it persists, let the connection lead to one server only",
            )
        return slot is not None and slot.active

    def _read(self, source: Connection, *, is_last: bool) -> SequenceReading:
        records = self._state_db.read_tables(self._pipeline.name).items()
        kept = {name: one.relation for name, one in records if one.state is not TableState.REMOVED}
        return read_sequences(
            source,
            [relation.oid for relation in kept.values() if relation is not None],
            list(kept),
            trusts_owners=self._pipeline.trust_table_owners,
            is_stopped=lambda: self._stopping.is_set() and not is_last,
        )

    def _record_values(self, reading: SequenceReading, lsn: LSN, now: datetime, *, is_last: bool) -> None:
        """Replace the recorded values if one has changed, or if it is time to renew their LSN."""
        recorded = self._table.read()
        before = {one.name: one for one in recorded.values}
        rows = merge_values(reading, before, self._record.epoch, lsn, now)
        unread = {name: why for name, why in reading.unread.items() if name not in before}
        is_same = [one.value for one in rows] == [one.value for one in before.values()]
        is_same = is_same and unread == recorded.unread
        may_renew = is_last or time.monotonic() >= self._renews_at
        if is_same and not (may_renew and any(one.point > before[one.name].point for one in rows)):
            return
        self._table.write(Recorded(rows, unread), self._record.epoch, lsn)
        self._renews_at = time.monotonic() + RENEWAL_S

    def _run(self) -> None:
        while not self._stopping.wait(INTERVAL_S):
            now, has_point = time.monotonic(), self._applied() != self._read_for
            if now >= (self._next if has_point else max(self._next, self._next_without_point)):
                self._try()
        self._try(is_last=True)
        self._disconnect()

    def _try(self, *, is_last: bool = False) -> None:
        try:
            self.look(is_last=is_last)
        except Exception as error:  # noqa: BLE001 - an error here must not end the app, nor the thread
            self._next = time.monotonic() + _PAUSE_S
            self._disconnect()
            self._report(str(error) if isinstance(error, PgReplError) else f"unexpected {trace_of(error)}")

    def _report(self, problem: str) -> None:
        """Log a problem unless it is the last one. `problem`: empty if there is none."""
        if problem and problem != self._problem:
            log.warning("values of sequences were not read: %s", problem)
        elif self._problem and not problem:
            log.info("the values of all sequences are read again")
        self._problem = problem

    def _disconnect(self) -> None:
        if self._connection is not None:
            with suppress(Exception):
                self._connection.close()
        self._connection = None


def merge_values(
    reading: SequenceReading,
    before: Mapping[TableName, RecordedValue],
    epoch: int,
    lsn: LSN,
    now: datetime,
) -> list[RecordedValue]:
    """Return the rows that follow those `before`, in the order of their names.

    A value that was not read keeps its row. So does one of an earlier epoch that is later than that of the
    source. A sequence that the source no longer has gets no row.
    """

    def is_ahead(was: RecordedValue | None, value: SequenceValue) -> bool:
        return was is not None and was.epoch < epoch and was.value.is_ahead_of(value)

    rows = [
        before[name] if is_ahead(before.get(name), value) else RecordedValue(value, epoch, lsn, now)
        for name, value in reading.values.items()
    ]
    kept = [one for name, one in before.items() if name in reading.unread]
    return sorted([*rows, *kept], key=lambda one: one.name)
