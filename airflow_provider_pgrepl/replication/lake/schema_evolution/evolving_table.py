"""A lake table and its history, open: changes go in span by span, and it evolves in between."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from airflow_provider_pgrepl.errors import LakeChangedError, LakeTableError
from airflow_provider_pgrepl.replication.changelog.layout import CHANGES, STANDING_ORDINAL, letters
from airflow_provider_pgrepl.replication.lake.delta.fenced_commit import commit_nothing, commit_properties
from airflow_provider_pgrepl.replication.lake.delta.table import read_position
from airflow_provider_pgrepl.replication.lake.files.compaction import compact, withdraw_vectors
from airflow_provider_pgrepl.replication.lake.history.apply import apply_with_history
from airflow_provider_pgrepl.replication.lake.merge.large_transactions import LargeChanges
from airflow_provider_pgrepl.replication.lake.merge.merge import Applied, apply_changes
from airflow_provider_pgrepl.replication.lake.merge.slice_commit import SliceCommit
from airflow_provider_pgrepl.replication.lake.schema_evolution.evolution import Evolution
from airflow_provider_pgrepl.replication.lake.schema_evolution.timeline import (
    RelationSpan,
    RelationTimeline,
    read_relations,
)
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.tables import TableChoices


@dataclass
class EvolvingTable:
    """Both handles must not be refreshed meanwhile.

    `built`: the relation that the table is for; `first`: that in which the changes above its position begin.
    `large` has the changes, where those of a timeline are their outline.
    """

    choices: TableChoices
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
            raise LakeTableError(f"{self.built.table}: this epoch has no snapshot in the lake")
        return position

    def follow(self, timeline: RelationTimeline) -> int:
        """Bring the table through all spans of a timeline that began with `first`; how many changes it took.

        Raises what `apply_changes`, `apply_with_history` and `Evolution.evolve` do.
        """
        evolved = self._steps_done(timeline)
        changes, before = 0, self.first
        for number, span in enumerate(timeline.spans):
            if number > evolved:
                step = Evolution(before, span.begins, self.choices, self.lake_root, self.app)
                step.evolve(self.table, self.history)
            changes += self._apply(span)
            before = self.built = span.relation
        self._settle(timeline)
        if changes:
            self._tidy()
        return changes

    def _tidy(self) -> None:
        if self.choices.policy.merge == "rewrite":
            withdraw_vectors(self.table, self.app)
        for handle in (self.table, self.history):
            if handle is not None:
                compact(handle, self.app, self._cluster_by)

    @property
    def _cluster_by(self) -> tuple[str, ...]:
        return self.choices.policy.cluster_by or tuple(column.name for column in self.built.key_columns)

    def _steps_done(self, timeline: RelationTimeline) -> int:
        """Up to which span the table has evolved already, by somebody who died before the changes."""
        if self.built.version == self.first.version:
            return 0
        for number, span in enumerate(timeline.spans):
            if span.begins.version == self.built.version:
                return number
            if self._changes(span).num_rows:
                break
        if any(self._changes(span).num_rows for span in timeline.spans):
            raise LakeChangedError(
                f"{self.built.table}: the lake table is not for what its changes have become"
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
                self.table, changes, relation, self.choices, self.app, self.slice_bytes, self.large
            )
        return apply_with_history(
            self.table,
            self.history,
            changes,
            relation,
            self.choices,
            self.app,
            self.lake_root,
            self.slice_bytes,
        )

    def _settle(self, timeline: RelationTimeline) -> None:
        """What was received, and then changed nothing, is behind us: so must the position say, or the next
        timeline begins with it again."""
        relations, rows = read_relations(self.table), timeline.spans[-1].rows
        # What stands before a transaction says nothing of that one.
        rows = rows.filter(pc.greater(rows["ordinal"], STANDING_ORDINAL))
        if relations is None or relations[0] == relations[1] or rows.num_rows == 0:
            return
        position, commit_ts = LSN(rows["commit_lsn"][-1].as_py()), rows["commit_ts"][-1].as_py()
        if self.history is not None and (read_position(self.history, self.app) or 0) < position:
            properties = commit_properties(self.app, position, "history", commit_ts)
            commit_nothing(self.history, self.app, position, properties)
        commit = SliceCommit(self.table, self.app, position, commit_ts, rows["relation_version"][-1].as_py())
        commit.make(commit.nothing)
