"""Plans to read a table as of a point in time: a version of the lake table, and the changes to apply to
it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import DriftError, LakeError, LakeTableError
from airflow_provider_pgrepl.replication.changelog.gaps import first_gap
from airflow_provider_pgrepl.replication.changelog.layout import CHANGES, letters
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex, relations_uri
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoint, ConsistentPoints
from airflow_provider_pgrepl.replication.lake.delta.live_files import app_version
from airflow_provider_pgrepl.replication.lake.delta.table import (
    EXPORTED_APP,
    RELATION_APP,
    find_table,
    missing_table,
)
from airflow_provider_pgrepl.replication.lake.history.table import aligned, is_history
from airflow_provider_pgrepl.replication.lake.history.versions import ended_rows
from airflow_provider_pgrepl.replication.lake.merge.merge import unlike_columns
from airflow_provider_pgrepl.replication.lake.schema_evolution.timeline import (
    RelationTimeline,
    read_relations,
    relation_timeline,
)
from airflow_provider_pgrepl.replication.lake.schema_evolution.translation import evolved
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName, show_identifier
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.tables import TableOptions
from airflow_provider_pgrepl.replication.values import (
    held_options,
    lake_schema,
    stored_columns,
    typed_columns,
)

from .moment import ChangelogFinder, PointInTime, TableVersion
from .overlay import Overlay
from .verification import Unverified, find_unverified

_START = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Base:
    """A version of a lake table that has every transaction up to `lsn` and no later one.

    `sure`: True if the table is known to have been replicated from there up to the point in time. Otherwise
    the planner has to verify it.
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
        """Return the relation of the version, or None if the version or the index does not have it."""
        version = app_version(self.opened, RELATION_APP)
        record = None if version is None else index.find_version(version)
        return None if record is None else record.catalog

    def check_time(self, timestamp: datetime | None) -> None:
        """Raise LakeError if `timestamp` is before the table's snapshot was exported."""
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
    """Finds the base versions of tables for one point in time.

    `newest`: use the newest version of a table, which readers of the table see, even if a consistent point
    recorded an earlier version with the same transactions.
    """

    lake_root: str
    moment: PointInTime
    points: ConsistentPoints
    index: RelationIndex
    newest: bool = False

    @property
    def point(self) -> ConsistentPoint | None:
        """The newest kept consistent point at or before the point in time."""
        return self.points.at_or_before(self.moment.lsn, self.moment.epoch)

    def find(self, name: TableName) -> Base:
        """Return the base of a table. Raises LakeError if the table was not in the lake then, and names the
        first LSN at which it can be read."""
        newest, key, point = self._newest(name), str(name), self.point
        position = app_version(newest, self.moment.app)
        if (
            position is not None
            and _is_settled(newest)
            and (point.lsn if point else -1) < position <= self.moment.lsn
        ):
            return Base(name, newest, LSN(position), True)
        if (
            self.newest
            and point is not None
            and key in point.tables
            and position is not None
            and point.positions.get(key, position) <= position <= point.lsn
            and _is_settled(newest)
        ):
            # The point's version has every transaction up to the point, and so has any later one.
            return Base(name, newest, LSN(point.lsn), True)
        named = [kept for kept in self.points.all() if kept.epoch == self.moment.epoch and key in kept.tables]
        before = [kept for kept in named if kept.lsn <= self.moment.lsn]
        if not before:
            raise self._too_early(name, named, position)
        nearest = before[-1]
        uri, seen = newest.table_uri.rstrip("/"), nearest.positions.get(key)
        opened = TableVersion(name, uri, nearest.tables[key], self.moment.app, seen).open()
        base = Base(name, opened, LSN(nearest.lsn), nearest == point)
        if base.lsn < self.moment.lsn and base.exported_us != app_version(newest, EXPORTED_APP):
            # The table was copied again since. It may not have been replicated at all between the two copies.
            sure = base.sure and self._is_same_member(opened, newest)
            return Base(name, opened, base.lsn, sure)
        return base

    def _newest(self, name: TableName) -> DeltaTable:
        uri = f"{self.lake_root}/{name.path}"
        if (table := find_table(uri)) is not None:
            return table
        known = self.point.tables if self.point else ()
        if str(name) in known:
            raise missing_table(uri)
        held = ", ".join(sorted(known)) or "no table yet"
        raise LakeError(f"{name} is not in the lake", f"the lake holds: {held}; names are case-sensitive")

    def _too_early(self, name: TableName, named: list[ConsistentPoint], position: int | None) -> LakeError:
        later = [kept.lsn for kept in named] or ([position] if position is not None else [])
        asked = f"{self.moment.lsn} of epoch {self.moment.epoch}"
        if not later:
            return LakeError(
                f"{name} was not taken into the lake in epoch {self.moment.epoch}",
                f"give the epoch in which it was, or {errors.resnapshot(name)}",
            )
        return LakeError(
            f"{name} can be read from {LSN(min(later))} on only, {asked} is before that",
            "it was copied later, or consistent_point_retention_h of the pipeline is over: read at a later"
            " LSN",
        )

    def _is_same_member(self, before: DeltaTable, after: DeltaTable) -> bool:
        versions = app_version(before, RELATION_APP), app_version(after, RELATION_APP)
        found = [self.index.find_version(version) for version in versions if version is not None]
        members = {membership(record.catalog) for record in found if record is not None}
        return len(found) == len(versions) and len(members) == 1


def _is_settled(table: DeltaTable) -> bool:
    """Return True if the table has the relation that was effective at its position. It has a later one if it
    evolved before the changes of a transaction were applied."""
    relations = read_relations(table)
    return relations is None or relations[0] == relations[1]


def membership(relation: Relation | None) -> tuple[int, int, int] | None:
    """Return what identifies the table and its membership in the publication, None without a relation."""
    if relation is None:
        return None
    return relation.oid, relation.membership_oid, relation.membership_xmin


def no_relation(name: TableName) -> LakeError:
    """Return the error for a version whose relation is not known."""
    return LakeError(
        f"{name}: the lake table does not say which definition of the table it was made for",
        f"read it at a consistent point, or {errors.resnapshot(name)}",
    )


@dataclass(frozen=True)
class TablePlan:
    """A version of the lake table that has every transaction up to `lsn`, and the overlays to apply to it in
    order. Without overlays, the version is the result.

    `relation`: the effective one at the point in time. None if the version is the result and does not record
    its relation. `schema`: the columns of the result. `unverified`: DDL that may have come before the point
    in time and is not reflected in the result.
    """

    table: TableName
    version: TableVersion
    lsn: LSN
    relation: Relation | None
    schema: pa.Schema
    overlays: tuple[Overlay, ...] = ()
    unverified: Unverified | None = None

    def rows(self) -> pa.Table:
        """Return the table as of the point in time. Raises LakeError, LakeTableError, DriftError,
        ValueRangeError."""
        rows = self.version.read()
        for overlay in self.overlays:
            rows = overlay.lay_over(rows)
        return rows.select(self.schema.names)


class Planner:
    """Creates plans of tables for one point in time.

    `copied_with`: returns the settings with which a table was copied; None: the pipeline's, because only the
    state database has them. `newest` as in Bases.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        moment: PointInTime,
        points: ConsistentPoints,
        *,
        newest: bool = False,
        copied_with: Callable[[TableName], TableOptions] | None = None,
    ) -> None:
        index = RelationIndex(relations_uri(pipeline.lake_root))
        self._pipeline = pipeline
        self._settings = copied_with or pipeline.options
        self._moment = moment
        self._bases = Bases(pipeline.lake_root, moment, points, index, newest)
        self._kept = ChangelogFinder(moment, index)

    @property
    def lake_root(self) -> str:
        return self._pipeline.lake_root

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables that the nearest consistent point names, sorted."""
        point = self._bases.point
        return tuple(sorted(key for key in point.tables if not is_history(key))) if point else ()

    def plan(self, name: TableName) -> TablePlan:
        """Return the plan of a table.

        Raises LakeError for a table that cannot be read as of the point in time, with the LSNs at which it
        can be read. Raises DriftError if it was altered unsafely or recreated before.
        """
        base = self._bases.find(name)
        base.check_time(self._moment.timestamp)
        built = base.relation(self._kept.index)
        if base.lsn == self._moment.lsn and base.sure:
            schema = self._schema_of(base, built)
            return TablePlan(name, base.version, base.lsn, built, schema, unverified=self._unverified(built))
        self._check_kept(base)
        if built is None:
            raise no_relation(name)
        relation, overlays = self._overlays(base, built)
        self._check_successors(relation, base.lsn)
        if not base.sure and not self._is_member_later(relation):
            raise self._not_held(name)
        schema = overlays[-1].schema if overlays else self._schema_of(base, relation)
        unverified = self._unverified(relation)
        return TablePlan(name, base.version, base.lsn, relation, schema, overlays, unverified)

    def relation(self, name: TableName) -> Relation:
        """Return the relation of the table that was effective at the point in time. Raises what `plan`
        does."""
        plan = self.plan(name)
        if plan.relation is None:
            raise no_relation(name)
        return plan.relation

    def _schema_of(self, base: Base, relation: Relation | None) -> pa.Schema:
        """Return the version's columns in the order of the relation. In the lake table, a column that was
        added later is the last one."""
        held = pa.schema(base.opened.schema().to_arrow())
        if relation is None:
            return held
        options = self._settings(relation.table)
        attnums = {column.name: column.attnum for column, _ in stored_columns(relation, options)}
        # The bookkeeping columns come last, in their order.
        last = max(attnums.values(), default=0) + 1
        return pa.schema(sorted(held, key=lambda field: attnums.get(field.name, last)))

    def _options(self, base: Base, built: Relation) -> TableOptions:
        """Return the settings for the version, which may have been copied before today's were made."""
        held = pa.schema(base.opened.schema().to_arrow())
        return held_options(built, self._settings(built.table), held)

    def _check_columns(self, base: Base, built: Relation, options: TableOptions) -> None:
        unlike = unlike_columns(base.opened, lake_schema(built, options))
        if unlike:
            names = ", ".join(map(show_identifier, unlike))
            raise LakeError(
                f"{base.name} cannot be read as of {self._moment.lsn}: the pipeline file gives other columns"
                f" than its lake table has at {base.lsn}: {names}",
                "give the pipeline file with which it was copied, or read it at a consistent point; to apply"
                f" settings such as types and exclude_columns, {errors.resnapshot(base.name)}",
            )

    def _check_kept(self, base: Base) -> None:
        if base.lsn < self._moment.floor_lsn:
            raise LakeError(
                f"{base.name}: changes up to {self._moment.floor_lsn} are not kept any more, and the lake"
                f" table that is nearest to {self._moment.lsn} is at {base.lsn}",
                "read at a later LSN, or at a consistent point; changelog_retention_h of the pipeline says"
                " how long changes are kept",
            )

    def _overlays(self, base: Base, built: Relation) -> tuple[Relation, tuple[Overlay, ...]]:
        """Return the relation at the point in time, and the overlays up to it, without reading values of
        rows. Raises the errors that stop a table: DriftError, LakeError for a gap, LakeTableError for a
        TRUNCATE that the settings reject. Also raises LakeError if the version has other columns than the
        settings give it."""
        files = self._kept.files(built.oid, base.lsn, self._moment.lsn)
        rows = self._kept.rows(files, built.oid, base.lsn, self._moment.lsn)
        self._check_gaps(built.table, rows)
        options = self._options(base, built)
        timeline = relation_timeline(built, rows, partial(self._kept.find_record, built.oid), options)
        if timeline.stop:
            lsn, error = timeline.stop
            raise DriftError(
                f"{built.table} cannot be read as of {self._moment.lsn}: {error.message}, found at {lsn}",
                f"read it before {lsn}, or after it was resnapshotted",
            )
        self._check_truncates(built.table, rows, options)
        paths = tuple(file.path for file in files)
        overlays = tuple(self._spans(timeline, rows, base, options, paths))
        if overlays:
            self._check_columns(base, built, options)
        return timeline.relation, overlays

    def _spans(
        self,
        timeline: RelationTimeline,
        rows: pa.Table,
        base: Base,
        options: TableOptions,
        paths: tuple[str, ...],
    ) -> Iterator[Overlay]:
        start, above, before = 0, base.lsn, timeline.spans[0].begins
        for span in timeline.spans:
            heads = rows.slice(start, len(span.rows))
            start += len(heads)
            ops = Counter(heads["op"].to_pylist())
            overlay = Overlay(
                changelog=self._kept.uri,
                paths=paths,
                relation=span.begins,
                options=options,
                above=above,
                upto=LSN(heads["commit_lsn"][-1].as_py()) if len(heads) else above,
                before=before,
                first=span.before,
                received=self._received(heads) if span.before else (),
                count=sum(ops[op] for op in CHANGES),
                truncated="T" in ops,
            )
            above, before = overlay.upto, span.relation
            if overlay.count or overlay.evolves:
                yield overlay

    def _received(self, heads: pa.Table) -> tuple[RelationRecord, ...]:
        pairs = {(row["relation_id"], row["relation_version"]) for row in heads.to_pylist()}
        found = (self._kept.find_record(*pair) for pair in sorted(pairs) if pair[1])
        return tuple(record for record in found if record is not None)

    def _check_gaps(self, table: TableName, rows: pa.Table) -> None:
        gap = first_gap(rows, table)
        if gap is not None:
            lsn, error = gap
            raise LakeError(
                f"{table} cannot be read as of {self._moment.lsn}: {error.message}",
                f"read it before {lsn}, or after it was resnapshotted",
            )

    def _check_truncates(self, table: TableName, rows: pa.Table, options: TableOptions) -> None:
        truncates = rows.filter(pc.equal(rows["op"], "T"))
        if truncates.num_rows and options.policy.truncate == "error":
            first = LSN(truncates["commit_lsn"][0].as_py())
            raise LakeTableError(
                f"{table} was truncated at {first}, and its policy is that TRUNCATE stops it",
                f"read it before {first}, or after it was resnapshotted",
            )

    def _check_successors(self, relation: Relation, above: LSN) -> None:
        """Raise DriftError if another table has changes up to the point in time while it has the name."""
        upto = self._moment.lsn
        others: defaultdict[int, list[int]] = defaultdict(list)
        for record in self._kept.records:
            catalog = record.catalog
            if catalog is not None and catalog.table == relation.table and catalog.oid != relation.oid:
                others[catalog.oid].append(record.version)
        for oid, versions in others.items():
            rows = self._kept.rows(self._kept.files(oid, above, upto), oid, above, upto)
            # A table that had the name before, and was renamed, may go on under its other name.
            if pc.any(pc.is_in(rows["relation_version"], pa.array(versions, pa.int64()))).as_py():
                raise DriftError(
                    f"{relation.table} was dropped and another made under its name before {upto}",
                    errors.resnapshot(relation.table),
                )

    def _is_member_later(self, relation: Relation) -> bool:
        """Return True if the first later change shows the same membership in the publication: the table never
        left it."""
        lsn = self._moment.lsn
        rows = self._kept.rows(self._kept.files(relation.oid, lsn), relation.oid, lsn)
        rows = rows.filter(pc.is_in(rows["op"], letters(CHANGES)))
        if rows.num_rows == 0:
            return False
        record = self._kept.find_record(relation.oid, rows["relation_version"][0].as_py())
        return record is not None and membership(record.catalog) == membership(relation)

    def _unverified(self, relation: Relation | None) -> Unverified | None:
        return None if relation is None else find_unverified(relation, self._kept, self._pipeline)

    def _not_held(self, name: TableName) -> LakeError:
        return LakeError(
            f"the lake does not hold {name} as of {self._moment.lsn}",
            "it is paused, errored, or no longer replicated, and whether all of its changes were received is"
            " not known; `pgrepl status` says which",
        )


def ended_since(plan: TablePlan, schema: pa.Schema, epoch: Epoch) -> pa.Table:
    """Return the row versions that the changes of a plan end, in the columns of the history.

    If the table evolved before or between these changes, all of its rows are read into memory. Raises
    LakeError, LakeTableError, DriftError, ValueRangeError.
    """
    pieces: list[pa.Table] = []
    held: DeltaTable | pa.Table = plan.version.open()
    for number, overlay in enumerate(plan.overlays, start=1):
        if overlay.evolves:
            pieces = [evolved_closed(piece, [overlay]) for piece in pieces]
            held = overlay.evolved(plan.version.read() if number == 1 else held)
        if overlay.count:
            rows = ended_rows(
                held, overlay.changes(), overlay.relation, overlay.options, epoch, overlay.above
            )
            pieces.extend(rows)
        if number < len(plan.overlays):
            held = overlay.lay_over(held if isinstance(held, pa.Table) else plan.version.read())
    return pa.concat_tables([schema.empty_table(), *(aligned(piece, schema) for piece in pieces)])


def _evolved_ended(rows: pa.Table, overlay: Overlay) -> pa.Table:
    """Return row versions that ended before `overlay.relation` became effective, in its types. Columns that
    it added are null, whatever their default."""
    before = overlay.before
    for typed in typed_columns(before, overlay.options):
        # A history that began after a column was dropped lacks it.
        if typed.name not in rows.column_names:
            rows = rows.append_column(typed.name, pa.nulls(len(rows), typed.lake_type))
    held = {column.attnum for column in (*before.columns, *before.unpublished, *before.dropped)}
    after = evolved(rows, before, overlay.relation, overlay.options)
    for number, typed in enumerate(typed_columns(overlay.relation, overlay.options)):
        if typed.column.attnum not in held:
            known = typed.name in rows.column_names
            values = rows[typed.name] if known else pa.nulls(len(rows), typed.lake_type)
            after = after.set_column(number, typed.name, values)
    return after


def evolved_closed(rows: pa.Table, overlays: Iterable[Overlay]) -> pa.Table:
    """Return what `_evolved_ended` does, for each overlay that evolves the table, in order."""
    for overlay in overlays:
        if overlay.evolves:
            rows = _evolved_ended(rows, overlay)
    return rows
