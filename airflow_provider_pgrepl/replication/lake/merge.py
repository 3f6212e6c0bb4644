"""Changes into a lake table: cut into slices, collapsed, typed, each slice one commit with its position.

A slice ends where a source transaction ends, so every version of a lake table holds whole transactions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, Schema, WriterProperties, write_deltalake

from airflow_provider_pgrepl.errors import ChangelogError, LakeTableError
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.lake.changed_rows import TEXTS, array_of
from airflow_provider_pgrepl.replication.lake.collapse import Collapsed, collapse
from airflow_provider_pgrepl.replication.lake.table import (
    RESNAPSHOT_HINT,
    commit_nothing,
    commit_properties,
    fenced,
    read_position,
)
from airflow_provider_pgrepl.replication.lake.tuples import Bools, Ints, bytes_before, take
from airflow_provider_pgrepl.replication.lsn import LSN
from airflow_provider_pgrepl.replication.relation import Relation, quote_identifier
from airflow_provider_pgrepl.replication.values import DELETED, lake_schema, typed_column, typed_columns

_INSERT, _UPDATE, _DELETE = range(3)
_DIVISION = "Divide by zero"
_MISSING = "a row to be updated or deleted is missing: the lake table is not as this pipeline left it"
_WRITER = WriterProperties(compression="SNAPPY")


@dataclass(frozen=True)
class Applied:
    """What `apply_changes` did: where the table stands now, and how many changes and commits that took."""

    position: LSN
    version: int
    changes: int
    commits: int


def apply_changes(
    table: DeltaTable, changes: pa.Table, relation: Relation, pipeline: Pipeline, app: str
) -> Applied:
    """Apply changelog rows of one relation (ops I U D T, ordered by commit_lsn and ordinal), exactly once.

    Changes at or below the table's position are skipped. `table` is the handle on which the position is
    read and every commit made; it must not be refreshed meanwhile, and stands at the last commit afterwards.

    Raises FencedError when another process writes the table; LakeTableError when the table is not as this
    pipeline left it or the changes contradict each other; LakeError, DriftError, ValueRangeError. After these
    the table holds whole slices up to its position and nothing else.
    """
    position = read_position(table, app)
    if position is None:
        raise LakeTableError(f"{relation.table}: this epoch has no snapshot in the lake", RESNAPSHOT_HINT)
    _check_schema(table, lake_schema(relation, pipeline), relation)
    changes = changes.combine_chunks()
    commit_lsn = array_of(changes, "commit_lsn", pa.int64()).to_numpy()
    if bool((np.diff(commit_lsn) < 0).any()):
        raise ChangelogError(f"{relation.table}: changes are not in commit order")
    fresh = int(np.searchsorted(commit_lsn, int(position), side="right"))
    commits = 0
    for start, end in slices(changes.slice(fresh), pipeline.slice_bytes):
        part = changes.slice(fresh + start, end - start)
        position = LSN(commit_lsn[fresh + end - 1])
        _Slice(collapse(part, relation), part, relation, pipeline).commit(table, app, position)
        commits += 1
    return Applied(position, int(table.version()), len(changes) - fresh, commits)


def slices(changes: pa.Table, limit: int) -> Iterator[tuple[int, int]]:
    """Cut changes into [start, end) of at most `limit` bytes of values, ending where transactions end.

    A larger transaction is a slice of its own.
    """
    if len(changes) == 0:
        return
    commit_lsn = array_of(changes, "commit_lsn", pa.int64()).to_numpy()
    size = bytes_before(array_of(changes, "new", TEXTS)) + bytes_before(array_of(changes, "old", TEXTS))
    ends = np.append(np.flatnonzero(np.diff(commit_lsn)) + 1, len(changes))
    start = 0
    while start < len(changes):
        fits = int(np.searchsorted(size[ends], size[start] + limit, side="right")) - 1
        nearest = int(np.searchsorted(ends, start, side="right"))
        end = int(ends[max(fits, nearest)])
        yield start, end
        start = end


def _check_schema(table: DeltaTable, wanted: pa.Schema, relation: Relation) -> None:
    found = {field.name: field.type for field in table.schema().fields}
    expected = {field.name: field.type for field in Schema.from_arrow(wanted).fields}
    unlike = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    if unlike:
        names = ", ".join(map(quote_identifier, unlike))
        raise LakeTableError(
            f"{relation.table}: these columns of the lake table are not as the pipeline has them: {names}",
            RESNAPSHOT_HINT,
        )


@dataclass(frozen=True)
class _Slice:
    """The collapsed changes of whole transactions, to become one commit."""

    collapsed: Collapsed
    changes: pa.Table
    relation: Relation
    pipeline: Pipeline

    def commit(self, table: DeltaTable, app: str, position: LSN) -> None:
        properties = commit_properties(app, position, "changes", self.changes["commit_ts"][-1].as_py())
        if self.collapsed.overwrite or (self.collapsed.only_inserts and len(self.collapsed)):
            mode: Literal["overwrite", "append"] = "overwrite" if self.collapsed.overwrite else "append"
            rows = self._final_rows(table)
            write = partial(
                write_deltalake, mode=mode, commit_properties=properties, writer_properties=_WRITER
            )
            fenced(table, app, position, lambda: write(table, rows))
        elif len(self.collapsed) == 0:
            commit_nothing(table, app, position, properties)
        else:
            self._merge(table, app, position, properties)

    def _final_rows(self, table: DeltaTable) -> pa.Table:
        entries = np.flatnonzero(self.collapsed.final >= 0)
        columns = dict(zip(self._names(), (values for values, _ in self._values(entries)), strict=True))
        return pa.table({field.name: columns[field.name] for field in table.schema().fields})

    def _names(self) -> list[str]:
        return list(lake_schema(self.relation, self.pipeline).names)

    def _values(self, entries: Ints) -> Iterator[tuple[pa.Array, Bools | None]]:
        """Typed final values by lake column, and where the lake's value stays."""
        for typed in typed_columns(self.relation, self.pipeline):
            if typed.index is None:
                yield pa.nulls(len(entries), typed.lake_type), None
                continue
            texts, keep = self.collapsed.texts(typed.index, entries)
            yield typed.parse(texts), keep
        if DELETED in self._names():
            yield pa.repeat(pa.scalar(False), len(entries)), None
        last = self.collapsed.last[entries]
        if self.pipeline.commit_lsn_column:
            yield take(array_of(self.changes, "commit_lsn", pa.int64()), last), None
        if self.pipeline.commit_ts_column:
            yield take(array_of(self.changes, "commit_ts", pa.timestamp("us", "UTC")), last), None

    def _merge(self, table: DeltaTable, app: str, position: LSN, properties: CommitProperties) -> None:
        source, kept = self._merge_source()
        targets = [quote_identifier(name) for name in self._names()]
        merger = table.merge(
            source,
            " and ".join(self._conditions(source)),
            source_alias="s",
            target_alias="t",
            commit_properties=properties,
            writer_properties=_WRITER,
        )
        values = {target: f"s.c{index}" for index, target in enumerate(targets)}
        updates = {
            target: f"case when s.u{index} then t.{target} else s.c{index} end"
            if index in kept
            else f"s.c{index}"
            for index, target in enumerate(targets)
        }
        merger.when_matched_delete(f"s.kind = {_DELETE}")
        merger.when_matched_update(updates, f"s.kind = {_UPDATE}")
        merger.when_not_matched_insert(values, f"s.kind = {_INSERT}")
        # A row to update or delete that is not there must stop the commit; MERGE has no other way to say so.
        fail = {target: f"case when 1 / s.zero > 0 then {value} end" for target, value in values.items()}
        merger.when_not_matched_insert(fail)
        self._check_metrics(fenced(table, app, position, merger.execute, known={_DIVISION: _MISSING}))

    def _conditions(self, source: pa.Table) -> Iterator[str]:
        """Origin keys are equal; and, so that Delta skips files, integer keys lie in the range of these."""
        for number, column in enumerate(self.relation.key_columns):
            key, origins = f"t.{quote_identifier(column.name)}", source[f"o{number}"]
            # Not null-safe on purpose: a key is never NULL, and an insert, whose origin is, must not match.
            yield f"({key} = s.o{number})"
            if pa.types.is_integer(origins.type):
                lowest, highest = pc.min_max(origins).as_py().values()
                yield f"({key} >= {lowest}) and ({key} <= {highest})"

    def _merge_source(self) -> tuple[pa.Table, set[int]]:
        """Deleted and remaining rows: origin key o…, final values c…, u… where the lake's value is kept."""
        collapsed = self.collapsed
        alive, dead = np.flatnonzero(collapsed.final >= 0), np.flatnonzero(collapsed.final < 0)
        order = np.concatenate([alive, dead])
        columns: dict[str, pa.Array | pa.ChunkedArray] = {}
        for number, column in enumerate(self.relation.key_columns):
            texts = collapsed.key_texts(number, collapsed.origin[order])
            columns[f"o{number}"] = typed_column(column, self.relation.table, self.pipeline).parse(texts)
        kept = set()
        for index, (values, keep) in enumerate(self._values(alive)):
            columns[f"c{index}"] = pa.chunked_array([values, pa.nulls(len(dead), values.type)])
            if keep is not None:
                kept.add(index)
                columns[f"u{index}"] = np.concatenate([keep, np.zeros(len(dead), np.bool_)])
        columns["kind"] = pa.array(self._kinds()[order])
        columns["zero"] = pa.array(np.zeros(len(order), np.int64))
        return pa.table(columns), kept

    def _kinds(self) -> Ints:
        kinds = np.where(self.collapsed.origin < 0, _INSERT, _UPDATE)
        return np.where(self.collapsed.final < 0, _DELETE, kinds)

    def _check_metrics(self, metrics: dict[str, Any]) -> None:
        """A key that the lake holds twice is changed twice."""
        done = [metrics[f"num_target_rows_{what}"] for what in ("inserted", "updated", "deleted")]
        if done != np.bincount(self._kinds(), minlength=3).tolist():
            raise LakeTableError(f"{self.relation.table}: the lake table holds a key twice", RESNAPSHOT_HINT)
