"""lake/applying/copied_choices.py: which choices hold for a table, its copy's or the pipeline file's."""

from __future__ import annotations

from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.lake.applying.copied_choices import changed_choices, pipeline_of
from airflow_provider_pgrepl.replication.relation import ColumnName, TableName

T = TableName("public", "t")


def pipeline(**options) -> Pipeline:
    return Pipeline(name="p", lake="/nowhere", tables=("public.*",), **options)


def test_what_shapes_the_table_is_that_of_its_copy_and_the_rest_that_of_the_file():
    copied = pipeline(
        types={"public.t.n": "string"},
        infinity="null",
        per_table={"public.t": {"deletes": "soft", "truncate": "error"}},
    )
    running = pipeline(
        deletes="hard",
        history=True,
        on_drift="error",
        slice_bytes=7,
        per_table={"public.u": {"truncate": "ignore"}},
    )
    found = pipeline_of(running, copied.to_json(), T)
    policy = found.policy(T)
    assert (policy.deletes, policy.history, policy.truncate, policy.on_drift) == (
        "soft",
        False,
        "apply",
        "error",
    )
    assert str(found.choice(ColumnName(T, "n")).lake_type) == "string"
    assert (found.infinity, found.slice_bytes) == ("null", 7)
    assert changed_choices(running, copied.to_json(), T) == ["types", "infinity", "deletes", "history"]


def test_what_is_said_of_other_tables_is_no_change():
    copied = pipeline()
    running = pipeline(
        text_columns=("public.u.a",), per_table={"public.u": {"deletes": "soft"}}, truncate="ignore"
    )
    assert changed_choices(running, copied.to_json(), T) == []


def test_a_table_copied_by_an_older_version_is_as_the_file_says():
    running = pipeline(deletes="soft")
    assert pipeline_of(running, None, T) is running
    assert changed_choices(running, None, T) == []
