"""The columns of a Relation message: those that settings hide, and their columns in the catalog. No side
effects.

A setting hides a column under any name that the column has had. A publication could leave such columns out
with a column list. But then the server would reject dropping or retyping any other column of the table, and
would not send added columns.

A Relation message has names and types, in the order of attnums, as of when it was sent. The catalog was read
at that time or later. If more than one way of matching the two is possible, none is used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations

from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.pgoutput.messages import WireColumn
from airflow_provider_pgrepl.replication.postgres.names import ColumnName, TableName, show_identifier
from airflow_provider_pgrepl.replication.postgres.relation import Column, Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline

_MOST_GONE = 8
"""If more columns than this were dropped, their combinations are not tried."""
Records = Callable[[int], Sequence[RelationRecord]]
"""Returns all records of a relation, from the stream and the catalog, by its oid."""


class UnclearLayoutError(Exception):
    """The message and the catalog cannot be matched with certainty; the text says why."""


@dataclass(frozen=True)
class MatchedColumn:
    """A column of the message. `before`: the column that the lake has; `now`: the one in the catalog."""

    sent: WireColumn
    before: Column | None
    now: Column | None

    @property
    def column(self) -> Column:
        """Return the column that the lake has, or else the one that it will have."""
        column = self.before or self.now
        assert column is not None
        return column

    @property
    def attnum(self) -> int:
        return self.column.attnum

    @property
    def shown(self) -> str:
        return show_identifier(self.sent.name)


def place_columns(recorded: Relation, received: RelationRecord, current: Relation) -> list[MatchedColumn]:
    """Match the message's columns, in its order. Raises UnclearLayoutError if the match is not certain."""
    sent = received.message.columns
    before = {column.attnum: column for column in recorded.columns}
    if received.same_columns:
        _refuse_holes(recorded, current, [c for c in current.columns if c.attnum not in before])
        return [
            MatchedColumn(wire, before.get(column.attnum), column)
            for wire, column in zip(sent, current.columns, strict=True)
        ]
    stories = list(_stories(recorded, current, sent))
    if not stories:
        raise UnclearLayoutError(_unexplained(recorded, current, sent))
    if len(stories) > 1:
        names = ", ".join(sorted({p.shown for story in stories for p in story if _is_open(p, stories)}))
        raise UnclearLayoutError(
            "columns were dropped or added while the stream was behind, and it cannot be determined"
            f" which of them {names} was then"
        )
    (story,) = stories
    _refuse_holes(recorded, current, [p.now for p in story if p.before is None and p.now is not None])
    for place in story:
        if place.now is None and unknown_attnums(recorded, current):
            raise UnclearLayoutError(f"column {place.shown} may have been dropped and added again")
    return story


def possible_layouts(sent: Sequence[WireColumn], later: Relation) -> list[list[int]]:
    """Return every list of attnums that the columns of a message can have had, given a catalog that was read
    at the time of the message or later; empty if there are too many.

    A column in the catalog existed from the time when its attnum was assigned. It is unknown when a column
    that is no longer in the catalog was dropped.
    """
    live = {column.attnum for column in later.columns}
    found: list[list[int]] = []
    for highest in range(len(sent), highest_attnum(later) + 1):
        stayed = [attnum for attnum in range(1, highest + 1) if attnum in live]
        gone = [attnum for attnum in range(1, highest + 1) if attnum not in live]
        still_there = len(sent) - len(stayed)
        if not 0 <= still_there <= len(gone):
            continue
        if len(gone) > _MOST_GONE:
            return []
        # Types do not exclude any list: they may have been altered since.
        found += [sorted((*stayed, *some)) for some in combinations(gone, still_there)]
    return found


def _is_open(place: MatchedColumn, stories: list[list[MatchedColumn]]) -> bool:
    return any(place not in story for story in stories)


def _stories(
    recorded: Relation, current: Relation, sent: Sequence[WireColumn]
) -> Iterator[list[MatchedColumn]]:
    """Yield each way to match the message: all columns that were kept, some of those that were dropped since,
    and the first ones of those that were added. Columns that were kept are in every message."""
    now = {column.attnum: column for column in current.columns}
    before = {column.attnum for column in recorded.columns}
    gone = [column for column in recorded.columns if column.attnum not in now]
    stayed = [column for column in recorded.columns if column.attnum in now]
    came = [column for column in current.columns if column.attnum not in before]
    if len(gone) > _MOST_GONE:
        return
    for still_there in range(len(gone) + 1):
        added = len(sent) - len(stayed) - still_there
        if not 0 <= added <= len(came):
            continue
        for some in combinations(gone, still_there):
            known = sorted((*stayed, *some), key=lambda column: column.attnum)
            places = [MatchedColumn(w, c, now.get(c.attnum)) for w, c in zip(sent, known, strict=False)]
            places += [MatchedColumn(w, None, c) for w, c in zip(sent[len(known) :], came, strict=False)]
            if all(_is_of_type(place) for place in places):
                yield places


def _is_of_type(place: MatchedColumn) -> bool:
    """Return True if the catalog's or the lake's column has the type that was sent. Types count more than
    names: a column may have had another name for a while."""
    wire = (place.sent.type_oid, place.sent.typmod)
    known = (column for column in (place.before, place.now) if column is not None)
    return any(wire == (column.type_oid, column.typmod) for column in known)


def _unexplained(recorded: Relation, current: Relation, sent: Sequence[WireColumn]) -> str:
    names = {column.name for column in (*recorded.columns, *current.columns)}
    for wire in sent:
        if wire.name not in names:
            return f"column {show_identifier(wire.name)} came or was renamed, and is no longer there"
    return (
        "the stream and the catalog disagree about columns: they were changed more than once since the"
        " stream sent them"
    )


def _refuse_holes(recorded: Relation, current: Relation, added: list[Column]) -> None:
    """Raise UnclearLayoutError for an added column if an attnum below it is unknown: another column may have
    had its name. Also raise it for a column that existed before and was not published."""
    holes = unknown_attnums(recorded, current)
    unpublished = {column.attnum for column in recorded.unpublished}
    for column in added:
        if column.attnum in unpublished:
            continue
        if column.attnum <= highest_attnum(recorded):
            raise UnclearLayoutError(f"column {show_identifier(column.name)} was not published before")
        if any(attnum < column.attnum for attnum in holes):
            raise UnclearLayoutError(
                f"column {show_identifier(column.name)} may have been dropped and added again"
            )


def unknown_attnums(recorded: Relation, current: Relation) -> list[int]:
    """Return the attnums that were assigned since the table was recorded to columns that no longer exist."""
    known = {
        column.attnum
        for relation in (recorded, current)
        for column in (*relation.columns, *relation.unpublished, *relation.dropped)
    }
    given = range(highest_attnum(recorded) + 1, highest_attnum(current) + 1)
    return [attnum for attnum in given if attnum not in known]


def highest_attnum(relation: Relation) -> int:
    """Return the highest attnum that the table is known to have assigned."""
    columns = (*relation.columns, *relation.unpublished, *relation.dropped)
    return relation.natts or max((column.attnum for column in columns), default=0)


def without_excluded_defaults(relation: Relation, pipeline: Pipeline) -> Relation:
    """Return the relation without the values that older rows have in excluded columns."""
    names = excluded(pipeline)
    return _without_defaults(relation, _attnums(relation, names)) if names else relation


@dataclass(frozen=True)
class HiddenColumns:
    """The columns that settings hide, in each relation that is received.

    A column is identified by its attnum once it had one of the `names`, in the stream or in the catalog,
    which may have been read after a rename. A table is identified by its oid: its columns of these names are
    hidden under every name of the table. If the attnums of the stream's columns cannot be determined, more
    columns are hidden than necessary, and a table whose lake has one of them stops.
    """

    names: frozenset[ColumnName]
    records: Records

    def mark(self, record: RelationRecord) -> RelationRecord:
        """Return the record with the positions of hidden columns, and without the values that older rows have
        in them."""
        if not self.names:
            return record
        catalog = record.catalog and _without_defaults(record.catalog, self.attnums(record.catalog))
        return replace(record, catalog=catalog, hidden=tuple(sorted(self.places(record))))

    def places(self, record: RelationRecord) -> set[int]:
        """Return the positions of the hidden columns in the relation's message."""
        if not self.names:
            return set()
        message, known = record.message, self._received(record)
        mine = self._with_earlier_tables(known)
        hidden = {n for n, c in enumerate(message.columns) if mine._is_named(record, c.name)}
        if any(_names(one) != _names(record) for one in mine._unclear(known)):
            return set(range(len(message.columns)))
        attnums = mine._known(known)
        return hidden | _places(record, _catalogs(known), attnums) if attnums else hidden

    def attnums(self, relation: Relation) -> frozenset[int]:
        """Return the attnums of the hidden columns of a catalog relation, from all of its records."""
        known = [one for one in self.records(relation.oid) if one.publication_status is None]
        mine = self._with_earlier_tables([*known, RelationRecord.of_catalog(relation)])
        if mine._unclear(known):
            return frozenset(c.attnum for c in (*relation.columns, *relation.unpublished))
        return mine._known(known) | _attnums(relation, mine.names)

    def bound(self, relation: Relation) -> frozenset[int]:
        """Return the attnums of a catalog relation that had, or may have had, one of the names.

        If the layout of a message is not certain, a column that had the same other name in every catalog does
        not count. Otherwise a table could never be copied again once a column of it was dropped and added.
        """
        known = [one for one in self.records(relation.oid) if one.publication_status is None]
        catalogs, live = _catalogs(known), _named(relation)
        mine = self._with_earlier_tables([*known, RelationRecord.of_catalog(relation)])
        found = {attnum for one in (*catalogs, relation) for attnum in _attnums(one, mine.names)}
        recorded = {pair for one in catalogs for pair in _named(one).items()}
        had = {attnum: {name for number, name in recorded if number == attnum} for attnum in live}
        in_doubt = {attnum for attnum, name in live.items() if had[attnum] != {name}}
        for record in filter(mine._names_any, known):
            ways = [mine._named_attnums(record, layout) for layout in _layouts(record, catalogs)]
            found |= set.intersection(*ways) | set.union(*ways) & in_doubt if ways else in_doubt
        return frozenset(found)

    def bare(self, relation: Relation | None) -> Relation | None:
        """Return the catalog relation without the values that older rows have in hidden columns."""
        if relation is None or not self.names:
            return relation
        return _without_defaults(relation, self.attnums(relation))

    def _with_earlier_tables(self, known: Sequence[RelationRecord]) -> HiddenColumns:
        """Return the hidden names as they apply to one relation, under every name that it had."""
        tables = set[TableName]().union(*(one.names for one in known))
        tables |= {one.source_table for one in _catalogs(known)}
        columns = {named.name for named in self.names if named.table in tables}
        return replace(self, names=frozenset(ColumnName(table, c) for table in tables for c in columns))

    def _received(self, record: RelationRecord) -> list[RelationRecord]:
        return [*(one for one in self.records(record.message.oid) if one.publication_status is None), record]

    def _is_named(self, record: RelationRecord, column: str) -> bool:
        table = TableName(record.message.schema, record.message.name)
        return ColumnName(table, column) in self.names

    def _known(self, known: Sequence[RelationRecord]) -> frozenset[int]:
        catalogs = _catalogs(known)
        found = {attnum for relation in catalogs for attnum in _attnums(relation, self.names)}
        for record in known:
            for layout in _layouts(record, catalogs) if self._names_any(record) else ():
                found |= self._named_attnums(record, layout)
        return frozenset(found)

    def _named_attnums(self, record: RelationRecord, layout: Sequence[int]) -> set[int]:
        named = zip(record.message.columns, layout, strict=True)
        return {attnum for column, attnum in named if self._is_named(record, column.name)}

    def _unclear(self, known: Sequence[RelationRecord]) -> list[RelationRecord]:
        """Return the records that have such columns, but whose attnums cannot be determined."""
        catalogs = _catalogs(known)
        return [one for one in known if self._names_any(one) and not any(_layouts(one, catalogs))]

    def _names_any(self, record: RelationRecord) -> bool:
        return any(self._is_named(record, column.name) for column in record.message.columns)


def new_places(record: RelationRecord, records: Sequence[RelationRecord], known: Collection[int]) -> set[int]:
    """Return the positions in a relation's message of columns whose attnums are, or may be, not among the
    known."""
    catalogs = _catalogs([*(one for one in records if one.publication_status is None), record])
    layouts = list(_layouts(record, catalogs))
    if not layouts:
        return set(range(len(record.message.columns)))
    return {n for layout in layouts for n, attnum in enumerate(layout) if attnum not in known}


def excluded(pipeline: Pipeline) -> frozenset[ColumnName]:
    """Return the columns whose values neither the changelog nor the lake keeps."""
    return frozenset(map(ColumnName.parse, pipeline.exclude_columns))


def _attnums(relation: Relation, names: frozenset[ColumnName]) -> frozenset[int]:
    columns = (*relation.columns, *relation.unpublished)
    return frozenset(c.attnum for c in columns if ColumnName(relation.table, c.name) in names)


def _without_defaults(relation: Relation, attnums: frozenset[int]) -> Relation:
    def bare(columns: Sequence[Column]) -> tuple[Column, ...]:
        return tuple(replace(c, missing=None) if c.attnum in attnums else c for c in columns)

    return replace(relation, columns=bare(relation.columns), unpublished=bare(relation.unpublished))


def _places(record: RelationRecord, known: Sequence[Relation], attnums: frozenset[int]) -> set[int]:
    """Return the positions in the message of the columns with these attnums; all positions if no layout is
    known."""
    layouts = list(_layouts(record, known))
    if not layouts:
        return set(range(len(record.message.columns)))
    return {n for layout in layouts for n, attnum in enumerate(layout) if attnum in attnums}


def _layouts(record: RelationRecord, known: Sequence[Relation]) -> list[list[int]]:
    """Return the lists of attnums that the message's columns can have: from a catalog with the same columns,
    and from matching each known catalog with the one that arrived with the message; otherwise all possible
    lists."""
    if record.same_columns and record.catalog is not None:
        return [[column.attnum for column in record.catalog.columns]]
    same = [one for one in known if replace(record, catalog=one).same_columns]
    found = [[column.attnum for column in one.columns] for one in same]
    if record.catalog is None:
        return found
    for relation in known:
        with suppress(UnclearLayoutError):
            found.append([place.attnum for place in place_columns(relation, record, record.catalog)])
    return found or possible_layouts(record.message.columns, record.catalog)


def _named(relation: Relation) -> dict[int, str]:
    """Return the names of the relation's columns, by attnum."""
    return {column.attnum: column.name for column in (*relation.columns, *relation.unpublished)}


def _catalogs(known: Sequence[RelationRecord]) -> list[Relation]:
    return [record.catalog for record in known if record.catalog is not None]


def _names(record: RelationRecord) -> list[str]:
    return [column.name for column in record.message.columns]
