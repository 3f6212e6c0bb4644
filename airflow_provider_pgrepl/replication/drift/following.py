"""The lake table's response to safe drift, and the relation that it then has. No side effects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from airflow_provider_pgrepl.errors import ConfigError, Remedy, TableError
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.drift.columns import (
    ColumnComparison,
    DriftFinding,
    is_of_other_type,
    type_change,
)
from airflow_provider_pgrepl.replication.drift.matching import MatchedColumn, highest_attnum, unknown_attnums
from airflow_provider_pgrepl.replication.postgres.names import show_identifier
from airflow_provider_pgrepl.replication.postgres.relation import Column, Relation
from airflow_provider_pgrepl.replication.settings.tables import TableOptions
from airflow_provider_pgrepl.replication.values import CHANGE_IT, lake_schema, option_problems, partitioning


@dataclass(frozen=True)
class SafeDrift:
    """A safe drift: the changes that are in effect for the rows after the received relation."""

    judge: ColumnComparison
    places: list[MatchedColumn]

    @property
    def changes(self) -> Iterator[str]:
        """Yield a sentence for each column that was dropped, retyped or added."""
        for column in self._dropped():
            yield f"column {show_identifier(column.name)} was dropped"
        for before, now in self.retyped():
            yield type_change(before, now)
        left_out = " and is left out" if self._leaves_out else ""
        for column in self._added():
            yield f"column {show_identifier(column.name)} was added{left_out}"

    def retyped(self) -> Iterator[tuple[Column, Column]]:
        """Yield the columns, before and now, whose type is another one in the next rows."""
        for place in self.places:
            if place.before is not None and is_of_other_type(place.before, self._column(place)):
                yield place.before, self._column(place)
        now = {column.attnum: column for column in self.judge.current.unpublished}
        for column in self.judge.recorded.unpublished:
            if column.attnum in now and is_of_other_type(column, now[column.attnum]):
                yield column, now[column.attnum]

    def _added(self) -> Iterator[Column]:
        yield from (place.column for place in self.places if place.before is None)
        known = {column.attnum for column in self.judge.recorded.unpublished}
        yield from (column for column in self.judge.current.unpublished if column.attnum not in known)

    def _dropped(self) -> Iterator[Column]:
        recorded = self.judge.recorded
        live = {place.attnum for place in self.places}
        live |= {column.attnum for column in self.judge.current.unpublished}
        for column in (*recorded.columns, *recorded.unpublished):
            if column.attnum not in live:
                yield column

    @property
    def _leaves_out(self) -> bool:
        return self.judge.options.policy.on_drift == "ignore"

    def _column(self, place: MatchedColumn) -> Column:
        """Return the column as the next rows have it: with the lake's name, and of the type that was sent."""
        before, now, sent = place.before, place.now, place.sent
        if before is None:
            return replace(place.column, is_key=sent.is_identity and place.column.is_key)
        if now is None or (now.type_oid, now.typmod) != (sent.type_oid, sent.typmod):
            return before
        name = before.name if self.judge.in_lake(before) else sent.name
        return replace(now, name=name, is_key=before.is_key)

    def relation(self, received: RelationRecord) -> Relation:
        """Return the relation of the lake table for the next rows; it equals the catalog's if nothing is
        different."""
        recorded, current = self.judge.recorded, self.judge.current
        columns = tuple(self._column(place) for place in self.places)
        dropped = (column for column in self._dropped() if self.judge.in_lake(column))
        live = {column.attnum for column in (*columns, *current.unpublished)}
        ignored = {attnum for attnum in recorded.ignored if attnum in live}
        if self._leaves_out:
            ignored |= {column.attnum for column in self._added()}
        ignored |= set(self._renamed_and_left_out())
        return replace(
            current,
            table=recorded.table,
            columns=columns,
            replica_identity=received.message.replica_identity,
            natts=self._natts(received, columns),
            dropped=tuple(sorted((*recorded.dropped, *dropped), key=lambda column: column.attnum)),
            ignored=tuple(sorted(ignored)),
        )

    def _renamed_and_left_out(self) -> Iterator[int]:
        """Yield the attnums of renamed columns that the lake leaves out by their earlier names, and from here
        on by attnum."""
        for place in self.places:
            before = place.before
            if before is not None and place.sent.name != before.name and not self.judge.in_lake(before):
                yield before.attnum

    def _natts(self, received: RelationRecord, columns: tuple[Column, ...]) -> int:
        """Return the highest attnum up to which every column is known.

        It stays below the attnums of columns that were added and dropped unseen: if the catalog is ahead of
        the stream, rows of these columns may still arrive.
        """
        recorded, current = self.judge.recorded, self.judge.current
        if received.same_columns and not unknown_attnums(recorded, current):
            return current.natts
        return max((highest_attnum(recorded), *(column.attnum for column in columns)))


def policy_findings(following: SafeDrift, received: RelationRecord) -> Iterator[DriftFinding]:
    """Yield the changes that the lake must not follow: because of the policy, or because a type was changed
    with USING."""
    if received.using:
        for before, now in following.retyped():
            yield DriftFinding(f"{type_change(before, now)} by an expression of its own (USING)")
    judge = following.judge
    if judge.options.policy.on_drift == "error":
        for change in following.changes:
            yield DriftFinding(change, Remedy.POLICY)


def lake_findings(recorded: Relation, relation: Relation, options: TableOptions) -> Iterator[DriftFinding]:
    """Yield the reasons why the lake cannot hold this relation, except problems that `recorded` already
    had."""
    try:
        partitioning(relation, options)
    except TableError as error:
        yield DriftFinding(f"{error.message}: {CHANGE_IT}")
        return
    try:
        lake_schema(relation, options)
    except (TableError, ConfigError) as error:
        yield DriftFinding(f"{error.message} ({error.hint})", Remedy.CHOICE)
        return
    known = set(option_problems(_with_dropped(recorded), options))
    for problem in option_problems(_with_dropped(relation), options):
        if problem not in known:
            yield DriftFinding(problem, Remedy.CHOICE)


def _with_dropped(relation: Relation) -> Relation:
    """Return the relation with its dropped columns as unpublished ones: the lake table still has them, so
    that options may name them."""
    return replace(relation, unpublished=(*relation.unpublished, *relation.dropped))
