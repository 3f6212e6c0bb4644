"""The progress of a replication: its receiver, its applier, and the merges and storage of its tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from airflow_provider_pgrepl.replication.postgres.lsn import LSN

_START = LSN(0)


@dataclass(frozen=True)
class TableBytes:
    """The storage that a lake table takes, in bytes. `live`: files of the newest version. `kept`: removed
    files that still exist, for consistent points and readers. `written`: all writes that the table's log
    records, from the entry that was its oldest when the app started."""

    live: int
    kept: int
    written: int


@dataclass(frozen=True)
class TableMerges:
    """The merges of a table. `seconds`: duration of the last merge. `written`: bytes that merges wrote to the
    lake in the last hour, for `changed` bytes of changes. `waiting_s`: the age of the oldest change that is
    not merged, in seconds. `waits_for`: the budget that the change waits for, `max_write_amplification` or
    `consistent_point_bytes`; empty if it waits only for its turn. `position`: the LSN of the last merge of
    this run of the app, empty before it."""

    seconds: float
    written: int
    changed: int
    waiting_s: float = 0.0
    waits_for: str = ""
    position: str = ""


@dataclass(frozen=True)
class Progress:
    """The last progress that the receiver and the applier reported, for display. The lake is authoritative.

    `received_lsn`: read from the slot. `durable_lsn`: committed to the changelog. `confirmed_lsn`: confirmed
    to the slot. `applied_lsn`: applied to every streaming table, as of a consistent point. `idle_at`: a time,
    by the clock of the state database, at which no batch was running: every later batch knows the table
    states that were set before. `complete_at`: every transaction whose commit record was in the WAL of the
    source at that time, by the clock of the source, is in each streaming table.
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
    """By the table's path under the lake root, as of a few seconds ago."""
    complete_at: datetime | None = None


@dataclass(frozen=True)
class Lag:
    """The lag of each step behind the source's WAL.

    `applied_seconds` is the age of the last applied transaction while there is WAL that is not applied, and 0
    without such WAL: an idle source has no lag. It is None if there is such WAL and nothing was applied yet.
    """

    receive_bytes: int
    durable_bytes: int
    confirmed_bytes: int
    apply_bytes: int
    applied_seconds: float | None


def lag(progress: Progress, wal_lsn: LSN, now: datetime) -> Lag:
    """Return the lag of a pipeline behind `wal_lsn` of its source, at the time `now` (with time zone)."""
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
