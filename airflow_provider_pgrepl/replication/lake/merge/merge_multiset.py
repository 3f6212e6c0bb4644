"""Net rows of a table without key into its lake table."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from airflow_provider_pgrepl.errors import LakeTableError
from airflow_provider_pgrepl.replication.lake.files.row_search import FileRows
from airflow_provider_pgrepl.replication.lake.merge.keyless import NetRows
from airflow_provider_pgrepl.replication.lake.merge.slice_commit import SliceCommit
from airflow_provider_pgrepl.replication.postgres.names import quote_identifier


def commit_net_rows(net: NetRows, commit: SliceCommit) -> None:
    """One commit: all copies of a row that the lake loses go, those that stay are written again as they were.

    Raises LakeTableError when the lake holds a row less often than it is to lose it; FencedError.
    """
    if net.overwrite:
        commit.write(net.gained, "overwrite")
    elif len(net.lost):
        _merge(net, commit)
    elif len(net.gained):
        commit.write(net.gained, "append")
    else:
        commit.nothing()


def _merge(net: NetRows, commit: SliceCommit) -> None:
    names = [field.name for field in commit.table.schema().fields]
    rows = FileRows(commit.table)
    places = commit.read(lambda: rows.find(net.lost, net.lost_from))
    found = rows.rows(places, names)
    way = commit.way(rows.bytes_that_may_hold(net.lost, net.lost_from), net.lost.nbytes + net.gained.nbytes)
    if way != "merge":
        commit.replace(rows, places.where(net.leaving(found)), net.gained, way)
        return
    staying = net.remaining(found)
    inserted = pa.concat_tables([staying.select(names), net.gained.select(names).cast(_of(staying, names))])
    lost = [f"l{index}" for index in range(net.lost.num_columns)]
    columns = {
        f"c{index}": pa.chunked_array([*inserted[name].chunks, pa.nulls(len(net.lost), inserted[name].type)])
        for index, name in enumerate(names)
    }
    for name, values in zip(lost, net.lost.columns, strict=True):
        columns[name] = pa.chunked_array([pa.nulls(len(inserted), values.type), *values.chunks])
    columns["lost"] = pa.array(np.repeat([False, True], [len(inserted), len(net.lost)]))
    conditions = [
        _same(f"t.{quote_identifier(field.name)}", f"s.{name}", field.type)
        for name, field in zip(lost, net.lost.schema, strict=True)
    ]
    merger = commit.merge(pa.table(columns), [*conditions, "s.lost"], names)
    merger.when_matched_delete("s.lost")
    values = {quote_identifier(name): f"s.c{index}" for index, name in enumerate(names)}
    merger.when_not_matched_insert(values, "not s.lost")
    metrics = commit.run(merger)
    if metrics["num_target_rows_deleted"] != len(found):
        raise LakeTableError(
            f"{commit.table.table_uri}: other rows were taken away than those that were counted"
        )


def _of(table: pa.Table, names: list[str]) -> pa.Schema:
    return table.select(names).schema


def _same(target: str, source: str, kind: pa.DataType) -> str:
    """NULL equals NULL, and the join is still one by hash. Only within a list does -0.0 differ from 0.0."""
    if pa.types.is_floating(kind):
        target, source = f"make_array({target})", f"make_array({source})"
    return f"({target} is not distinct from {source})"
