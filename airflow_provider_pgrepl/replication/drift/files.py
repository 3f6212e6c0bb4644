"""Drift of a table's storage: partitions that were added or removed, and files that were replaced. No side
effects.

The stream reports neither changes of partitions, nor a TRUNCATE of a single partition, nor that a table is
unlogged. Therefore the catalog's state must be explained in full, or the table stops.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from airflow_provider_pgrepl.errors import Remedy
from airflow_provider_pgrepl.replication.postgres.names import show_identifier
from airflow_provider_pgrepl.replication.postgres.relation import Partition, PublicationStatus, Relation

from .columns import DriftFinding, is_rewritten_for


def place_findings(recorded: Relation, current: PublicationStatus) -> Iterator[DriftFinding]:
    """Yield findings about partitions that were added or removed with their rows, and about tables and
    partitions whose changes are not in the stream, because they are unlogged or foreign."""
    if recorded.relkind == "p":
        yield from _partition_findings(recorded, current)
    elif current.persistence == "u":
        yield DriftFinding("the table is unlogged: its changes are not in the stream", Remedy.LOGGED)


def file_findings(recorded: Relation, current: Relation, *, was_watched: bool) -> Iterator[DriftFinding]:
    """Yield findings about replaced files of the same table or partitions, whose rows may have changed
    unnoticed.

    `was_watched`: an event trigger has reported all DDL since the relation was recorded.
    """
    if recorded.relkind == "p":
        now = {part.oid: part for part in current.partitions}
        widened = _widened(recorded, current)
        for part in recorded.partitions:
            if part.oid in now and _has_other_file(part, now[part.oid], recorded.truncated_by):
                yield _rewritten(widened, now[part.oid])
        for part in new_partitions(recorded, current):
            # The file may be from before the partition was attached, when it was empty: otherwise had_rows
            # stops the table.
            is_clear = now[part.oid].xmin in part.links and widened is None
            if not is_clear and _has_other_file(part, now[part.oid], recorded.truncated_by):
                yield _rewritten(widened, now[part.oid])
    elif was_watched or not recorded.xmin or current.persistence == "u":
        return
    elif _has_other_file(recorded, current, recorded.truncated_by):
        yield DriftFinding(
            "the table was rewritten, and may have been unlogged meanwhile: changes may be missing"
        )


def new_partitions(recorded: Relation, current: Relation) -> Iterator[Partition]:
    """Yield the partitions that were added since, as they were created: a file has the oid of its table as
    its number until the table gets another file."""
    known = {part.oid for part in recorded.partitions}
    for part in current.partitions:
        if (recorded.natts or known) and part.oid not in known and part.relfilenode:
            yield replace(part, relfilenode=part.oid, xmin=0)


def _partition_findings(recorded: Relation, current: PublicationStatus) -> Iterator[DriftFinding]:
    if not (recorded.natts or recorded.partitions):
        return
    before = {part.oid: part for part in recorded.partitions}
    now = {part.oid: part for part in current.partitions}
    for oid, part in before.items():
        if oid not in now:
            yield DriftFinding(f"partition {part.table} was detached or dropped")
        elif part.links and part.links != now[oid].links:
            yield _attached_again(now[oid])
    for oid, part in now.items():
        if oid not in before and part.had_rows:
            yield DriftFinding(f"partition {part.table} was attached and may have held rows")
        yield from _unpublished_changes(part)


def _attached_again(part: Partition) -> DriftFinding:
    return DriftFinding(
        f"partition {part.table}, or one that it is below, was detached and attached again: changes between"
        " are missing"
    )


def _widened(recorded: Relation, current: Relation) -> str | None:
    """Return the name of a column whose wider type made PostgreSQL rewrite all partitions; None without
    one."""
    now = {column.attnum: column for column in current.columns}
    widened = (
        before.name
        for before in recorded.columns
        if before.attnum in now and is_rewritten_for(before, now[before.attnum])
    )
    return next(widened, None)


def _rewritten(widened: str | None, part: Partition) -> DriftFinding:
    """Return the finding for a replaced file of a partition. A wider type explains a new file, but it does
    not rule out a TRUNCATE before it, or after it in the same transaction, which leaves no trace."""
    if widened is None:
        return DriftFinding(
            f"partition {part.table} was truncated by itself, or rewritten as VACUUM FULL does"
        )
    return DriftFinding(
        f"the type of column {show_identifier(widened)} became wider, for which all partitions were"
        " rewritten: it cannot be determined whether one of them was also truncated"
    )


def _has_other_file(before: Partition | Relation, now: Partition | Relation, truncated_by: int) -> bool:
    """Return True if the file is another one, and not from the TRUNCATE of the whole table that the stream
    reported."""
    is_other = abs(now.relfilenode) != abs(before.relfilenode)
    return is_other and (truncated_by == 0 or now.xmin != truncated_by)


def _unpublished_changes(part: Partition) -> Iterator[DriftFinding]:
    if part.relkind == "f":
        text = f"partition {part.table} is a foreign table, whose changes are not in the stream"
        yield DriftFinding(text, Remedy.LOGGED)
    elif part.persistence == "u":
        yield DriftFinding(
            f"partition {part.table} is unlogged: its changes are not in the stream", Remedy.LOGGED
        )
