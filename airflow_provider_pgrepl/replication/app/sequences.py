"""The recorded values of the source's sequences, and the SQL that sets them at another server.

Reads only the lake: the source may be lost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import ConfigError, LakeError
from airflow_provider_pgrepl.replication.app.epoch import find_epoch, refuse_without_lake
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoints
from airflow_provider_pgrepl.replication.lake.sequences import RecordedValue, read_recorded, show_unread
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.runtime.quantities import (
    show_count,
    show_duration,
    show_list,
    show_table,
)
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline


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


def read_sequences(pipeline: Pipeline) -> RecordedSequences:
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
            f"check that it is mounted on this host; before the first snapshot, {errors.SNAPSHOT}",
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
