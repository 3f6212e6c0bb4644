"""Which columns of the stream are hidden: those that a setting names, whatever their names are now. Pure.

A publication could leave them out itself, by a list of columns. But then the server refuses to drop or retype
any other column of the table, and sends no column that is added.

Which column of the catalog each column of a Relation message is.
The message says names and types, in the order of attnums, of the moment at which it was sent; the catalog was
read then or later. Where more than one story explains both, none is believed.
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
"""More columns that went since are not tried in all ways."""
Records = Callable[[int], Sequence[RelationRecord]]
"""What stream and catalog ever said of a relation, by its oid."""


class UnclearLayoutError(Exception):
    """Message and catalog cannot be brought together for sure; the text says why."""


@dataclass(frozen=True)
class MatchedColumn:
    """One column of the message. `before`: as the lake has it; `now`: as the catalog has it."""

    sent: WireColumn
    before: Column | None
    now: Column | None

    @property
    def column(self) -> Column:
        """As the lake has it, or is to have it."""
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
    """The message's columns, in its order. Raises UnclearLayoutError."""
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
            f"columns were dropped or added while the stream was behind, and which of them {names} was then"
            " cannot be told"
        )
    (story,) = stories
    _refuse_holes(recorded, current, [p.now for p in story if p.before is None and p.now is not None])
    for place in story:
        if place.now is None and unknown_attnums(recorded, current):
            raise UnclearLayoutError(f"column {place.shown} may have been dropped and added again")
    return story


def possible_layouts(sent: Sequence[WireColumn], later: Relation) -> list[list[int]]:
    """All attnums that columns of a message can have had, by a catalog that was read then or later; empty
    where these are too many.

    A column that is there now was there as soon as its attnum was given; of one that is not, nobody knows
    when it went.
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
        # Types say nothing: they may have been altered since.
        found += [sorted((*stayed, *some)) for some in combinations(gone, still_there)]
    return found


def _is_open(place: MatchedColumn, stories: list[list[MatchedColumn]]) -> bool:
    return any(place not in story for story in stories)


def _stories(
    recorded: Relation, current: Relation, sent: Sequence[WireColumn]
) -> Iterator[list[MatchedColumn]]:
    """All ways in which columns that stayed, some of those that went since, and the first of those that came
    can be what was sent. Columns that stayed were there in any case."""
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
    """Names say less than types: a column may have had another name for a while."""
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
    """An added column before which attnums are missing: another may have had its name. Raises
    UnclearLayoutError."""
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
    """Attnums given since the table was recorded, of columns that are no longer there."""
    known = {
        column.attnum
        for relation in (recorded, current)
        for column in (*relation.columns, *relation.unpublished, *relation.dropped)
    }
    given = range(highest_attnum(recorded) + 1, highest_attnum(current) + 1)
    return [attnum for attnum in given if attnum not in known]


def highest_attnum(relation: Relation) -> int:
    """The highest attnum that the table is known to have given."""
    columns = (*relation.columns, *relation.unpublished, *relation.dropped)
    return relation.natts or max((column.attnum for column in columns), default=0)


def without_excluded_defaults(relation: Relation, pipeline: Pipeline) -> Relation:
    """The relation without what older rows have in columns that are excluded."""
    names = excluded(pipeline)
    return _without_defaults(relation, _attnums(relation, names)) if names else relation


@dataclass(frozen=True)
class HiddenColumns:
    """Says it of each relation that is received.

    A column is known by its attnum once it had one of the `names`, in the stream or in the catalog, which may
    have been asked when it had another already. A table is known by its oid: its columns of these names count
    whatever it is called now. Where the attnums of the stream's columns cannot be determined, more are
    hidden than need be: a table whose lake has one of those stops.
    """

    names: frozenset[ColumnName]
    records: Records

    def mark(self, record: RelationRecord) -> RelationRecord:
        """The record with the columns that are not kept, and nothing of their values."""
        if not self.names:
            return record
        catalog = record.catalog and _without_defaults(record.catalog, self.attnums(record.catalog))
        return replace(record, catalog=catalog, hidden=tuple(sorted(self.places(record))))

    def places(self, record: RelationRecord) -> set[int]:
        """Where in the relation's message they are."""
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
        """Those of a relation of the catalog, by all that is known of it."""
        known = [one for one in self.records(relation.oid) if one.standing is None]
        mine = self._with_earlier_tables([*known, RelationRecord.of_catalog(relation)])
        if mine._unclear(known):
            return frozenset(c.attnum for c in (*relation.columns, *relation.unpublished))
        return mine._known(known) | _attnums(relation, mine.names)

    def bound(self, relation: Relation) -> frozenset[int]:
        """The attnums of a relation of the catalog that had, or may have had, one of the names.

        Where the layout of a message is not certain, a column that had the same other name in every catalog
        does not count: else a table could never be copied again once a column of it was dropped and added.
        """
        known = [one for one in self.records(relation.oid) if one.standing is None]
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
        """What the catalog says, without what older rows have in columns that are not kept."""
        if relation is None or not self.names:
            return relation
        return _without_defaults(relation, self.attnums(relation))

    def _with_earlier_tables(self, known: Sequence[RelationRecord]) -> HiddenColumns:
        """The names as they apply to one relation, under every name that it had."""
        tables = set[TableName]().union(*(one.names for one in known))
        columns = {named.name for named in self.names if named.table in tables}
        return replace(self, names=frozenset(ColumnName(table, c) for table in tables for c in columns))

    def _received(self, record: RelationRecord) -> list[RelationRecord]:
        return [*(one for one in self.records(record.message.oid) if one.standing is None), record]

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
        """Those that have such columns, of which nothing tells their attnums."""
        catalogs = _catalogs(known)
        return [one for one in known if self._names_any(one) and not any(_layouts(one, catalogs))]

    def _names_any(self, record: RelationRecord) -> bool:
        return any(self._is_named(record, column.name) for column in record.message.columns)


def new_places(record: RelationRecord, records: Sequence[RelationRecord], known: Collection[int]) -> set[int]:
    """Return where in a relation's message columns are, or may be, whose attnums are not among the known."""
    catalogs = _catalogs([*(one for one in records if one.standing is None), record])
    layouts = list(_layouts(record, catalogs))
    if not layouts:
        return set(range(len(record.message.columns)))
    return {n for layout in layouts for n, attnum in enumerate(layout) if attnum not in known}


def excluded(pipeline: Pipeline) -> frozenset[ColumnName]:
    """Those whose values neither changelog nor lake keep."""
    return frozenset(map(ColumnName.parse, pipeline.exclude_columns))


def _attnums(relation: Relation, names: frozenset[ColumnName]) -> frozenset[int]:
    columns = (*relation.columns, *relation.unpublished)
    return frozenset(c.attnum for c in columns if ColumnName(relation.table, c.name) in names)


def _without_defaults(relation: Relation, attnums: frozenset[int]) -> Relation:
    def bare(columns: Sequence[Column]) -> tuple[Column, ...]:
        return tuple(replace(c, missing=None) if c.attnum in attnums else c for c in columns)

    return replace(relation, columns=bare(relation.columns), unpublished=bare(relation.unpublished))


def _places(record: RelationRecord, known: Sequence[Relation], attnums: frozenset[int]) -> set[int]:
    """Where these columns may be among those of the message; everywhere, when nothing tells."""
    layouts = list(_layouts(record, known))
    if not layouts:
        return set(range(len(record.message.columns)))
    return {n for layout in layouts for n, attnum in enumerate(layout) if attnum in attnums}


def _layouts(record: RelationRecord, known: Sequence[Relation]) -> list[list[int]]:
    """The attnums that the message's columns can have: as a catalog of those very columns says, or as what is
    known can be brought together with the catalog that came with the message; else all that there can be."""
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
    """The names of its columns, by attnum."""
    return {column.attnum: column.name for column in (*relation.columns, *relation.unpublished)}


def _catalogs(known: Sequence[RelationRecord]) -> list[Relation]:
    return [record.catalog for record in known if record.catalog is not None]


def _names(record: RelationRecord) -> list[str]:
    return [column.name for column in record.message.columns]
