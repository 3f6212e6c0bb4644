"""lake/schema_evolution/translation.py: changes and lake rows from one relation of a table into the next."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import commit_snapshot
from airflow_provider_pgrepl.replication.lake.delta.table import app_id, open_table, read_position
from airflow_provider_pgrepl.replication.lake.schema_evolution.evolution import Evolution
from airflow_provider_pgrepl.replication.lake.schema_evolution.timeline import read_relations
from airflow_provider_pgrepl.replication.lake.schema_evolution.translation import evolved, translated
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column, Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.values import lake_schema
from tests.support.changes import table_of
from tests.support.model import Change

PIPELINE = Pipeline(name="p", lake="/nowhere", tables=("public.t",))
ID = Column("id", 1, 23, -1, "integer", is_key=True)
GONE = Column("gone", 2, 25, -1, "text")
R = Column("r", 3, 700, -1, "real")
ADDED = Column("added", 5, 23, -1, "integer", missing="7")
BEFORE = Relation(7, TableName("public", "t"), (ID, GONE, R))
AFTER = replace(
    BEFORE,
    columns=(replace(ID, type_oid=20), replace(R, type_oid=701), ADDED),
    dropped=(GONE,),
)
CHANGES = [
    Change("I", ("1", "x", "1.1"), None, commit_lsn=1),
    Change("U", ("1", None, None), None, (1, 2), 1),
    Change("T", ("",), None, commit_lsn=1),
    Change("U", ("2", "y", "0"), ("1", None, None), commit_lsn=2),
    Change("U", ("2", None, "0"), None, (1,), 2),
    Change("D", None, ("2", None, None), commit_lsn=2),
]


def texts_of(changes):
    return [(row["op"], row["new"], row["old"], row["unchanged"]) for row in changes.to_pylist()]


def test_changes_read_as_had_the_table_always_been_so():
    assert texts_of(translated(table_of(CHANGES), BEFORE, AFTER)) == [
        ("I", ["1", "1.100000023841858", "7"], None, None),
        ("U", ["1", None, "7"], None, [1]),
        ("T", [""], None, None),
        ("U", ["2", "0", "7"], ["1", None, None], None),
        ("U", ["2", "0", "7"], None, None),
        ("D", None, ["2", None, None], None),
    ]


def test_whole_old_rows_have_the_added_column_too():
    before, after = (replace(relation, replica_identity="f") for relation in (BEFORE, AFTER))
    changes = table_of([Change("D", None, ("1", "x", "1.1"), commit_lsn=1)])
    assert texts_of(translated(changes, before, after)) == [
        ("D", None, ["1", "1.100000023841858", "7"], None)
    ]


def test_a_slice_of_changes_is_translated_like_the_whole():
    whole = table_of(CHANGES)
    assert texts_of(translated(whole.slice(3, 2), BEFORE, AFTER)) == texts_of(
        translated(whole, BEFORE, AFTER).slice(3, 2)
    )


def test_lake_rows_get_the_default_and_wider_types_and_keep_what_was_dropped():
    rows = pa.table(
        {
            "id": pa.array([1, 2], pa.int32()),
            "gone": ["x", None],
            "r": pa.array([1.1, None], pa.float32()),
            "_pgrepl_commit_lsn": [5, 6],
            "_pgrepl_commit_ts": pa.array([0, 1], pa.timestamp("us", "UTC")),
        }
    )
    found = evolved(rows, BEFORE, AFTER, PIPELINE.options(AFTER.table))
    assert found.schema == lake_schema(AFTER, PIPELINE.options(AFTER.table))
    assert found.drop_columns(["_pgrepl_commit_ts"]).to_pylist() == [
        {"id": 1, "gone": "x", "r": 1.100000023841858, "added": 7, "_pgrepl_commit_lsn": 5},
        {"id": 2, "gone": None, "r": None, "added": 7, "_pgrepl_commit_lsn": 6},
    ]


def test_evolved_table_says_in_which_relation_the_changes_above_its_position_begin(tmp_path: Path):
    """DDL may come in the middle of the next transaction, and the process may end before that is applied."""
    options = PIPELINE.options(BEFORE.table)
    uri, app = f"{tmp_path}/public/t", app_id("p", Epoch(1))
    schema = lake_schema(BEFORE, options)
    commit_snapshot(uri, schema, [], LSN(10), "p", Epoch(1), relation_version=BEFORE.version)
    table = open_table(uri)
    assert read_relations(table) == (BEFORE.version, BEFORE.version)
    Evolution(BEFORE, AFTER, options, str(tmp_path), app).evolve(table, None)
    assert read_relations(open_table(uri)) == (AFTER.version, BEFORE.version)
    assert read_position(open_table(uri), app) == 10
