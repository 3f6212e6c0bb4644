"""Which column of the catalog each column of a Relation message is. Pure.

The message says names and types, in the order of attnums, of the moment at which it was sent; the catalog was
read then or later. Where more than one story explains both, none is believed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.pgoutput.messages import WireColumn
from airflow_provider_pgrepl.replication.postgres.names import show_identifier
from airflow_provider_pgrepl.replication.postgres.relation import Column, Relation

_MOST_GONE = 8
"""More columns that went since are not tried in all ways."""


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
