"""Policies of deletes and TRUNCATE, and tables without key: as a plain model has it, however cut."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import replace
from itertools import cycle

import pyarrow as pa
import pytest
from deltalake import QueryBuilder
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import commit_snapshot
from airflow_provider_pgrepl.replication.lake.delta.table import app_id, open_table
from airflow_provider_pgrepl.replication.lake.files.compaction import compact
from airflow_provider_pgrepl.replication.lake.merge.keyless import net_rows
from airflow_provider_pgrepl.replication.lake.merge.merge import apply_changes
from airflow_provider_pgrepl.replication.lake.merge.soft_deletes import held_keys
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.tables import PARTITION
from airflow_provider_pgrepl.replication.values import lake_schema
from tests.property.histories import COLUMNS, KEY, ODD, batches, partitions, steps, strategies, take_step
from tests.support.changes import History, column, relation, table_of
from tests.support.examples import examples
from tests.support.lake_model import LakeModel
from tests.support.model import Change, Row
from tests.support.partitioned import check_partitions

KEYLESS = (column("a"), column("v", "double precision"), column("b"), column("doc"))
FLOATS = {"": "-0", "x": "0", "y": "NaN", ODD: "1.5", None: None}
Held = dict[Row, tuple[Row, bool, int]]
POLICIES = [("hard", "ignore"), ("soft", "apply"), ("soft", "ignore")]


@st.composite
def histories(draw: st.DrawFn, *, key: tuple[int, ...] = KEY) -> tuple[list[Change], list[int], Relation]:
    """Changes from the first insert on, the commits at which to cut them, and what they are changes of."""
    full = not key or draw(st.booleans())
    history = History(len(COLUMNS), key, full=full)
    for step in draw(st.lists(steps, max_size=40)):
        take_step(history, step)
    changes = history.changes if key else [with_floats(change) for change in history.changes]
    lsns = sorted({change.commit_lsn for change in changes})
    cuts = draw(st.lists(st.sampled_from(lsns), max_size=6)) if lsns else []
    of = relation(*(COLUMNS if key else KEYLESS), identity="f" if full else "d")
    return changes, sorted(cuts), of


def with_floats(change: Change) -> Change:
    if change.op == "T":
        return change
    return replace(change, new=floats(change.new), old=floats(change.old))


def floats(row: Row | None) -> Row | None:
    return row and (row[0], FLOATS[row[1]], *row[2:])


def pipeline_of(lake: str, deletes: str, truncate: str, **more: object) -> Pipeline:
    return Pipeline(
        name="p",
        lake=lake,
        tables=("public.t",),
        deletes=deletes,
        truncate=truncate,
        commit_ts_column=False,
        **more,
    )


def expected(changes: list[Change], of: Relation, deletes: str, truncate: str) -> Counter[tuple[object, ...]]:
    key = tuple(n for n, of_key in enumerate(of.columns) if of_key.is_key)
    model = LakeModel(
        key, full=of.replica_identity == "f", soft=deletes == "soft", ignoring=truncate == "ignore"
    )
    model.apply(changes)
    return Counter(model.rows())


def distinguished(
    rows: Counter[tuple[object, ...]], changes: list[Change], of: Relation, deletes: str
) -> Counter[tuple[object, ...]]:
    """Return rows as far as the stream distinguishes them, without LSNs under FULL.

    If two rows hold a key temporarily, a change may be of either, and otherwise equal rows may trade the key.
    It cannot be determined which of the two is gone, and with which values."""
    if of.replica_identity != "f":
        return rows
    key = [n for n, column in enumerate(of.columns) if column.is_key]
    is_ambiguous = deletes == "soft" and holds_a_key_twice(changes, key)
    return Counter(
        (*(row[n] for n in key), True) if is_ambiguous and row[-2] else row[:-1] for row in rows.elements()
    )


def holds_a_key_twice(changes: list[Change], key: list[int]) -> bool:
    held: Counter[tuple[object, ...]] = Counter()
    for change in changes:
        if change.op == "T":
            held.clear()
            continue
        if change.old is not None:
            held[tuple(change.old[n] for n in key)] -= 1
        if change.new is not None:
            new = tuple(change.new[n] for n in key)
            held[new] += 1
            if held[new] > 1:
                return True
    return False


def counted(found: pa.Table) -> Counter[tuple[object, ...]]:
    """Return rows as the model has them; a floating value as its text, so that NaN equals itself."""
    texts = {float: lambda value: f"{value:g}" if value == value else "NaN"}
    return Counter(
        tuple(texts.get(type(value), lambda same: same)(value) for value in row.values())
        for row in found.to_pylist()
    )


def put(lake: Held, batch: list[Change], of: Relation, policy: tuple[str, str]) -> Held:
    """Return the rows after a MERGE by key, in plain Python. A row that is not found fails the test."""
    deletes, truncate = policy
    held = held_keys(table_of(batch), of, truncate)
    after = dict(lake)
    if held.truncated >= 0:
        lsn = batch[held.truncated].commit_lsn
        after = {key: (row, True, lsn if not gone else old) for key, (row, gone, old) in lake.items()}
    cells = [held.texts(index) for index in range(len(of.columns))]
    keys, origins = ([held.key_texts(n, codes) for n in range(2)] for codes in (held.code, held.origin))
    for n in range(len(held)):
        key, origin = (tuple(texts[n].as_py() for texts in both) for both in (keys, origins))
        assert not held.in_lake[n] or not lake[key][1]
        row = tuple(
            lake[origin][0][i] if keep[n] else texts[n].as_py() for i, (texts, keep) in enumerate(cells)
        )
        after[key] = (row, bool(held.gone[n]), batch[held.since[n]].commit_lsn)
    return after if deletes == "soft" else {key: entry for key, entry in after.items() if not entry[1]}


def without_key(changes: list[Change], cuts: list[int], of: Relation, pipeline: Pipeline) -> pa.Table:
    lake = lake_schema(of, pipeline.options(of.table)).empty_table()
    for batch in batches(changes, cuts):
        net = net_rows(table_of(batch), of, pipeline.options(of.table))
        lake = pa.concat_tables([net.remaining(lake), net.gained])
    return lake


def merged(
    changes: list[Change],
    cuts: list[int],
    of: Relation,
    slice_bytes: int,
    policy: tuple[str, str],
    merges: list[str],
    by: str | None,
) -> pa.Table:
    with tempfile.TemporaryDirectory() as folder:
        pipeline = pipeline_of(folder, *policy, per_table={"public.t": {"partition_by": by}})
        uri, app = f"{folder}/t", app_id("p", Epoch(1))
        commit_snapshot(uri, lake_schema(of, pipeline.options(of.table)), [], LSN(1), "p", Epoch(1))
        for cut, merge in zip([*cuts, 10**9], cycle(merges), strict=False):
            again = [change for change in changes if change.commit_lsn <= cut]
            options = replace(pipeline, merge=merge).options(of.table)
            table = open_table(uri)
            apply_changes(table, table_of(again), of, options, app, slice_bytes + 1)
            if by is not None:
                compact(table, app, ("b",), at_least=2, gone_share=0.0)
        check_partitions(uri, of, pipeline.options(of.table))
        held = (name for name in lake_schema(of, pipeline.options(of.table)).names if name != PARTITION)
        names = ", ".join(f'"{name}"' for name in held)
        query = f"select {names} from t"
        return pa.table(QueryBuilder().register("t", open_table(uri)).execute(query).read_all())


@pytest.mark.parametrize("policy", POLICIES)
@given(histories())
@examples(200)
def test_rows_after_changes_equal_the_model_whatever_the_policy_and_the_cuts(
    policy: tuple[str, str], example: tuple
) -> None:
    changes, cuts, of = example
    lake: Held = {}
    for batch in batches(changes, cuts):
        lake = put(lake, batch, of, policy)
    found = ((*row, gone, lsn) if policy[0] == "soft" else (*row, lsn) for row, gone, lsn in lake.values())
    model = expected(changes, of, *policy)
    assert distinguished(Counter(found), changes, of, policy[0]) == distinguished(
        model, changes, of, policy[0]
    )


@pytest.mark.parametrize("truncate", ["apply", "ignore"])
@given(histories(key=()))
@examples(120)
def test_rows_without_key_after_changes_equal_the_model_whatever_the_cuts(
    truncate: str, example: tuple
) -> None:
    changes, cuts, of = example
    found = without_key(changes, cuts, of, pipeline_of("/nowhere", "hard", truncate))
    assert counted(found) == expected(changes, of, "hard", truncate)


@pytest.mark.parametrize("policy", POLICIES)
@given(histories(), st.integers(0, 100), strategies, partitions)
@examples(60)
def test_lake_table_equals_the_model_whatever_the_policy_and_the_slices(
    policy: tuple[str, str], example: tuple, slice_bytes: int, merges: list[str], by: str | None
) -> None:
    changes, cuts, of = example
    found = counted(merged(changes, cuts, of, slice_bytes, policy, merges, by))
    model = expected(changes, of, *policy)
    assert distinguished(found, changes, of, policy[0]) == distinguished(model, changes, of, policy[0])


@pytest.mark.parametrize("truncate", ["apply", "ignore"])
@given(histories(key=()), st.integers(0, 100), strategies, partitions)
@examples(60)
def test_lake_table_without_key_equals_the_model_whatever_the_slices(
    truncate: str, example: tuple, slice_bytes: int, merges: list[str], by: str | None
) -> None:
    changes, cuts, of = example
    policy = ("hard", truncate)
    found = counted(merged(changes, cuts, of, slice_bytes, policy, merges, by))
    model = expected(changes, of, *policy)
    assert distinguished(found, changes, of, policy[0]) == distinguished(model, changes, of, policy[0])
