"""Collapse, whatever the history, however it is cut and however often parts of it come again."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from itertools import cycle

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import commit_snapshot
from airflow_provider_pgrepl.replication.lake.delta.table import app_id, open_table
from airflow_provider_pgrepl.replication.lake.merge.collapse import collapse
from airflow_provider_pgrepl.replication.lake.merge.merge import apply_changes
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.values import lake_schema
from tests.property.histories import COLUMNS, KEY, batches, partitions, rows, steps, strategies, take_step
from tests.support.changes import History, relation, table_of
from tests.support.examples import examples
from tests.support.model import Change, Model, Row
from tests.support.partitioned import check_partitions


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Row], list[Change], Model, list[int], Relation]:
    """Rows of a snapshot, the changes after it, what they make of it, and the commits at which to cut."""
    full = draw(st.booleans())
    history = History(len(COLUMNS), KEY, full=full)
    for step in draw(st.lists(st.tuples(st.just("insert"), rows), max_size=6)):
        take_step(history, step)
    snapshot = list(history.model.rows.values())
    history.changes.clear()
    history.commit()
    for step in draw(st.lists(steps, max_size=40)):
        take_step(history, step)
    lsns = sorted({change.commit_lsn for change in history.changes})
    cuts = draw(st.lists(st.sampled_from(lsns), max_size=4)) if lsns else []
    of = relation(*COLUMNS, identity="f" if full else "d")
    return snapshot, history.changes, history.model, sorted(cuts), of


def apply_to_rows(lake: list[Row], batch: list[Change], of: Relation) -> list[Row]:
    """Return the rows after a MERGE on the origin key, in plain Python. Fails if a row is not found."""
    collapsed = collapse(table_of(batch), of)
    by_key = {} if collapsed.overwrite else {(row[0], row[2]): row for row in lake}
    assert collapsed.overwrite or len(by_key) == len(lake)
    result = []
    for n in range(len(collapsed)):
        origin = tuple(collapsed.key_texts(i, collapsed.origin[n : n + 1])[0].as_py() for i in range(2))
        before = by_key.pop(origin) if collapsed.origin[n] >= 0 else None
        if collapsed.final[n] >= 0:
            entry = collapsed.final[n : n + 1] * 0 + n
            cells = [collapsed.texts(i, entry) for i in range(len(COLUMNS))]
            result.append(
                tuple(before[i] if keep is not None else t[0].as_py() for i, (t, keep) in enumerate(cells))
            )
    return [*result, *by_key.values()]


@given(histories())
@examples(400)
def test_collapse_equals_the_dictionary_model_for_any_history_in_any_batches(example: tuple) -> None:
    lake, changes, model, cuts, of = example
    for batch in batches(changes, cuts):
        lake = apply_to_rows(lake, batch, of)
    assert sorted(lake, key=repr) == sorted(model.rows.values(), key=repr)


def lake_rows(table: DeltaTable) -> list[Row]:
    found = QueryBuilder().register("t", table).execute("select a, v, b, doc from t").read_all()
    return [tuple(row.values()) for row in pa.table(found).to_pylist()]


@given(histories(), st.integers(0, 100), strategies, partitions)
@examples(80)
def test_lake_table_equals_the_dictionary_model_with_any_replay_and_any_slices(
    example: tuple, slice_bytes: int, merges: list[str], by: str | None
) -> None:
    snapshot, changes, model, cuts, of = example
    with tempfile.TemporaryDirectory() as folder:
        per_table = {"public.t": {"partition_by": by}}
        pipeline = Pipeline(name="p", lake=folder, tables=("public.t",), per_table=per_table)
        uri, app = f"{folder}/t", app_id("p", Epoch(1))
        commit_snapshot(uri, lake_schema(of, pipeline.options(of.table)), [], LSN(1), "p", Epoch(1))
        first = [Change("I", new=row, commit_lsn=2) for row in snapshot]
        apply_changes(open_table(uri), table_of(first), of, pipeline.options(of.table), app, slice_bytes + 1)
        for cut, merge in zip([*cuts, 10**9], cycle(merges), strict=False):
            again = [change for change in changes if change.commit_lsn <= cut]
            table = open_table(uri)
            options = replace(pipeline, merge=merge).options(of.table)
            applied = apply_changes(table, table_of(again), of, options, app, slice_bytes + 1)
            assert applied.position == max((c.commit_lsn for c in again), default=2 if snapshot else 1)
        check_partitions(uri, of, pipeline.options(of.table))
        assert sorted(lake_rows(open_table(uri)), key=repr) == sorted(model.rows.values(), key=repr)
