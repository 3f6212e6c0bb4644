"""A pipeline's status for people (aligned text) and for programs (JSON)."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.replication.lake.history.table import is_history
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.runtime.quantities import (
    show_bytes,
    show_count,
    show_duration,
    show_table,
)
from airflow_provider_pgrepl.replication.state.progress import TableMerges

from .status import ChangelogStatus, PipelineStatus, PublisherStatus, SlotStatus, TableStatus

_WIDTH = 100
_LABEL = 10
_RECENT_S = 15.0
_MEANING = {
    "received": "read from the slot, as the replication app last reported",
    "durable": "committed to the changelog",
    "confirmed": "confirmed to the slot: the server may recycle older WAL",
    "applied": "in the lake tables, at a consistent point",
}
_WATCHED = "checked: the changelog has all changes of each table"


def budget_exceeded(merges: TableMerges) -> str:
    """Return a sentence for people: the budget that a table's merges exceed, and why."""
    if merges.waits_for == "consistent_point_bytes":
        return "its merges replace more bytes of the table than consistent_point_bytes allows"
    share = merges.written / max(merges.changed, 1)
    return (
        f"in the last hour it wrote {share:.0f} bytes to the lake for each byte of change, which is more than"
        " max_write_amplification allows"
    )


def to_json(status: PipelineStatus) -> str:
    """Return the status as one JSON object.

    LSNs are X/X, times are in ISO 8601, lags are bytes of WAL behind the source.
    """
    return json.dumps(_plain(asdict(status)), indent=2)


def to_text(status: PipelineStatus) -> str:
    """Return the status as lines for 100 columns."""
    if not status.set_up:
        return "\n".join([*_heading(status), *_problems(status), "", *_not_set_up(status)])
    parts = [
        [*_heading(status), *_app(status), *_slot(status), *_problems(status)],
        _steps(status),
        [*_point(status), *_sequences(status), *_changelog(status.changelog)],
        _tables(status),
        _publishers(status),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _heading(status: PipelineStatus) -> list[str]:
    epoch = f", epoch {status.epoch}" if status.epoch is not None else ""
    source = status.source
    return [
        _line("pipeline", f"{status.pipeline}{epoch}"),
        _line("lake", status.lake if status.has_lake_tables else f"{status.lake}, without lake tables"),
        _line(
            "source",
            f"{source.address}, PostgreSQL {source.server_version_num // 10_000}, WAL at {source.wal_lsn}",
        ),
    ]


def _not_set_up(status: PipelineStatus) -> list[str]:
    slot = f", though there is a slot {status.slot.name}" if status.slot else ""
    return textwrap.wrap(
        f"Pipeline {status.pipeline} has not been set up yet{slot}: {errors.SNAPSHOT}.",
        _WIDTH,
    )


def _app(status: PipelineStatus) -> list[str]:
    if status.app is None or not status.app.holder:
        return [_line("app", "the replication app has not run yet")]
    app = status.app
    ago = f"last report {_ago(app.reported_at, status)}" if app.reported_at else "no report"
    is_read = status.slot is not None and status.slot.active
    if is_read and not _is_recent(status):
        text = f"starts, hangs, or has ended unnoticed; was on {app.holder}, {ago}"
        return [_line("app", text)]
    if is_read:
        return [_line("app", f"running on {app.holder}, {app.changes_per_s:,.0f} changes/s, {ago}")]
    if app.is_running:
        text = f"running on {app.holder}, does not read the slot: starts, or connects again; {ago}"
        return [_line("app", text)]
    end = "" if app.ended is None else f", {app.ended.kind} {_ago(app.ended.time, status)}"
    return [_line("app", f"not running{end}; was on {app.holder}, {ago}")]


def _slot(status: PipelineStatus) -> list[str]:
    slot = status.slot
    if slot is None and not status.is_ours:
        return [_line("slot", "is not at this source: see the problems below")]
    if slot is None and not status.recorded:
        text = "is gone, and this database records no such pipeline: the next snapshot begins it from nothing"
        return [_line("slot", text)]
    if slot is None:
        return [_line("slot", "is gone, or this server is a copy of the source: check the connection first")]
    held = "holds no WAL" if slot.invalidation else f"holds {show_bytes(slot.held_bytes)} of WAL"
    lines = [_line("slot", f"{slot.name}, {_slot_state(slot)}, {held}"), *_wrapped(slot.why_invalidated)]
    if slot.active and not _is_recent(status):
        sender = f"select pg_terminate_backend({slot.active_pid})"
        lines += _wrapped(f"hint: if no app of this pipeline runs any more, free the slot: {sender}")
    return lines


def _is_recent(status: PipelineStatus) -> bool:
    """Return True if the last report is less than 15 s old: an app that runs reports every 2 s."""
    reported_at = status.app.reported_at if status.app is not None else None
    return reported_at is not None and (status.read_at - reported_at).total_seconds() < _RECENT_S


def _slot_state(slot: SlotStatus) -> str:
    if slot.invalidation:
        return f"lost ({slot.invalidation})"
    reading = f"read by pid {slot.active_pid}" if slot.active else "no process reads it"
    return reading if slot.wal_status in (None, "reserved") else f"{reading}, WAL {slot.wal_status}"


def _problems(status: PipelineStatus) -> list[str]:
    return [_line("problem", problem) for problem in status.problems]


def _steps(status: PipelineStatus) -> list[str]:
    rows = [("step", "LSN", "behind the source", "meaning")]
    meaning = _MEANING if status.has_lake_tables else {**_MEANING, "applied": _WATCHED}
    for name, step in status.steps.items():
        rows.append((name, _lsn(step.lsn), show_bytes(step.lag_bytes), meaning[name]))
    return show_table(rows, right={2})


def _point(status: PipelineStatus) -> list[str]:
    point = status.consistent_point
    if not status.has_lake_tables:
        return []
    if point is None:
        return [_line("point", "no consistent point in this epoch yet")]
    age = status.last_applied_commit_age_s
    committed = f", last commit {show_duration(age)} ago" if age is not None else ""
    held = sum(not is_history(key) for key in point.tables)
    return [_line("point", f"{LSN(point.lsn)}{committed}, holds {show_count(held, 'table')}")]


def _sequences(status: PipelineStatus) -> list[str]:
    found = status.sequences
    if found is None:
        return []
    return [
        _line("sequences", f"{found.count}, valid up to {found.lsn}, read {_ago(found.recorded_at, status)}")
    ]


def _changelog(changelog: ChangelogStatus | None) -> list[str]:
    if changelog is None:
        return []
    since = f" since {changelog.since:%Y-%m-%d %H:%M} UTC" if changelog.since else ""
    size = f"{show_bytes(changelog.bytes)} in {show_count(changelog.files, 'file')}{since}"
    needed = (
        f"; {show_bytes(changelog.needed_bytes)} of it for {changelog.slowest}" if changelog.slowest else ""
    )
    return [_line("changelog", size + needed)]


def _tables(status: PipelineStatus) -> list[str]:
    tables = status.tables
    if not tables:
        return ["no tables recorded"]
    counts = Counter(table.state.value for table in tables)
    summary = ", ".join(f"{count} {state}" for state, count in counts.most_common())
    rows = [
        ("table", "state", "for", "position", "behind the source", "rows copied", "live", "kept", "written")
    ]
    for table in tables:
        copied = "-" if table.rows_copied is None else f"{table.rows_copied:,}"
        age = (status.read_at - table.since).total_seconds()
        rows.append(
            (
                table.table,
                table.state.value,
                show_duration(max(0.0, age)),
                _lsn(table.position_lsn),
                show_bytes(table.lag_bytes),
                copied,
                *_bytes(table),
            )
        )
    lines = show_table(rows, right={2, 4, 5, 6, 7, 8})
    notes = [
        line
        for table in tables
        for line in (*_copying(table), *_note(table), *_waiting(table), *_verified(table, status))
    ]
    return [f"{show_count(len(tables), 'table')}: {summary}", *lines, *(["", *notes] if notes else [])]


def _publishers(status: PipelineStatus) -> list[str]:
    publishers = status.publishers
    if not publishers:
        return []
    headings = ("publisher", "target", "position", "behind the source", "published", "skipped", "last report")
    rows = [
        (
            one.name,
            one.target,
            one.position or "not begun",
            show_bytes(one.lag_bytes),
            f"{one.published:,}",
            f"{one.skipped:,}",
            _ago(one.saved_at, status) if one.saved_at else "-",
        )
        for one in publishers
    ]
    notes = [line for one in publishers for line in _publisher_notes(one)]
    return [*show_table([headings, *rows], right={3, 4, 5}), *(["", *notes] if notes else [])]


def _publisher_notes(publisher: PublisherStatus) -> list[str]:
    lines = []
    if publisher.reason:
        lines += [f"publisher {publisher.name}: {publisher.error}", *_wrapped(publisher.reason)]
        lines += _wrapped(f"hint: {publisher.hint}") if publisher.hint else []
    for table in publisher.stopped:
        lines += [f"publisher {publisher.name}: {table.table}: {table.error}, stopped after {table.after}"]
        lines += [*_wrapped(table.reason), *_wrapped(f"hint: {table.hint}")]
    return lines


def _bytes(table: TableStatus) -> tuple[str, str, str]:
    """Return the bytes that a table takes: its newest version, files kept for points and readers, all written
    so far."""
    if table.bytes is None:
        return "-", "-", "-"
    return show_bytes(table.bytes.live), show_bytes(table.bytes.kept), show_bytes(table.bytes.written)


def _waiting(table: TableStatus) -> list[str]:
    merges = table.merges
    if merges is None or not merges.waits_for:
        return []
    return _wrapped(
        f"{table.table}: the applier waits for more changes, for {show_duration(merges.waiting_s)} now:"
        f" {budget_exceeded(merges)}. It merges them within max_staleness_s at the latest"
    )


def _copying(table: TableStatus) -> list[str]:
    return [] if table.copying is None else [f"{table.table}: copying {table.copying.to_text()}"]


def _verified(table: TableStatus, status: PipelineStatus) -> list[str]:
    if table.verified_through is None or table.verified_at is None:
        return []
    ago = _ago(table.verified_at, status)
    return [f"{table.table}: equal to the source through {table.verified_through}, {ago}"]


def _note(table: TableStatus) -> list[str]:
    if not table.reason:
        return []
    what = table.error or ("error" if table.state == "errored" else table.state)
    what += f" at {table.error_lsn}" if table.error_lsn else ""
    since = f"since {table.since.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    lines = [f"{table.table}: {what}, {since}", *_wrapped(table.reason)]
    return [*lines, *_wrapped(f"hint: {table.hint}")] if table.hint else lines


def _wrapped(text: str) -> list[str]:
    """Wrap each line of a text to 100 columns, without breaking names at hyphens."""
    return [
        line
        for part in text.splitlines()
        for line in textwrap.wrap(
            part, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
        )
    ]


def _line(label: str, text: str) -> str:
    return f"{label:<{_LABEL}}{text}"


def _lsn(lsn: LSN | None) -> str:
    return "-" if lsn is None else str(lsn)


def _ago(moment: datetime, status: PipelineStatus) -> str:
    return f"{show_duration(max(0.0, (status.read_at - moment).total_seconds()))} ago"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, LSN):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.isoformat() if isinstance(value, datetime) else value
