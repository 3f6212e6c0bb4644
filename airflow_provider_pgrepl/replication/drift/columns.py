"""Drift of columns: what changed in each column, and whether the lake can follow. No side effects."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import ConfigError, Remedy, one_line
from airflow_provider_pgrepl.replication.postgres import oids
from airflow_provider_pgrepl.replication.postgres.names import TableName, show_identifier
from airflow_provider_pgrepl.replication.postgres.relation import Column, PgType, Relation
from airflow_provider_pgrepl.replication.settings.tables import TableOptions
from airflow_provider_pgrepl.replication.values import typed_column
from airflow_provider_pgrepl.replication.values.scalars import precision_and_scale

from .matching import MatchedColumn

__all__ = ["DriftFinding", "Remedy"]

_FOLLOW = (
    "to keep its name in the pipeline, set on_rename to follow for it, restart the replication app, and"
    " {resnapshot}"
)
_WORDS = {
    Remedy.RESNAPSHOT: "{resnapshot}",
    Remedy.UNDO: "set it back at the source, then {retry}; or {resnapshot}",
    Remedy.MOVED: f"name it back, then {{retry}}; or, {_FOLLOW}; or {{added}}",
    Remedy.ADDED: f"{_FOLLOW}; or {{added}}",
    Remedy.PUBLISH: "put it into the publication again, then {resnapshot}",
    Remedy.GONE: (
        "the lake table keeps the last rows. If the table is gone for good: {remove}. If it was dropped by"
        " mistake, restore it with its rows first, then {resnapshot}"
    ),
    Remedy.POLICY: (
        "set on_drift to evolve for it, restart the replication app, then {retry}; or {resnapshot}"
    ),
    Remedy.LOGGED: "make it an ordinary, logged table, then {resnapshot}",
    Remedy.CHOICE: "correct that at the source or in the pipeline, then {retry}; or {resnapshot}",
}
_REPLACED = (
    "if the pipeline has {moved_to}, {swapped}. If it does not, {resnapshot}; to replicate {moved_to}, too,"
    " {add}"
)
"""The remedy for a table that was renamed, and whose name another table has now."""
# Once rows of another shape are in the changelog, undoing the change at the source does not help those rows.
_ONCE_SENT = {Remedy.UNDO: Remedy.RESNAPSHOT, Remedy.MOVED: Remedy.ADDED}
_INTEGERS = {oids.INT2: 0, oids.INT4: 1, oids.INT8: 2}
_WITH_FRACTIONS = frozenset({oids.TIME, oids.TIMETZ, oids.TIMESTAMP, oids.TIMESTAMPTZ})
_ALL_FRACTIONS = 6
_EXACT_CASTS = frozenset(
    {
        (pa.int16(), pa.int32()),
        (pa.int16(), pa.int64()),
        (pa.int32(), pa.int64()),
        (pa.float32(), pa.float64()),
    }
)
_COUNTED, _HEADER = frozenset({oids.BPCHAR, oids.VARCHAR}), 4
"""char(n) and varchar(n), whose type modifier is n plus the size of a header."""


@dataclass(frozen=True)
class DriftFinding:
    """A reason why a lake table cannot continue."""

    text: str
    remedy: Remedy = Remedy.RESNAPSHOT
    moved_to: TableName | None = None

    def way_out(self, *, was_sent: bool) -> Remedy:
        """Return the remedy. `was_sent`: rows of this shape are in the changelog, so that undoing the change
        does not help."""
        return _ONCE_SENT.get(self.remedy, self.remedy) if was_sent else self.remedy

    def hint(self, table: TableName, *, was_sent: bool) -> str:
        """Return the remedy as an instruction for the user."""
        renamed = errors.rename_settings(table, self.moved_to)
        add, swapped = errors.add(self.moved_to), errors.swapped(table, self.moved_to)
        added = f"{renamed}, remove {table} from the pipeline, then {add}"
        added += f"; but if the two swapped names, {swapped}"
        words = _WORDS[self.way_out(was_sent=was_sent)]
        if self.remedy is Remedy.RESNAPSHOT and self.moved_to is not None:
            words = _REPLACED
        return words.format(
            resnapshot=errors.resnapshot(table),
            retry=errors.retry(table),
            added=added,
            remove=errors.remove(table),
            moved_to=self.moved_to,
            swapped=swapped,
            add=add,
        )


@dataclass(frozen=True)
class Widening:
    """A change to a type that holds all values of the earlier one.

    `rewrites`: ALTER COLUMN … TYPE rewrites the table for it. `keeps_text`: each value has the same text as
    before.
    """

    rewrites: bool
    keeps_text: bool


def find_widening(before: Column, now: Column) -> Widening | None:
    """Return how the type of `now` is wider than that of `before`; None if it is not known to be.

    A domain and its base type have the same values. PostgreSQL keeps the table's file if neither USING nor a
    constraint of a domain requires a rewrite. With a domain, only a change that keeps the file counts as
    wider, because the values are then known to be the same.
    """
    was, is_now = before.pg_type.without_domain, now.pg_type.without_domain
    if "d" not in (before.pg_type.kind, now.pg_type.kind):
        return _of_types(was, is_now)
    if _is_same(was, is_now):
        return Widening(False, True)
    widening = _of_types(was, is_now)
    return widening if widening == Widening(False, True) else None


def _is_same(one: PgType, other: PgType) -> bool:
    """Return True if two types are the same, without regard to the names of types."""
    return (
        (one.oid, one.typmod, one.kind, one.labels) == (other.oid, other.typmod, other.kind, other.labels)
        and [name for name, _ in one.parts] == [name for name, _ in other.parts]
        and all(_is_same(mine, theirs) for (_, mine), (_, theirs) in zip(one.parts, other.parts, strict=True))
    )


def is_exact_in_lake(
    before: Column, now: Column, table: TableName, options: TableOptions, widening: Widening
) -> bool:
    """Return True if the lake values of the earlier type, cast, equal those that the present type would have
    given."""
    try:
        old = typed_column(before, table, options).lake_type
        new = typed_column(now, table, options).lake_type
    except ConfigError:
        return False
    return _is_exact(old, new, widening)


def _is_exact(old: pa.DataType, new: pa.DataType, widening: Widening) -> bool:
    if pa.types.is_list(old) and pa.types.is_list(new):
        return _is_exact(old.value_type, new.value_type, widening)
    if pa.types.is_decimal(old) and pa.types.is_decimal(new):
        return bool(old.scale <= new.scale and old.precision - old.scale <= new.precision - new.scale)
    if pa.types.is_string(old) and pa.types.is_string(new):
        return widening.keeps_text
    return old == new or (old, new) in _EXACT_CASTS


def _of_types(before: PgType, now: PgType) -> Widening | None:
    if before.kind == now.kind == "a":
        return _of_elements(before.only_part, now.only_part)
    if before.kind != "b" or now.kind != "b":
        return None
    if before.oid in _INTEGERS and now.oid in _INTEGERS:
        return Widening(True, True) if _INTEGERS[before.oid] < _INTEGERS[now.oid] else None
    if (before.oid, now.oid) == (oids.FLOAT4, oids.FLOAT8):
        return Widening(True, False)
    if before.oid == now.oid == oids.NUMERIC:
        return _of_numerics(before.typmod, now.typmod)
    return Widening(False, True) if _holds_more(before, now) else None


def _of_elements(before: PgType, now: PgType) -> Widening | None:
    element = _of_types(before, now)
    if element is None or not element.keeps_text:
        return None
    # Each stored array contains the oid of the element type, and a limit is checked for every element.
    only_freed = before.oid == now.oid and now.typmod < 0
    return Widening(rewrites=not only_freed, keeps_text=True)


def _of_numerics(before: int, now: int) -> Widening | None:
    if now < 0:
        return Widening(False, True)
    if before < 0:
        return None
    (digits, scale), (more_digits, larger_scale) = precision_and_scale(before), precision_and_scale(now)
    if scale > larger_scale or digits - scale > more_digits - larger_scale:
        return None
    return Widening(scale != larger_scale, scale == larger_scale)


def _holds_more(before: PgType, now: PgType) -> bool:
    """Return True if the only difference of the present type is a larger limit, or none."""
    if before.oid in (oids.TEXT, oids.VARCHAR) and now.oid in (oids.TEXT, oids.VARCHAR):
        unlimited = now.oid == oids.TEXT or now.typmod < 0
        return unlimited or (before.oid == oids.VARCHAR and 0 <= before.typmod <= now.typmod)
    if before.oid != now.oid:
        return False
    if now.oid == oids.VARBIT:
        return now.typmod < 0 or 0 <= before.typmod <= now.typmod
    if now.oid in _WITH_FRACTIONS:
        return now.typmod < 0 or now.typmod >= _ALL_FRACTIONS or 0 <= before.typmod <= now.typmod
    return False


@dataclass(frozen=True)
class ColumnComparison:
    """A comparison of one table's columns in its lake table with its present columns."""

    recorded: Relation
    current: Relation
    options: TableOptions

    def in_lake(self, column: Column) -> bool:
        """Return True if the lake table has the column: it is neither ignored since it was added nor excluded
        by options."""
        return column.attnum not in self.recorded.ignored and not self.options.column(column.name).excluded

    def findings(self, places: list[MatchedColumn]) -> Iterator[DriftFinding]:
        """Yield the changes that the lake cannot follow, in published columns and in generated ones that are
        not published."""
        unpublished = {column.attnum for column in self.current.unpublished}
        for column in self.recorded.columns:
            if column.attnum in unpublished:
                yield DriftFinding(f"generated column {show_identifier(column.name)} is no longer published")
        for place in places:
            if place.before is None:
                yield from self._added(place.column, place.sent.name)
            elif self.in_lake(place.before):
                yield from self._renamed(place.before, place.sent.name)
                if place.now is not None:
                    yield from self._retyped(place.before, place.now)
        yield from self._unpublished_findings()

    def hidden_findings(self, places: list[MatchedColumn], hidden: Collection[int]) -> Iterator[DriftFinding]:
        """Yield the columns of the lake table whose values the changelog does not hold."""
        for number in hidden:
            if self.in_lake(places[number].column):
                yield DriftFinding(
                    f"column {places[number].shown} is not kept in the changelog (exclude_columns)"
                )

    def _unpublished_findings(self) -> Iterator[DriftFinding]:
        """Yield the changes that the lake cannot follow in columns that are not published. The lake has only
        nulls in these, so only which columns they are, their names and their types matter."""
        published = {column.attnum for column in self.current.columns}
        unpublished = {column.attnum: column for column in self.current.unpublished}
        for column in self.recorded.unpublished:
            if column.attnum in published:
                yield DriftFinding(
                    f"column {show_identifier(column.name)}, which was generated, is now published: it is no"
                    " longer generated (DROP EXPRESSION), or the publication publishes generated columns"
                )
            elif (now := unpublished.pop(column.attnum, None)) and self.in_lake(column):
                yield from self._renamed(column, now.name)
                yield from self._retyped(column, now)
        for column in unpublished.values():
            if all(column.attnum != known.attnum for known in self.recorded.columns):
                yield from self._added(column, column.name)

    def _added(self, column: Column, sent_name: str) -> Iterator[DriftFinding]:
        if sent_name != column.name:
            yield from self._renamed(replace(column, name=sent_name), column.name)
            return
        live = {column.attnum for column in (*self.current.columns, *self.current.unpublished)}
        known = (*self.recorded.columns, *self.recorded.unpublished, *self.recorded.dropped)
        name = show_identifier(column.name)
        if any(c.name == column.name and c.attnum not in live and self.in_lake(c) for c in known):
            yield DriftFinding(f"column {name} was dropped and added again")

    def _renamed(self, before: Column, name: str) -> Iterator[DriftFinding]:
        if name != before.name:
            text = f"column {show_identifier(before.name)} was renamed to {show_identifier(name)}"
            yield DriftFinding(text, Remedy.UNDO)

    def _retyped(self, before: Column, now: Column) -> Iterator[DriftFinding]:
        name = show_identifier(before.name)
        if not is_of_other_type(before, now):
            yield from _inner_findings(name, before, now)
            return
        widening = find_widening(before, now)
        if widening is None or not is_exact_in_lake(
            before, replace(now, name=before.name), self.recorded.table, self.options, widening
        ):
            yield DriftFinding(type_change(before, now))

    def rewrite_findings(self, places: list[MatchedColumn], *, rewritten: bool) -> Iterator[DriftFinding]:
        """Yield the columns whose values may have changed, or are unknown, because the table was
        rewritten."""
        if not rewritten:
            return
        for place in places:
            if place.now is None and self.in_lake(place.column):
                yield DriftFinding(
                    f"the table was rewritten before column {place.shown} was dropped, which may have changed"
                    " its values"
                )
        before = {column.attnum: column for column in self.recorded.columns}
        for now in self.current.columns:
            known = before.get(now.attnum)
            name = show_identifier(now.name)
            if known is None:
                if now.missing is None and self._will_be_in_lake(now):
                    yield DriftFinding(
                        f"column {name} was added and the table rewritten: what older rows have in it is not"
                        " known"
                    )
            elif self.in_lake(known) and _was_touched(known, now) and not is_rewritten_for(known, now):
                yield DriftFinding(_rewritten_with(known, now))

    def _will_be_in_lake(self, column: Column) -> bool:
        return self.in_lake(column) and self.options.policy.on_drift != "ignore"


def is_of_other_type(before: Column, now: Column) -> bool:
    """Return True if the type or its modifier changed, as from varchar(10) to varchar(20)."""
    return (before.type_oid, before.typmod) != (now.type_oid, now.typmod)


def type_change(before: Column, now: Column) -> str:
    """Describe the change of a column's type. A type that took the name of another is described by oid and
    labels."""
    name = show_identifier(before.name)
    was, type_name = one_line(before.type_name), one_line(now.type_name)
    if before.type_oid == now.type_oid or was != type_name:
        return f"the type of column {name} changed from {was}{_domain(before)} to {type_name}{_domain(now)}"
    text = (
        f"another type took the name {type_name}, that of the type of column {name}: its oid was"
        f" {before.type_oid} and is {now.type_oid}"
    )
    old, new = ({label for _, label in _labels(column.type)} for column in (before, now))
    for what, labels in (("added", new - old), ("removed", old - new)):
        if labels:
            shown = [one_line(f"'{label}'") for label in sorted(labels)]
            text += f"; labels {what}: {', '.join(shown[:10])}{' …' if len(shown) > 10 else ''}"
    return text


def _domain(column: Column) -> str:
    """Return the base type of a domain in parentheses; "" for any other type."""
    if column.pg_type.kind != "d":
        return ""
    made_of = column.pg_type.without_domain
    limit = ""
    if made_of.oid == oids.NUMERIC and made_of.typmod >= 0:
        limit = "({},{})".format(*precision_and_scale(made_of.typmod))
    elif made_of.typmod >= 0:
        limit = f"({made_of.typmod - _HEADER if made_of.oid in _COUNTED else made_of.typmod})"
    return f" (a domain over {one_line(made_of.name)}{limit})"


def _rewritten_with(before: Column, now: Column) -> str:
    if is_of_other_type(before, now) and "d" in (before.pg_type.kind, now.pg_type.kind):
        return (
            f"the table was rewritten when {type_change(before, now)}, as it is for constraints of a"
            " domain and for a limit of its base type; it cannot be determined whether an expression"
            " (USING) changed values"
        )
    name = show_identifier(now.name)
    return f"the table was rewritten and column {name} altered, which may have changed its values"


def is_rewritten_for(before: Column, now: Column) -> bool:
    """Return True if the column changed to a wider type for which PostgreSQL rewrites the table."""
    if not is_of_other_type(before, now):
        return False
    widening = find_widening(before, now)
    return widening is not None and widening.rewrites


def _was_touched(before: Column, now: Column) -> bool:
    """Return True if ALTER COLUMN … TYPE may have changed the column. It recreates the default of a column
    that has one.

    A rewrite for another reason clears the missing value, which changes the xmin, and keeps the default.
    """
    has_same_default = before.default_oid != 0 and before.default_oid == now.default_oid
    return before.xmin not in (0, now.xmin) and not has_same_default


def _inner_findings(name: str, before: Column, now: Column) -> Iterator[DriftFinding]:
    if before.type is None:
        return
    if _structure(now.type) != _structure(before.type):
        yield DriftFinding(f"what the type of column {name} ({one_line(now.type_name)}) is made of changed")
    labels = dict(_labels(now.type))
    for oid, label in _labels(before.type):
        if labels and labels.get(oid) != label:
            what = "renamed" if oid in labels else "dropped"
            yield DriftFinding(
                f"an enum label of column {name} ({one_line(now.type_name)}) was {what}", Remedy.UNDO
            )
            return


def _structure(pg_type: PgType | None) -> tuple[Any, ...] | None:
    """Return what determines the values of a type. Names of types do not count, names of fields do."""
    if pg_type is None:
        return None
    parts = tuple((name, _structure(part)) for name, part in pg_type.parts)
    return (pg_type.oid, pg_type.typmod, pg_type.kind, parts)


def _labels(pg_type: PgType | None) -> Iterator[tuple[int, str]]:
    """Yield the labels of all enums in a type."""
    if pg_type is not None:
        yield from pg_type.labels
        for _, part in pg_type.parts:
            yield from _labels(part)
