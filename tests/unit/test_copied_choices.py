"""settings/pipeline.py: which choices hold for a table, its copy's or the pipeline file's."""

from __future__ import annotations

from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline, changed_options, copied_options

T = TableName("public", "t")


def pipeline(**options) -> Pipeline:
    return Pipeline(name="p", lake="/nowhere", tables=("public.*",), **options)


def test_shape_options_come_from_snapshot_and_other_options_from_pipeline_file():
    copied = pipeline(
        types={"public.t.n": "string"},
        infinity="null",
        per_table={"public.t": {"deletes": "soft", "truncate": "error"}},
    )
    running = pipeline(
        deletes="hard",
        history=True,
        on_drift="error",
        per_table={"public.u": {"truncate": "ignore"}},
    )
    found = copied_options(running, copied.to_json(), T)
    policy = found.policy
    assert (policy.deletes, policy.history, policy.truncate, policy.on_drift) == (
        "soft",
        False,
        "apply",
        "error",
    )
    assert str(found.column("n").lake_type) == "string"
    assert found.column("m").infinity == "null"
    assert changed_options(running, copied.to_json(), T) == ["types", "infinity", "deletes", "history"]


def test_another_type_for_the_same_column_is_a_change():
    copied, running = pipeline(types={"public.t.n": "string"}), pipeline(types={"public.t.n": "decimal(9,2)"})
    assert changed_options(running, copied.to_json(), T) == ["types"]


def test_options_for_other_tables_are_not_reported_as_changes():
    copied = pipeline()
    running = pipeline(
        text_columns=("public.u.a",), per_table={"public.u": {"deletes": "soft"}}, truncate="ignore"
    )
    assert changed_options(running, copied.to_json(), T) == []


def test_a_table_copied_by_an_older_version_is_as_the_file_says():
    running = pipeline(deletes="soft")
    assert copied_options(running, None, T) == running.options(T)
    assert changed_options(running, None, T) == []
