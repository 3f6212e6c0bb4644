"""Ended versions as typed rows of the history, from the text values of changes and from rows of the lake
table."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, QueryBuilder

from airflow_provider_pgrepl.errors import LakeTableError
from airflow_provider_pgrepl.replication.lake.files.row_equality import match_rows
from airflow_provider_pgrepl.replication.lake.merge.changes import Bools, Ints, array_of
from airflow_provider_pgrepl.replication.lake.merge.collapse import FollowedRows, follow
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import quote_identifier
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.tables import TableOptions
from airflow_provider_pgrepl.replication.values import (
    COMMIT_LSN,
    COMMIT_TS,
    DELETED,
    typed_column,
    typed_columns,
)
from airflow_provider_pgrepl.trace import log_unexpected, traced

from . import table as history
from .kernels import end_versions

log = logging.getLogger(__name__)
_ROWS_AT_ONCE = 64 << 10
_NOBODY = -1


@dataclass(frozen=True)
class EndedVersions:
    """The versions that the transactions of a slice ended, one entry each, in the order in which they ended.

    `origin`: the code of the key by which the lake has the row as it was before the slice, -1 if it does not.
    `made_by`, `ended_by`: a change of the transaction that made or ended the version. `made_by` is -1 for a
    version of the lake. `ended_how`: the characters of `to_op` in LIFETIME. `maybe`: True if the version
    existed only if the lake has it. `touched`: the key codes of all lake rows that a change touched.
    `emptied_by`: a change of the first transaction that truncated the table, which ended every lake row not
    in `touched`. -1: none did.
    """

    origin: Ints
    made_by: Ints
    ended_by: Ints
    ended_how: pa.Array
    maybe: Bools
    touched: Ints
    emptied_by: int
    _followed: FollowedRows
    _code: Ints
    _version: Ints

    def key_texts(self, index: int, codes: Ints) -> pa.Array:
        """Return the text values of the key column `index` (counted among the key columns) for codes."""
        return self._followed.key_texts(index, codes)

    def texts(self, index: int, entries: Ints) -> tuple[pa.Array, Ints]:
        """Return the text values of the column `index` for the entries whose value is known, and the
        positions of these entries.

        The other entries have the value of the lake's row.
        """
        texts, in_lake = self._followed.texts(index, self._version[entries], self._code[entries])
        known = np.flatnonzero(~in_lake)
        return texts if len(known) == len(texts) else texts.take(pa.array(known)), known

    def needs_lake(self, entries: Ints) -> Bools:
        """Return a mask of the entries that need a value, or the beginning of the lifetime, from the lake's
        row."""
        return self._followed.needs_lake(self._version[entries])


def ended_versions(changes: pa.Table, relation: Relation, *, ignoring: bool = False) -> EndedVersions:
    """Return the versions that changelog rows of one relation with a key end. The rows are ops I U D T of
    whole transactions, in order.

    `ignoring`: TRUNCATE is ignored, and rows stay until another row has their key. Raises DriftError,
    LakeTableError (the changes contradict each other).
    """
    commit_lsn = array_of(changes, "commit_lsn", pa.int64()).to_numpy()
    transaction = np.cumsum(np.diff(commit_lsn, prepend=commit_lsn[:1]) != 0)
    ends = np.append(np.flatnonzero(np.diff(transaction)), len(changes) - 1)
    followed = follow(changes, relation, whole=True)
    read, lake_codes = followed.read, followed.origin
    origin, code, version, ended_in, how, maybe, emptied_in = end_versions(
        read.op, followed.new_code, followed.codes, transaction[read.places], followed.row, lake_codes,
        read.truncates, transaction[read.truncate_places], ignoring,
    )  # fmt: skip
    return EndedVersions(
        origin=origin,
        made_by=np.where(version < 0, -1, read.places[version]) if len(read.places) else version,
        ended_by=ends[ended_in],
        ended_how=pa.array(how.view("S1").astype("U1"), pa.string()),
        maybe=maybe,
        touched=lake_codes[lake_codes >= 0],
        emptied_by=int(ends[emptied_in]) if emptied_in >= 0 else -1,
        _followed=followed,
        _code=code,
        _version=version,
    )


def ended_rows(
    table: DeltaTable | pa.Table,
    changes: pa.Table,
    relation: Relation,
    options: TableOptions,
    epoch: Epoch,
    above: LSN,
) -> Iterator[pa.Table]:
    """Yield the versions that `changes` (whole transactions, in order) end above an LSN, as rows of the
    history.

    `table`: the lake table, or its rows, at the version to which the changes are to be applied. Raises
    DriftError, LakeTableError, ValueRangeError.
    """
    ignoring = options.policy.truncate == "ignore"
    ended = ended_versions(changes, relation, ignoring=ignoring)
    yield from _Slice(table, changes, ended, relation, options, epoch).rows(above)


def current_rows(
    table: DeltaTable | pa.Table, names: Sequence[str], condition: str = "", batch_rows: int = _ROWS_AT_ONCE
) -> Iterator[pa.Table]:
    """Yield the table's rows that are not soft-deleted, in batches. Raises LakeTableError.

    If `table` is an Arrow table, all such rows are returned in one batch, and `condition` is ignored.
    """
    if isinstance(table, pa.Table):
        live = table.filter(pc.invert(table[DELETED])) if DELETED in table.column_names else table
        yield live.select(list(names))
        return
    held = pa.schema(table.schema().to_arrow())
    wanted = pa.schema([held.field(name) for name in names])
    conditions = [condition] if condition else []
    if DELETED in held.names:
        conditions.append(f"({DELETED} is not true)")
    sql = f"select {', '.join(map(quote_identifier, names))} from t"  # noqa: S608 - all are quoted
    if conditions:
        sql += f" where {' and '.join(conditions)}"
    failed: LakeTableError | None = None
    try:
        builder = QueryBuilder({"datafusion.execution.batch_size": str(batch_rows)}).register("t", table)
        for batch in pa.RecordBatchReader.from_stream(builder.execute(sql)):
            if batch.num_rows:
                yield pa.Table.from_batches([batch]).cast(wanted)
    except Exception as error:  # noqa: BLE001 - DataFusion raises plain ones, which may hold values
        doing = f"{table.table_uri}: its rows cannot be read"
        log_unexpected(log, doing, error)
        failed = traced(LakeTableError(f"{doing}: {type(error).__name__}"), error)
    if failed is not None:
        raise failed


@dataclass(frozen=True)
class _Slice:
    """The changes of whole transactions, the versions that they end, and the lake table before them."""

    table: DeltaTable | pa.Table
    changes: pa.Table
    ended: EndedVersions
    relation: Relation
    options: TableOptions
    epoch: Epoch

    def rows(self, above: LSN) -> Iterator[pa.Table]:
        commit_lsn = array_of(self.changes, "commit_lsn", pa.int64()).to_numpy()
        entries = np.flatnonzero(commit_lsn[self.ended.ended_by] > above)
        needed = np.flatnonzero(self.ended.needs_lake(entries))
        lake, place = self._lake_rows(self.ended.origin[entries[needed]])
        where = np.full(len(entries), _NOBODY, np.int64)
        where[needed] = place
        missing = needed[place < 0]
        if not self.ended.maybe[entries[missing]].all():
            raise LakeTableError(
                f"{self.relation.table}: a row that changed is missing:"
                " the lake table is not as this pipeline left it"
            )
        entries, where = np.delete(entries, missing), np.delete(where, missing)
        for start in range(0, len(entries), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            yield self._typed(entries[part], where[part], lake)
        if self.ended.emptied_by >= 0 and commit_lsn[self.ended.emptied_by] > above:
            yield from self._truncated()

    def _names(self) -> list[str]:
        return [
            *(typed.name for typed in typed_columns(self.relation, self.options)),
            COMMIT_LSN,
            COMMIT_TS,
        ]

    def _keys(self, codes: Ints) -> pa.Table:
        keys = {}
        for index, column in enumerate(self.relation.key_columns):
            typed = typed_column(column, self.relation.table, self.options)
            keys[typed.name] = typed.parse(self.ended.key_texts(index, codes))
        return pa.table(keys)

    def _lake_rows(self, codes: Ints) -> tuple[pa.Table, Ints]:
        """Return the lake's rows with these keys, and for each given code the number of its row, -1 if there
        is none."""
        distinct, number = np.unique(codes, return_inverse=True)
        keys = self._keys(distinct)
        found, held = [], []
        if len(distinct):
            for batch in current_rows(self.table, self._names(), " and ".join(_ranges(keys))):
                match = match_rows(batch, keys)
                rows = np.flatnonzero(match >= 0)
                if len(rows):
                    found.append(batch.take(pa.array(rows)))
                    held.append(match[rows])
        place = np.full(len(distinct), _NOBODY, np.int64)
        if found:
            numbers = np.concatenate(held)
            place[numbers] = np.arange(len(numbers))
        return pa.concat_tables(found) if found else pa.table({}), place[number]

    def _typed(self, entries: Ints, where: Ints, lake: pa.Table) -> pa.Table:
        columns: dict[str, Any] = {}
        made = np.flatnonzero(self.ended.made_by[entries] >= 0)
        for typed in typed_columns(self.relation, self.options):
            if typed.index is None:
                # A dropped column keeps its values in the versions from before the drop.
                values, sent = pa.nulls(len(made), typed.lake_type), made
            else:
                texts, sent = self.ended.texts(typed.index, entries)
                values = typed.parse(texts)
            columns[typed.name] = self._filled(values, sent, typed.name, where, lake)
        maker = pa.array(self.ended.made_by[entries[made]])
        for name, column, kind in (
            (history.FROM_LSN, "commit_lsn", pa.int64()),
            (history.FROM_TS, "commit_ts", history.TIME),
        ):
            values = array_of(self.changes, column, kind).take(maker)
            own = COMMIT_LSN if column == "commit_lsn" else COMMIT_TS
            columns[name] = self._filled(values, made, own, where, lake)
        ender = pa.array(self.ended.ended_by[entries])
        return pa.table(
            {
                **columns,
                history.FROM_EPOCH: pa.repeat(pa.scalar(int(self.epoch), pa.int64()), len(entries)),
                history.TO_EPOCH: pa.repeat(pa.scalar(int(self.epoch), pa.int64()), len(entries)),
                history.TO_LSN: self.changes["commit_lsn"].take(ender),
                history.TO_TS: self.changes["commit_ts"].take(ender),
                history.TO_OP: self.ended.ended_how.take(pa.array(entries)),
            }
        )

    def _filled(self, values: pa.Array, given: Ints, name: str, where: Ints, lake: pa.Table) -> Any:
        """Return a column with `values` at the positions `given`, and the lake's values at the others."""
        if len(given) == len(where):
            return values
        place = where.copy()
        place[given] = np.arange(len(given)) + len(lake)
        both = [*lake[name].cast(values.type).chunks, values]
        return pa.chunked_array(both, values.type).take(pa.array(place))

    def _truncated(self) -> Iterator[pa.Table]:
        """Yield the lake rows that no change touched before the table was truncated, as ended by TRUNCATE."""
        keys = self._keys(np.unique(self.ended.touched))
        ender = self.changes.slice(self.ended.emptied_by, 1)
        for batch in current_rows(self.table, self._names()):
            rows = batch.filter(pa.array(match_rows(batch, keys) < 0))
            yield closed(rows, self.epoch, self.epoch, ender["commit_lsn"][0], ender["commit_ts"][0], "T")


def _ranges(keys: pa.Table) -> Iterator[str]:
    """Yield conditions on integer key columns, with which Delta and Parquet can skip data that lacks these
    keys."""
    for field in keys.schema:
        if pa.types.is_integer(field.type):
            lowest, highest = pc.min_max(keys[field.name]).as_py().values()
            name = quote_identifier(field.name)
            yield f"({name} >= {lowest}) and ({name} <= {highest})"


def closed(
    rows: pa.Table, from_epoch: Epoch, to_epoch: Epoch, to_lsn: pa.Scalar, to_ts: pa.Scalar, to_op: str
) -> pa.Table:
    """Return rows of the lake table as ended versions."""
    constants = {
        history.FROM_EPOCH: pa.scalar(int(from_epoch), pa.int64()),
        history.TO_EPOCH: pa.scalar(int(to_epoch), pa.int64()),
        history.TO_LSN: to_lsn,
        history.TO_TS: to_ts,
        history.TO_OP: pa.scalar(to_op),
    }
    typed = [name for name in rows.column_names if name not in (COMMIT_LSN, COMMIT_TS, DELETED)]
    return pa.table(
        {
            **{name: rows[name] for name in typed},
            history.FROM_LSN: rows[COMMIT_LSN],
            history.FROM_TS: rows[COMMIT_TS],
            **{name: pa.repeat(value, len(rows)) for name, value in constants.items()},
        }
    )
