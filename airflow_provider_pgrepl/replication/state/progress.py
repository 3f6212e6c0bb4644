"""How far a pipeline is, and its lag: always of something, in bytes or in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from airflow_provider_pgrepl.replication.postgres.lsn import LSN

_START = LSN(0)


@dataclass(frozen=True)
class TableBytes:
    """What a lake table takes in its storage. `live`: its newest version; `kept`: removed files that are
    still there, for points and readers; `written`: all that its log tells of, since the entry that was its
    oldest when the app started."""

    live: int
    kept: int
    written: int


@dataclass(frozen=True)
class TableMerges:
    """How a table is merged. `seconds` that the last merge took; bytes that merges have `written` to the lake
    for so many bytes `changed`, in the last hour; `waiting_s`: for how long the oldest change has waited that
    is not merged yet, and which budget for, `write_amplification` or `points_bytes`; '' when for its turn."""

    seconds: float
    written: int
    changed: int
    waiting_s: float = 0.0
    waits_for: str = ""


@dataclass(frozen=True)
class Progress:
    """The receiver's and the applier's last words, as people see them; the truth is in the lake.

    received: read from the slot. durable: committed to the changelog. confirmed: to the slot. applied:
    every streaming table has it, as of a consistent point. `idle_at`, by the clock of the state database: no
    batch was running then, so that every later one knows the states that were set before.
    """

    received_lsn: LSN = _START
    durable_lsn: LSN = _START
    confirmed_lsn: LSN = _START
    applied_lsn: LSN = _START
    applied_commit_ts: datetime | None = None
    changes_per_s: float = 0.0
    holder: str = ""
    updated_at: datetime | None = None
    idle_at: datetime | None = None
    table_bytes: Mapping[str, TableBytes] = field(default_factory=dict)
    """By the table's path under the lake root, as of the last maintenance."""
    table_merges: Mapping[str, TableMerges] = field(default_factory=dict)
    """Likewise, as of some seconds ago."""


@dataclass(frozen=True)
class Lag:
    """How far behind the source's WAL each step is.

    `applied_seconds` is the age of the last applied transaction while there is WAL that is not applied, and 0
    when there is none: an idle source is not late. It is None as long as nothing was applied.
    """

    receive_bytes: int
    durable_bytes: int
    confirmed_bytes: int
    apply_bytes: int
    applied_seconds: float | None


def lag(progress: Progress, wal_lsn: LSN, now: datetime) -> Lag:
    """The lag of a pipeline behind `wal_lsn` of its source, at the time `now` (with time zone)."""
    apply_bytes = _behind(wal_lsn, progress.applied_lsn)
    return Lag(
        receive_bytes=_behind(wal_lsn, progress.received_lsn),
        durable_bytes=_behind(wal_lsn, progress.durable_lsn),
        confirmed_bytes=_behind(wal_lsn, progress.confirmed_lsn),
        apply_bytes=apply_bytes,
        applied_seconds=_age(progress.applied_commit_ts, now) if apply_bytes else 0.0,
    )


def _behind(end: LSN, position: LSN) -> int:
    return max(0, int(end) - int(position))


def _age(moment: datetime | None, now: datetime) -> float | None:
    return None if moment is None else max(0.0, (now - moment).total_seconds())
