"""Base: the version of a lake table that is nearest before a moment."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from deltalake import DeltaTable

from airflow_provider_pgrepl import hints
from airflow_provider_pgrepl.errors import LakeError, LakeTableError
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex
from airflow_provider_pgrepl.replication.lake.consistent_points import Points
from airflow_provider_pgrepl.replication.lake.delta.live_files import app_version
from airflow_provider_pgrepl.replication.lake.delta.table import EXPORTED_APP, RELATION_APP, open_table
from airflow_provider_pgrepl.replication.lake.point_files import ConsistentPoint
from airflow_provider_pgrepl.replication.lake.schema_evolution.timeline import read_relations
from airflow_provider_pgrepl.replication.lake.time_travel.moment import Moment
from airflow_provider_pgrepl.replication.lake.time_travel.table_version import TableVersion
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation

_START = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Base:
    """A version of a lake table: all up to `lsn` is in it, and nothing later.

    `sure`: the table was replicated from there to the moment; otherwise that must be shown.
    """

    name: TableName
    opened: DeltaTable
    lsn: LSN
    sure: bool

    @property
    def version(self) -> TableVersion:
        return TableVersion(self.name, self.opened.table_uri.rstrip("/"), int(self.opened.version()))

    @property
    def exported_us(self) -> int | None:
        found: int | None = app_version(self.opened, EXPORTED_APP)
        return found

    def relation(self, index: RelationIndex) -> Relation | None:
        """What the version was built for; None when it does not say."""
        version = app_version(self.opened, RELATION_APP)
        record = None if version is None else index.find_version(version)
        return None if record is None else record.catalog

    def check_time(self, timestamp: datetime | None) -> None:
        """Raises LakeError for a time before the copy."""
        if timestamp is None or self.exported_us is None:
            return
        exported = _START + timedelta(microseconds=self.exported_us)
        if timestamp < exported:
            raise LakeError(
                f"{self.name} was copied at {exported.isoformat()}, {timestamp.isoformat()} is before that",
                "pass a later time",
            )


@dataclass(frozen=True)
class Bases:
    """Finds the bases of tables for one moment."""

    lake_root: str
    moment: Moment
    points: Points
    index: RelationIndex

    @property
    def point(self) -> ConsistentPoint | None:
        """The newest kept point at or before the moment."""
        return self.points.at_or_before(self.moment.lsn, self.moment.epoch)

    def find(self, name: TableName) -> Base:
        """Raises LakeError for a table that was not in the lake then, saying from when on it is."""
        newest, key, point = self._newest(name), str(name), self.point
        position = app_version(newest, self.moment.app)
        if (
            position is not None
            and _is_settled(newest)
            and (point.lsn if point else -1) < position <= self.moment.lsn
        ):
            return Base(name, newest, LSN(position), True)
        named = [kept for kept in self.points.all() if kept.epoch == self.moment.epoch and key in kept.tables]
        before = [kept for kept in named if kept.lsn <= self.moment.lsn]
        if not before:
            raise self._too_early(name, named, position)
        nearest = before[-1]
        uri, seen = newest.table_uri.rstrip("/"), nearest.positions.get(key)
        opened = TableVersion(name, uri, nearest.tables[key], self.moment.app, seen).open()
        base = Base(name, opened, LSN(nearest.lsn), nearest == point)
        if base.lsn < self.moment.lsn and base.exported_us != app_version(newest, EXPORTED_APP):
            # Taken anew meanwhile: between the two it may not have been replicated at all.
            sure = base.sure and self._is_same_member(opened, newest)
            return Base(name, opened, base.lsn, sure)
        return base

    def _newest(self, name: TableName) -> DeltaTable:
        try:
            return open_table(f"{self.lake_root}/{name.path}")
        except LakeTableError:
            held = ", ".join(sorted(self.point.tables)) if self.point else "no table yet"
            raise LakeError(
                f"{name} is not in the lake", f"the lake holds: {held}; names are case-sensitive"
            ) from None

    def _too_early(self, name: TableName, named: list[ConsistentPoint], position: int | None) -> LakeError:
        later = [kept.lsn for kept in named] or ([position] if position is not None else [])
        asked = f"{self.moment.lsn} of epoch {self.moment.epoch}"
        if not later:
            return LakeError(
                f"{name} was not taken into the lake in epoch {self.moment.epoch}",
                f"give the epoch in which it was, or {hints.resnapshot(name)}",
            )
        return LakeError(
            f"{name} can be read from {LSN(min(later))} on only, {asked} is before that",
            "it was copied later, or points_keep_h of the pipeline is over: read at a later LSN",
        )

    def _is_same_member(self, before: DeltaTable, after: DeltaTable) -> bool:
        versions = app_version(before, RELATION_APP), app_version(after, RELATION_APP)
        found = [self.index.find_version(version) for version in versions if version is not None]
        members = {membership(record.catalog) for record in found if record is not None}
        return len(found) == len(versions) and len(members) == 1


def _is_settled(table: DeltaTable) -> bool:
    """Whether the table is for the relation that was effective at its position, and not for a later one, for
    which it has evolved before the changes were applied."""
    relations = read_relations(table)
    return relations is None or relations[0] == relations[1]


def membership(relation: Relation | None) -> tuple[int, int, int] | None:
    """Which table it is, and which place in the publication it has."""
    if relation is None:
        return None
    return relation.oid, relation.membership_oid, relation.membership_xmin


def no_relation(name: TableName) -> LakeError:
    """A version that does not say what it was built for."""
    return LakeError(
        f"{name}: the lake table does not say which definition of the table it was made for",
        f"read it at a consistent point, or {hints.resnapshot(name)}",
    )
