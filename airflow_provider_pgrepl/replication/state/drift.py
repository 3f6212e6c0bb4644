"""Drift: whether a relation is still what its lake table was built for. Pure.

A relation is compared with the catalog as it was when its message arrived, so a table may stop early, when
the catalog had already moved on, but never late.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.relation import Column, PgType, Relation, show_identifier


class Kind(StrEnum):
    """Whether a lake table goes on as it is, after a change of its own, or not at all."""

    UNCHANGED = "unchanged"
    SAFE = "safe"
    UNSAFE = "unsafe"


@dataclass(frozen=True)
class Verdict:
    """What became of a relation, in sentences, and what is to be done.

    `relation`: what the lake table is for from here on, with what it keeps of dropped columns and leaves out
    of added ones; None when the verdict is unsafe. `hint`: how to go on then.
    """

    kind: Kind
    changes: tuple[str, ...] = ()
    hint: str = ""
    relation: Relation | None = None

    @property
    def reason(self) -> str:
        return "; ".join(self.changes)


def judge(recorded: Relation, announced: RelationRecord, pipeline: Pipeline) -> Verdict:  # noqa: ARG001
    """Whether the lake table built for `recorded` can go on with what was announced, and how."""
    drift = find_drift(recorded, announced)
    if drift is None:
        return Verdict(Kind.UNCHANGED, relation=announced.catalog)
    hint = f"take it anew: run the snapshot app with --tables '{recorded.table}'"
    return Verdict(Kind.UNSAFE, (drift,), hint)


def judge_catalog(recorded: Relation, current: Relation | None, pipeline: Pipeline) -> Verdict:
    """The same for the catalog as it is now, whatever the stream has announced; None: the table is gone."""
    if current is None:
        hint = f"take it anew: run the snapshot app with --tables '{recorded.table}'"
        return Verdict(Kind.UNSAFE, ("the table was dropped",), hint)
    return judge(recorded, RelationRecord.of_catalog(current), pipeline)


def find_drift(recorded: Relation, announced: RelationRecord) -> str | None:
    """What changed, in a sentence; None when the recorded shape still holds."""
    current = announced.catalog
    if current is None:
        return "the table was dropped, or replaced by another"
    return next(_differences(recorded, current, announced), None)


def _differences(recorded: Relation, current: Relation, announced: RelationRecord) -> Iterator[str]:
    if current.oid != recorded.oid:
        yield "the table was dropped and another made under its name"
    if current.table != recorded.table:
        yield f"the table was renamed or moved to {current.table}"
    yield from _column_differences(recorded, current)
    if current.replica_identity != recorded.replica_identity:
        yield "the replica identity changed"
    if current.membership_oid != recorded.membership_oid:
        yield "the table was taken out of the publication, and possibly put back: changes between are missing"
    elif current.membership_xmin != recorded.membership_xmin:
        yield "the column list or row filter of the publication changed"
    if not announced.agrees:
        yield "the stream and the catalog disagree about columns or key: they were changed meanwhile"
    if current.relfilenode != recorded.relfilenode and _altered(recorded, current):
        yield "the table was rewritten by an ALTER TABLE, which may have changed its values"


def _column_differences(recorded: Relation, current: Relation) -> Iterator[str]:
    now = {column.attnum: column for column in current.columns}
    before = {column.attnum: column for column in recorded.columns}
    unsent = {column.attnum for column in current.unpublished}
    for column in recorded.columns:
        if column.attnum in unsent:
            yield f"generated column {show_identifier(column.name)} is no longer published"
        else:
            yield from _column_difference(column, now.get(column.attnum), current)
    yield from _unpublished_differences(recorded, current)
    for attnum, column in now.items():
        if attnum not in before:
            yield f"column {show_identifier(column.name)} was added"


def _unpublished_differences(recorded: Relation, current: Relation) -> Iterator[str]:
    """Columns of which the lake has nothing but nulls: what counts is which they are, and their types."""
    now = {column.attnum: column for column in current.unpublished}
    before = {column.attnum: column for column in recorded.unpublished}
    published = {column.attnum for column in current.columns}
    for attnum, column in before.items():
        if attnum in published:
            yield f"generated column {show_identifier(column.name)} is now published"
        else:
            yield from _column_difference(column, now.get(attnum), current)
    for attnum, column in now.items():
        if attnum not in before and attnum not in {known.attnum for known in recorded.columns}:
            yield f"generated column {show_identifier(column.name)} was added"


def _column_difference(before: Column, now: Column | None, current: Relation) -> Iterator[str]:
    name = show_identifier(before.name)
    if now is None:
        again = any(column.name == before.name for column in current.columns)
        yield f"column {name} was dropped{' and added again' if again else ''}"
        return
    if now.name != before.name:
        yield f"column {name} was renamed to {show_identifier(now.name)}"
    if (now.type_oid, now.typmod) != (before.type_oid, before.typmod):
        yield f"the type of column {name} changed from {before.type_name} to {now.type_name}"
    elif before.type is not None and _structure(now.type) != _structure(before.type):
        yield f"what the type of column {name} ({now.type_name}) is made of changed"
    if now.is_key != before.is_key:
        yield f"the key changed: column {name} {'joined' if now.is_key else 'left'} it"


def _structure(pg_type: PgType | None) -> tuple[Any, ...] | None:
    """What values of a type are made of; names of types say nothing about them, those of fields do."""
    if pg_type is None:
        return None
    parts = tuple((name, _structure(part)) for name, part in pg_type.parts)
    return (pg_type.oid, pg_type.typmod, pg_type.kind, parts)


def _altered(recorded: Relation, current: Relation) -> bool:
    before = {column.attnum: column.xmin for column in recorded.columns}
    return any(before.get(column.attnum) != column.xmin for column in current.columns)
