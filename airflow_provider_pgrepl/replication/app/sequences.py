"""The recorded values of the source's sequences, and the SQL that sets them at another server.

Reads only the lake: the source may be lost.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import ConfigError, LakeError
from airflow_provider_pgrepl.replication.app.epoch import find_epoch, refuse_without_lake
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoints
from airflow_provider_pgrepl.replication.lake.sequences import RecordedValue, read_recorded
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.runtime.quantities import show_count, show_duration
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline


@dataclass(frozen=True)
class RecordedSequences:
    """The recorded values, in the order of their names. There is at least one.

    :param epoch: the present epoch
    :param point: the LSN of its newest consistent point, None without one
    """

    values: Sequence[RecordedValue]
    epoch: int
    point: LSN | None

    @property
    def oldest(self) -> RecordedValue:
        """The value that is valid for the fewest transactions."""
        return min(self.values, key=lambda one: (*one.point, one.recorded_at))

    @property
    def problem(self) -> str:
        """A sentence about values that may be too early for transactions in the lake, or empty."""
        former = [str(one.name) for one in self.values if one.epoch < self.epoch]
        if former:
            return (
                f"{', '.join(former)}: recorded in an earlier epoch, and not reached by the present"
                " source yet. Set them there, as pgrepl sequences FILE.json --sql prints it"
            )
        late = [str(one.name) for one in self.values if self.point is not None and one.lsn < self.point]
        if not late:
            return ""
        return (
            f"{', '.join(late)}: recorded at {self.oldest.lsn}, before the last consistent point"
            f" {self.point}: transactions in between may have taken later values. A running replication app"
            " records unchanged values once a minute, and when it ends"
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
    values = read_recorded(pipeline.lake_root)
    if not values:
        raise LakeError(
            f"no values of sequences are recorded in the lake {pipeline.lake_root}",
            "run pgrepl replicate FILE.json, or PgReplicationOperator: it records them after its first"
            " consistent point, and logs what it cannot read. A source without sequences has none",
        )
    point = ConsistentPoints(pipeline.lake_root).latest()
    is_present = point is not None and point.epoch == epoch.epoch
    return RecordedSequences(values, epoch.epoch, LSN(point.lsn) if is_present and point else None)


def to_text(found: RecordedSequences, now: datetime) -> str:
    """Return the values as an aligned table, with a line that describes them, and one for a problem."""
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
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        "  ".join(
            cell.rjust(width) if index in (3, 4) else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([*table, "", found.describe(now), *([found.problem] if found.problem else [])])


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
    }
    return json.dumps(content, indent=2)


def to_sql(found: RecordedSequences) -> str:
    """Return statements for psql that set the sequences. They consist of ASCII characters."""
    lines = [f"-- {found.describe(datetime.now(UTC))}", *([f"-- {found.problem}"] if found.problem else [])]
    lines = [line.encode("ascii", "backslashreplace").decode() for line in lines]
    for one in found.values:
        is_called = str(one.value.is_called).lower()
        name = _literal(one.name)
        lines.append(f"select pg_catalog.setval({name}, {one.value.last_value}, {is_called});")
    return "\n".join(lines)


def _literal(name: TableName) -> str:
    """Return a name as a string constant that has the same value in every session and client encoding."""
    text = name.sql.replace("\\", "\\\\").replace("'", "''")
    escaped = "".join(one if " " <= one <= "~" else _escape(one) for one in text)
    return f"E'{escaped}'" if "\\" in escaped else f"'{escaped}'"


def _escape(letter: str) -> str:
    # https://www.postgresql.org/docs/current/sql-syntax-lexical.html#SQL-SYNTAX-STRINGS-ESCAPE
    code = ord(letter)
    return f"\\u{code:04X}" if code < 1 << 16 else f"\\U{code:08X}"
