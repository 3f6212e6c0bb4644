"""What it takes to show a table as of a moment: a version of the lake table, and the changes since."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from airflow_provider_pgrepl.errors import DriftError, LakeError, LakeTableError
from airflow_provider_pgrepl.replication.changelog import reader
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex, relations_uri
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.lake.history.place import is_history
from airflow_provider_pgrepl.replication.lake.points import ConsistentPoint, Points
from airflow_provider_pgrepl.replication.lake.reading.moment import Moment
from airflow_provider_pgrepl.replication.lake.reading.overlay import OverlayJob
from airflow_provider_pgrepl.replication.lake.relations_in_force import find_first_drift
from airflow_provider_pgrepl.replication.lake.table import (
    EXPORTED_APP,
    RELATION_APP,
    RESNAPSHOT_HINT,
    open_table,
)
from airflow_provider_pgrepl.replication.lsn import LSN
from airflow_provider_pgrepl.replication.relation import Relation, TableName

_CHANGES = ["I", "U", "D", "T"]
_START = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class TablePlan:
    """Version `version` of the lake table at `uri`, which holds all up to `lsn`, and what is to be laid over
    it; None: it is all.

    `changes`: how many rows of the changelog that is; `truncated`: whether a TRUNCATE is among them.
    """

    table: TableName
    uri: str
    version: int
    lsn: LSN
    overlay: OverlayJob | None = None
    changes: int = 0
    truncated: bool = False


@dataclass(frozen=True)
class _Base:
    """A version of a lake table: all up to `lsn` is in it, and nothing later.

    `sure`: the table was replicated from there to the moment; otherwise that must be shown.
    """

    opened: DeltaTable
    lsn: LSN
    sure: bool

    @property
    def exported_us(self) -> int | None:
        found: int | None = self.opened.transaction_version(EXPORTED_APP)
        return found


class Planner:
    """Finds plans of tables for one moment."""

    def __init__(self, pipeline: Pipeline, moment: Moment, points: Points) -> None:
        self._pipeline = pipeline
        self._moment = moment
        self._points = points
        self._index = RelationIndex(relations_uri(pipeline.lake_root))

    @property
    def lake_root(self) -> str:
        return self._pipeline.lake_root

    @property
    def point(self) -> ConsistentPoint | None:
        """The newest kept point at or before the moment."""
        return self._points.at_or_before(self._moment.lsn, self._moment.epoch)

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables that were replicated at that point, in order."""
        point = self.point
        return tuple(sorted(key for key in point.tables if not is_history(key))) if point else ()

    def plan(self, name: TableName) -> TablePlan:
        """Raises LakeError for a table that cannot be shown as of the moment, saying since or until when it
        can; DriftError when it was altered or made anew before."""
        uri = f"{self._pipeline.lake_root}/{name.path}"
        base = self._find_base(name, uri)
        self._check_time(name, base)
        version = int(base.opened.version())
        if base.lsn == self._moment.lsn and base.sure:
            return TablePlan(name, uri, version, base.lsn)
        if base.lsn < self._moment.floor_lsn:
            raise LakeError(
                f"{name}: changes up to {self._moment.floor_lsn} are not kept any more, and the lake table"
                f" that is nearest to {self._moment.lsn} is at {base.lsn}",
                "read at a later LSN, or at a consistent point; changelog_retention_h of the pipeline says"
                " how long changes are kept",
            )
        relation = self._relation_of(name, base.opened)
        job = self._job(relation, base.lsn)
        ops = Counter(self._checked_ops(relation, job) if job else ())
        self._check_successors(relation, base.lsn)
        if not base.sure and not self._is_member_later(relation):
            raise self._not_held(name)
        changes = ops.total() - ops["R"]
        return TablePlan(name, uri, version, base.lsn, job if changes else None, changes, "T" in ops)

    def relation(self, name: TableName) -> Relation:
        """The table's definition by which its lake table was copied. Raises LakeError."""
        base = self._find_base(name, f"{self._pipeline.lake_root}/{name.path}")
        return self._relation_of(name, base.opened)

    def _find_base(self, name: TableName, uri: str) -> _Base:
        point, key = self.point, str(name)
        newest = self._open_newest(name, uri)
        position = newest.transaction_version(self._moment.app)
        if position is not None and (point.lsn if point else -1) < position <= self._moment.lsn:
            return _Base(newest, LSN(position), True)
        named = [
            kept for kept in self._points.all() if kept.epoch == self._moment.epoch and key in kept.tables
        ]
        before = [kept for kept in named if kept.lsn <= self._moment.lsn]
        if not before:
            raise self._too_early(name, named, position)
        nearest = before[-1]
        opened = _open(uri, name, nearest.tables[key])
        base = _Base(opened, LSN(nearest.lsn), nearest == point)
        if base.lsn < self._moment.lsn and base.exported_us != newest.transaction_version(EXPORTED_APP):
            # Taken anew meanwhile: between the two it may not have been replicated at all.
            sure = base.sure and self._is_same_member(opened, newest)
            return _Base(opened, base.lsn, sure)
        return base

    def _open_newest(self, name: TableName, uri: str) -> DeltaTable:
        try:
            return open_table(uri)
        except LakeTableError:
            held = ", ".join(sorted(self.point.tables)) if self.point else "no table yet"
            raise LakeError(
                f"{name} is not in the lake", f"the lake holds: {held}; names are case-sensitive"
            ) from None

    def _too_early(self, name: TableName, named: list[ConsistentPoint], position: int | None) -> LakeError:
        later = [kept.lsn for kept in named] or ([position] if position is not None else [])
        asked = f"{self._moment.lsn} of epoch {self._moment.epoch}"
        if not later:
            return LakeError(
                f"{name} was not taken into the lake in epoch {self._moment.epoch}",
                "give the epoch in which it was, or take it anew: run the snapshot app with --tables",
            )
        return LakeError(
            f"{name} can be read from {LSN(min(later))} on only, {asked} is before that",
            "it was copied later, or points_keep_h of the pipeline is over: read at a later LSN",
        )

    def _check_time(self, name: TableName, base: _Base) -> None:
        if self._moment.timestamp is None or base.exported_us is None:
            return
        exported = _START + timedelta(microseconds=base.exported_us)
        if self._moment.timestamp < exported:
            raise LakeError(
                f"{name} was copied at {exported.isoformat()}, {self._moment.timestamp.isoformat()} is before"
                " that",
                "pass a later time",
            )

    def _relation_of(self, name: TableName, opened: DeltaTable) -> Relation:
        version = opened.transaction_version(RELATION_APP)
        record = None if version is None else self._index.find_version(version)
        if record is None or record.catalog is None:
            raise LakeError(
                f"{name}: the lake table does not say which definition of the table it was copied by",
                f"read it at a consistent point, or {RESNAPSHOT_HINT}",
            )
        return record.catalog

    def _is_same_member(self, before: DeltaTable, after: DeltaTable) -> bool:
        versions = before.transaction_version(RELATION_APP), after.transaction_version(RELATION_APP)
        found = [self._index.find_version(version) for version in versions if version is not None]
        members = {_member(record.catalog) for record in found if record is not None}
        return len(found) == len(versions) and len(members) == 1

    def _job(self, relation: Relation, above: LSN) -> OverlayJob | None:
        files = [
            file.path
            for file in reader.live_files(self._moment.changelog, self._moment.epoch, above)
            if file.may_hold(relation.oid) and file.min_lsn <= self._moment.lsn
        ]
        if not files:
            return None
        return OverlayJob(
            self._moment.changelog.table_uri.rstrip("/"),
            tuple(files),
            relation,
            self._pipeline,
            above,
            self._moment.lsn,
        )

    def _checked_ops(self, relation: Relation, job: OverlayJob) -> list[str]:
        """The ops of the changes; raises what would have stopped the table among them. Reads no values."""
        rows = job.read(["commit_lsn", "ordinal", "relation_id", "relation_version", "op"])
        drift = find_first_drift(relation, rows, lambda version: self._find_record(relation, version))
        if drift:
            raise DriftError(
                f"{relation.table} cannot be read as of {self._moment.lsn}: {drift[1]}, found at {drift[0]}",
                f"read it before {drift[0]}, or after it was taken anew (snapshot app with --tables)",
            )
        truncates = rows.filter(pc.equal(rows["op"], "T"))
        if truncates.num_rows and self._pipeline.policy(relation.table).truncate == "error":
            first = LSN(truncates["commit_lsn"][0].as_py())
            raise LakeTableError(
                f"{relation.table} was truncated at {first}, and its policy is that TRUNCATE stops it",
                f"read it before {first}, or after it was taken anew (snapshot app with --tables)",
            )
        ops: list[str] = rows["op"].to_pylist()
        return ops

    def _check_successors(self, relation: Relation, above: LSN) -> None:
        """A table of the same name and another oid, with changes up to the moment, took its place."""
        for record in self._index.all():
            other = record.catalog
            if other is None or other.table != relation.table or other.oid == relation.oid:
                continue
            job = self._job(other, above)
            if job is not None and job.read(["commit_lsn", "ordinal", "relation_id"]).num_rows:
                raise DriftError(
                    f"{relation.table} was dropped and another made under its name before {self._moment.lsn}",
                    RESNAPSHOT_HINT,
                )

    def _is_member_later(self, relation: Relation) -> bool:
        """Whether a later change shows that the table never left the publication."""
        files = [
            file.path
            for file in reader.live_files(self._moment.changelog, self._moment.epoch, self._moment.lsn)
            if file.may_hold(relation.oid)
        ]
        filesystem, root = pafs.FileSystem.from_uri(self._moment.changelog.table_uri.rstrip("/"))
        columns = ["commit_lsn", "ordinal", "relation_id", "relation_version", "op"]
        rows = reader.read_rows(filesystem, root, files, relation.oid, self._moment.lsn, columns)
        rows = rows.filter(pc.is_in(rows["op"], pa.array(_CHANGES)))
        if rows.num_rows == 0:
            return False
        record = self._find_record(relation, rows["relation_version"][0].as_py())
        return record is not None and _member(record.catalog) == _member(relation)

    def _find_record(self, relation: Relation, version: int) -> RelationRecord | None:
        found = self._index.find(relation.oid, version)
        return found or reader.find_relation_record(
            self._moment.changelog.table_uri.rstrip("/"), relation.oid, version
        )

    def _not_held(self, name: TableName) -> LakeError:
        return LakeError(
            f"the lake does not hold {name} as of {self._moment.lsn}",
            "it is paused, in error, or no longer replicated, and whether all of its changes were received is"
            " not known; `python -m airflow_provider_pgrepl status` says which",
        )


def _member(relation: Relation | None) -> tuple[int, int, int] | None:
    if relation is None:
        return None
    return relation.oid, relation.membership_oid, relation.membership_xmin


def _open(uri: str, name: TableName, version: int) -> DeltaTable:
    try:
        return DeltaTable(uri, version=version)
    except (DeltaError, TableNotFoundError, OSError):
        raise unreadable(name, version) from None


def unreadable(name: TableName | str, version: int) -> LakeError:
    """A version that a point names and nobody can read any more."""
    return LakeError(
        f"version {version} of {name} cannot be read any more, or the table is gone",
        "read at a newer consistent point; longer reads need a longer points_keep_all_h",
    )
