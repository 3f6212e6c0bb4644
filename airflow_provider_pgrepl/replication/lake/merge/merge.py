"""Merging of changes into a lake table in slices, each of which is one commit with its position.

A slice ends at the end of a source transaction, so every version of a lake table holds whole transactions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, Schema

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import ChangelogError, LakeChangedError, LakeTableError, TruncatedError
from airflow_provider_pgrepl.replication.lake.delta.parquet_writer import partition_columns
from airflow_provider_pgrepl.replication.lake.delta.table import read_position
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import quote_identifier
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.tables import TableOptions
from airflow_provider_pgrepl.replication.values import lake_schema, partition_rule, typed_column

from .changes import TEXTS, Ints, array_of, bytes_before
from .collapse import collapse
from .keyed import RowsCommit
from .keyless import commit_net_rows, net_rows
from .large_transactions import BYTES, ROWS, KeysMoveError, LargeChanges, MultiPartCommit, bytes_of, weight
from .slice_commit import SliceCommit
from .soft_deletes import SoftDeleteCommit, held_keys


@dataclass(frozen=True)
class Applied:
    """The result of `apply_changes`: the new position and version, and the numbers of changes and commits."""

    position: LSN
    version: int
    changes: int
    commits: int


def apply_changes(
    table: DeltaTable,
    changes: pa.Table,
    relation: Relation,
    options: TableOptions,
    app: str,
    slice_bytes: int,
    large: LargeChanges | None = None,
) -> Applied:
    """Apply changelog rows of one relation (ops I U D T, ordered by commit_lsn and ordinal) exactly once.

    Skips changes at or before the table's position. Each commit has whole transactions, of at most
    `slice_bytes` bytes of values together, unless a single transaction is larger.

    :param table: the handle through which the position is read and every commit is made; it must not be
        refreshed during the call, and is at the last commit afterwards
    :param changes: the changelog rows, or, with `large`, their outline; the `relation_version` of a change is
        that of the relation in force after it, which has the layout of `relation`; each commit records that
        of its last change
    :param large: the changelog rows in files; a transaction larger than `slice_bytes` is then merged in parts

    :raises FencedError: if another process writes the table
    :raises LakeTableError: if the table lacks rows or has unexpected ones, or if changes contradict others
    :raises TruncatedError: if the table was truncated and its policy forbids that
    :raises LakeError: also DriftError, ValueRangeError, ChangelogError. After each of these errors the table
        holds exactly the slices up to its position.
    """
    position = read_position(table, app)
    if position is None:
        raise LakeTableError(f"{relation.table}: its lake table was not copied in the current epoch")
    check_columns(table, lake_schema(relation, options), relation)
    commit_lsn = array_of(changes, "commit_lsn", pa.int64()).to_numpy()
    if bool((np.diff(commit_lsn) < 0).any()):
        raise ChangelogError(f"{relation.table}: changes are not in commit order")
    first = int(np.searchsorted(commit_lsn, int(position), side="right"))
    changes, commit_lsn = changes.slice(first), commit_lsn[first:]
    forbidden = forbidden_truncate(changes, relation, options)
    if forbidden:
        changes = changes.slice(0, int(np.searchsorted(commit_lsn, int(forbidden[0]))))
    count = commits = 0
    for start, end in slices(changes, slice_bytes):
        part = changes.slice(start, end - start).combine_chunks()
        position = LSN(commit_lsn[end - 1])
        at_end = part["commit_ts"][-1].as_py(), part["relation_version"][-1].as_py()
        at = table, app, position, *at_end, options.policy.merge
        if large is None:
            commit = SliceCommit(*at)
            commit.make(partial(_make, part, relation, options, commit))
            count += len(part)
        else:
            parted = MultiPartCommit(*at)
            parted.make(partial(_make_large, large, part, relation, options, parted, slice_bytes))
            count += pc.sum(part[ROWS]).as_py()
        commits += 1
    if forbidden:
        raise forbidden[1]
    return Applied(position, int(table.version()), count, commits)


def slices(changes: pa.Table, limit: int) -> Iterator[tuple[int, int]]:
    """Yield slices [start, end) of the changes with whole transactions, of at most `limit` bytes of values.

    A larger transaction is a slice of its own.
    """
    if len(changes) == 0:
        return
    commit_lsn = array_of(changes, "commit_lsn", pa.int64()).to_numpy()
    size = _bytes_before(changes)
    ends = np.append(np.flatnonzero(np.diff(commit_lsn)) + 1, len(changes))
    start = 0
    while start < len(changes):
        fits = int(np.searchsorted(size[ends], size[start] + limit, side="right")) - 1
        nearest = int(np.searchsorted(ends, start, side="right"))
        end = int(ends[max(fits, nearest)])
        yield start, end
        start = end


def _bytes_before(changes: pa.Table) -> Ints:
    if BYTES in changes.column_names:
        return np.append(0, np.cumsum(changes[BYTES].to_numpy()))
    return bytes_before(array_of(changes, "new", TEXTS)) + bytes_before(array_of(changes, "old", TEXTS))


def check_columns(table: DeltaTable, wanted: pa.Schema, relation: Relation) -> None:
    """Raise LakeChangedError if the lake table has other columns or partitions than the pipeline gives it."""
    unlike = unlike_columns(table, wanted)
    if unlike:
        names = ", ".join(map(quote_identifier, unlike))
        raise LakeChangedError(
            f"{relation.table}: the lake table has other columns than this pipeline gives it: {names}"
        )
    partitions = table.metadata().partition_columns
    # Each merge comes here: convert the schema only if it has a rule.
    rule = partition_rule(pa.schema(table.schema().to_arrow())) if partitions else None
    if partitions != partition_columns(wanted) or rule not in (None, partition_rule(wanted)):
        raise LakeChangedError(
            f"{relation.table}: the lake table has other partitions than partition_by gives it",
            errors.resnapshot(relation.table),
        )


def unlike_columns(table: DeltaTable, wanted: pa.Schema) -> list[str]:
    """Return the names of the columns that only one of the two has, or that have another Delta type."""
    found = {field.name: field.type for field in table.schema().fields}
    expected = {field.name: field.type for field in Schema.from_arrow(wanted).fields}
    return [name for name in {**expected, **found} if expected.get(name) != found.get(name)]


def _make(part: pa.Table, relation: Relation, options: TableOptions, commit: SliceCommit) -> None:
    policy = options.policy
    if not relation.key_columns and relation.replica_identity == "f":
        commit_net_rows(net_rows(part, relation, options), commit)
    elif relation.key_columns and policy.follows_keys:
        SoftDeleteCommit(held_keys(part, relation, policy.truncate), part, relation, options).make(commit)
    else:
        if policy.truncate == "ignore":
            part = part.filter(pc.not_equal(part["op"], "T"))
        RowsCommit(collapse(part, relation), part, relation, options).make(commit)


def _make_large(
    large: LargeChanges,
    outline: pa.Table,
    relation: Relation,
    options: TableOptions,
    commit: MultiPartCommit,
    slice_bytes: int,
) -> None:
    first, last = (LSN(outline["commit_lsn"][at].as_py()) for at in (0, -1))
    truncates = pc.equal(outline["op"], "T")
    is_truncated = bool(pc.any(truncates).as_py())
    # Copies of a row without a key, and rows that a TRUNCATE leaves behind, depend on all changes together.
    has_no_key = not relation.key_columns and relation.replica_identity == "f"
    is_indivisible = (
        has_no_key
        or (is_truncated and options.policy.follows_keys)
        or _has_ambiguous_key_text(relation, options)
    )
    if bytes_of(outline) > slice_bytes and commit.is_ours and not is_indivisible:
        after = pc.max(outline.filter(truncates)["ordinal"]).as_py() if is_truncated else -1
        parts = large.parts(last, after, weight(outline), relation)
        make = partial(_make, relation=relation, options=options, commit=commit)
        with suppress(KeysMoveError):
            commit.make_of(parts, make, empties=is_truncated)
            return
    _make(large.read(first, last).combine_chunks(), relation, options, commit.whole())


def _has_ambiguous_key_text(relation: Relation, options: TableOptions) -> bool:
    """Return True if different text values of a key may be equal in the lake, such as 1.0 and 1.00.

    Parts are made by text values, so they could not separate such keys.
    """
    unbounded = [column for column in relation.key_columns if column.typmod < 0]
    types = (typed_column(column, relation.table, options).lake_type for column in unbounded)
    return any(pa.types.is_decimal(lake_type) for lake_type in types)


def forbidden_truncate(
    changes: pa.Table, relation: Relation, options: TableOptions
) -> tuple[LSN, TruncatedError] | None:
    """Return the commit LSN and the error of the first TRUNCATE if the policy is `error`, else None."""
    if options.policy.truncate != "error":
        return None
    truncates = changes.filter(pc.equal(changes["op"], "T"))["commit_lsn"]
    if len(truncates) == 0:
        return None
    lsn = LSN(pc.min(truncates).as_py())
    return lsn, TruncatedError(
        f"the table was truncated by the transaction committed at {lsn}, and truncate is set to error",
        "the lake still has the rows from before. To keep them, set truncate to ignore; to delete them, set"
        " it to apply. Restart the replication app, then retry the table: pgrepl retry FILE.json"
        f" '{relation.table}', or PgRetryTablesOperator. A resnapshot would replace the rows with those that"
        " the source has now",
    )
