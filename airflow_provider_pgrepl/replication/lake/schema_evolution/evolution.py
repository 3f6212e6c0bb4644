"""Evolution of a lake table and its history from one relation to the next, by metadata alone if possible.

The commits to both are fenced as all commits of the table, and keep the position. The history evolves first.
Its columns show whether it has evolved; for the table, RELATION_APP does. So after an interruption in
between, the evolution can be repeated. Older versions of a table keep their columns and types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, Field, Schema

from airflow_provider_pgrepl.errors import LakeChangedError, LakeTableError
from airflow_provider_pgrepl.replication.changelog.layout import CHANGES, STATUS_ORDINAL, letters
from airflow_provider_pgrepl.replication.delta.log import committing
from airflow_provider_pgrepl.replication.lake.delta.commit import (
    allow_timestamp_without_tz,
    commit_nothing,
    commit_properties,
    fenced,
    replace_files,
)
from airflow_provider_pgrepl.replication.lake.delta.parquet_writer import WrittenFile, data_files
from airflow_provider_pgrepl.replication.lake.delta.table import BEFORE_APP, RELATION_APP, read_position
from airflow_provider_pgrepl.replication.lake.files.compaction import compact, withdraw_vectors
from airflow_provider_pgrepl.replication.lake.files.row_search import FileRows
from airflow_provider_pgrepl.replication.lake.history.apply import apply_with_history
from airflow_provider_pgrepl.replication.lake.history.table import aligned, history_path, history_schema
from airflow_provider_pgrepl.replication.lake.merge.large_transactions import LargeChanges
from airflow_provider_pgrepl.replication.lake.merge.merge import Applied, apply_changes
from airflow_provider_pgrepl.replication.lake.merge.slice_commit import SliceCommit
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.tables import TableOptions
from airflow_provider_pgrepl.replication.values import lake_schema, typed_columns

from .timeline import RelationSpan, RelationTimeline, read_relations
from .translation import evolved

_KIND = "evolution"

Convert = Callable[[pa.Table], pa.Table]


@dataclass(frozen=True)
class Evolution:
    """One safe change of a table's relation, to apply to its lake table."""

    before: Relation
    after: Relation
    options: TableOptions
    lake_root: str
    app: str

    def evolve(self, table: DeltaTable, history: DeltaTable | None) -> None:
        """Evolve the history, and then the table, to the relation `after`. Moves both handles.

        The position does not change. Raises FencedError, LakeError, LakeTableError; DriftError and
        ValueRangeError for values that cannot be converted.
        """
        if history is not None:
            self._evolve_history(history)
        self._evolve_table(table)

    def _evolve_table(self, table: DeltaTable) -> None:
        held, wanted = _held(table), lake_schema(self.after, self.options)
        schema = _joined(held, wanted)
        # Like the position, the relation of the first changes after it stays the same.
        versions = read_relations(table)
        first = self.before.version if versions is None else versions[1]
        marks = {RELATION_APP: self.after.version, BEFORE_APP: first}
        if self._needs_rewriting(held, schema):
            convert = lambda rows: evolved(rows, self.before, self.after, self.options)  # noqa: E731
            place = _Place(table, self.lake_root, self.after.table.path, self.app)
            place.rewrite(schema, convert, marks)
        elif len(schema) > len(held):
            _Place(table, self.lake_root, self.after.table.path, self.app).add(held, schema, marks)

    def _needs_rewriting(self, held: pa.Schema, schema: pa.Schema) -> bool:
        if _is_widened(held, schema):
            return True
        return any(
            typed.column.missing is not None and typed.name not in held.names
            for typed in typed_columns(self.after, self.options)
        )

    def _evolve_history(self, history: DeltaTable) -> None:
        """Evolve the history. Versions that ended before a column was added get null despite its default."""
        held = _held(history)
        schema = _joined(held, history_schema(self.after, self.options))
        place = _Place(history, self.lake_root, history_path(self.after.table), self.app)
        if _is_widened(held, schema):
            place.rewrite(schema, self._widened, {})
        elif len(schema) > len(held):
            place.add(held, schema, {})

    def _widened(self, rows: pa.Table) -> pa.Table:
        """Return rows as `evolved` does, without added columns."""
        found = evolved(rows, self.before, self.after, self.options)
        return found.select(rows.column_names)


@dataclass(frozen=True)
class _Place:
    """A Delta table, and the location of its files: the folder `path` below the lake root."""

    table: DeltaTable
    lake_root: str
    path: str
    app: str

    def add(self, held: pa.Schema, schema: pa.Schema, marks: Mapping[str, int]) -> None:
        """Add the columns of `schema` that the table lacks, in a commit without data."""
        added = [field for field in schema if field.name not in held.names]
        fields = [
            Field(field.name, field.type, nullable=True)
            for field in Schema.from_arrow(pa.schema(added)).fields
        ]
        allow_timestamp_without_tz(self.table, schema)
        position = self._position()
        properties = self._properties(position, marks)

        def commit() -> None:
            with committing(self.table, properties):
                self.table.alter.add_columns(fields, commit_properties=properties)

        fenced(self.table, self.app, position, commit)

    def rewrite(self, schema: pa.Schema, convert: Convert, marks: Mapping[str, int]) -> None:
        """Rewrite all files with converted rows, and replace the table's files by them in one commit."""
        position = self._position()
        files = self._write(schema, convert)
        replace_files(self.table, self.app, position, files, schema, self._properties(position, marks))

    def _position(self) -> LSN:
        position = read_position(self.table, self.app)
        if position is None:
            raise LakeTableError(f"{self.table.table_uri}: it is not of this epoch")
        return position

    def _properties(self, position: LSN, marks: Mapping[str, int]) -> CommitProperties:
        return commit_properties(self.app, position, _KIND, None, marks)

    def _write(self, schema: pa.Schema, convert: Convert) -> list[WrittenFile]:
        with data_files(self.lake_root, self.path, schema) as files:
            for rows in self._rows():
                for batch in aligned(convert(rows), schema).to_batches():
                    files.write(batch)
            return files.finish()

    def _rows(self) -> Iterator[pa.Table]:
        rows = FileRows(self.table)
        for number in range(len(rows.files)):
            yield from rows.all_of(number)


def _held(table: DeltaTable) -> pa.Schema:
    return pa.schema(table.schema().to_arrow())


def _joined(held: pa.Schema, wanted: pa.Schema) -> pa.Schema:
    """Return the existing columns, in their order but with their wanted types, and then the new columns."""
    types = {field.name: field.type for field in wanted}
    names = [*held.names, *(name for name in wanted.names if name not in held.names)]
    # Keep the metadata of each column, such as its comment.
    about = {field.name: field.metadata for field in held}
    return pa.schema(
        [pa.field(name, types.get(name) or held.field(name).type, metadata=about.get(name)) for name in names]
    )


def _is_widened(held: pa.Schema, schema: pa.Schema) -> bool:
    """Return True if the Delta type of an existing column differs. Arrow types may share a Delta type."""
    own = {field.name: field.type for field in Schema.from_arrow(held).fields}
    return any(own.get(field.name, field.type) != field.type for field in Schema.from_arrow(schema).fields)


@dataclass
class EvolvingTable:
    """A lake table, and its history, that follow a timeline of changes and relations.

    The handles `table` and `history` must not be refreshed by others in between. `built`: the relation for
    which the table is built. `first`: the relation of the first changes after its position. `large`: the
    changes, if the rows of a timeline are their outline.
    """

    options: TableOptions
    lake_root: str
    slice_bytes: int
    app: str
    table: DeltaTable
    history: DeltaTable | None
    built: Relation
    first: Relation
    large: LargeChanges | None = None

    @property
    def position(self) -> LSN:
        position = read_position(self.table, self.app)
        if position is None:
            raise LakeTableError(f"{self.built.table}: its lake table was not copied in the current epoch")
        return position

    def follow(self, timeline: RelationTimeline) -> int:
        """Apply all spans of a timeline that begins with `first`, and return the number of applied changes.

        Evolves the table before each further span, and compacts it if changes were applied. Raises what
        `apply_changes`, `apply_with_history` and `Evolution.evolve` do.
        """
        evolved = self._steps_done(timeline)
        changes, before = 0, self.first
        for number, span in enumerate(timeline.spans):
            if number > evolved:
                step = Evolution(before, span.begins, self.options, self.lake_root, self.app)
                step.evolve(self.table, self.history)
            changes += self._apply(span)
            before = self.built = span.relation
        self._settle(timeline)
        if changes:
            self._tidy()
        return changes

    def _tidy(self) -> None:
        if self.options.policy.merge == "rewrite":
            withdraw_vectors(self.table, self.app)
        for handle in (self.table, self.history):
            if handle is not None:
                compact(handle, self.app, self._cluster_by)

    @property
    def _cluster_by(self) -> tuple[str, ...]:
        return self.options.policy.cluster_by or tuple(column.name for column in self.built.key_columns)

    def _steps_done(self, timeline: RelationTimeline) -> int:
        """Return the number of the span up to which the table has already evolved.

        An earlier process may have ended after evolving the table and before applying the changes. Returns
        the number of spans if no span has that relation and none has changes. Raises LakeChangedError if the
        table is built for a relation that does not fit its changes.
        """
        if self.built.version == self.first.version:
            return 0
        for number, span in enumerate(timeline.spans):
            if span.begins.version == self.built.version:
                return number
            if self._changes(span).num_rows:
                break
        if any(self._changes(span).num_rows for span in timeline.spans):
            raise LakeChangedError(
                f"{self.built.table}: the columns of the lake table fit neither the recorded definition"
                " nor the next changes"
            )
        return len(timeline.spans)

    def _changes(self, span: RelationSpan) -> pa.Table:
        return span.rows.filter(pc.is_in(span.rows["op"], letters(CHANGES)))

    def _apply(self, span: RelationSpan) -> int:
        changes = self._changes(span)
        return self._apply_changes(changes, span.relation).changes if changes.num_rows else 0

    def _apply_changes(self, changes: pa.Table, relation: Relation) -> Applied:
        if self.history is None:
            return apply_changes(
                self.table, changes, relation, self.options, self.app, self.slice_bytes, self.large
            )
        return apply_with_history(
            self.table,
            self.history,
            changes,
            relation,
            self.options,
            self.app,
            self.lake_root,
            self.slice_bytes,
        )

    def _settle(self, timeline: RelationTimeline) -> None:
        """Move the position past rows without changes, if the table has evolved for a later relation.

        Otherwise the next timeline would begin with these rows again.
        """
        relations, rows = read_relations(self.table), timeline.spans[-1].rows
        # Relations ordered directly before a transaction belong to no transaction, so they set no position.
        rows = rows.filter(pc.greater(rows["ordinal"], STATUS_ORDINAL))
        if relations is None or relations[0] == relations[1] or rows.num_rows == 0:
            return
        position, commit_ts = LSN(rows["commit_lsn"][-1].as_py()), rows["commit_ts"][-1].as_py()
        if self.history is not None and (read_position(self.history, self.app) or 0) < position:
            properties = commit_properties(self.app, position, "history", commit_ts)
            commit_nothing(self.history, self.app, position, properties)
        commit = SliceCommit(self.table, self.app, position, commit_ts, rows["relation_version"][-1].as_py())
        commit.make(commit.nothing)
