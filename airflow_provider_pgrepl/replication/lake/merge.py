"""Changes into a lake table: cut into slices, collapsed, typed, each slice one commit with its position.

A slice ends where a source transaction ends, so every version of a lake table holds whole transactions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable, Schema

from airflow_provider_pgrepl.errors import ChangelogError, LakeTableError, TruncatedError
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.lake.changed_rows import TEXTS, array_of
from airflow_provider_pgrepl.replication.lake.collapse import collapse
from airflow_provider_pgrepl.replication.lake.held_keys import held_keys
from airflow_provider_pgrepl.replication.lake.merge_keys import KeysCommit
from airflow_provider_pgrepl.replication.lake.merge_multiset import commit_net_rows
from airflow_provider_pgrepl.replication.lake.merge_rows import RowsCommit
from airflow_provider_pgrepl.replication.lake.multiset import net_rows
from airflow_provider_pgrepl.replication.lake.slice_commit import SliceCommit
from airflow_provider_pgrepl.replication.lake.table import RESNAPSHOT_HINT, read_position
from airflow_provider_pgrepl.replication.lake.tuples import bytes_before
from airflow_provider_pgrepl.replication.lsn import LSN
from airflow_provider_pgrepl.replication.relation import Relation, TableName, quote_identifier
from airflow_provider_pgrepl.replication.values import lake_schema


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
        _commit(part, relation, pipeline, SliceCommit(table, app, position, part["commit_ts"][-1].as_py()))
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


def _commit(part: pa.Table, relation: Relation, pipeline: Pipeline, commit: SliceCommit) -> None:
    policy = pipeline.policy(relation.table)
    if policy.truncate == "error" and "T" in part["op"].unique().to_pylist():
        raise truncated(relation.table)
    if not relation.key_columns and relation.replica_identity == "f":
        commit_net_rows(net_rows(part, relation, pipeline), commit)
    elif policy.deletes == "soft" or policy.truncate == "ignore":
        held = held_keys(part, relation, policy.truncate)
        KeysCommit(held, part, relation, pipeline).make(commit)
    else:
        RowsCommit(collapse(part, relation), part, relation, pipeline).make(commit)


def truncated(table: TableName) -> TruncatedError:
    """The error of a table whose policy is not to be truncated."""
    return TruncatedError(
        f"{table}: the table was truncated, and truncate is set to error",
        f"run the snapshot app with --tables '{table}'; to have it go on by itself next time, set truncate to"
        " apply or ignore",
    )
