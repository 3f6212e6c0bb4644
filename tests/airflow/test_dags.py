"""The example DAGs."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.pages import blocks

ROOT = Path(__file__).parents[2]
NAMES = (
    *("snapshot", "replicate", "publish", "resnapshot", "drift", "health", "tables", "verify", "read_lake"),
    *("check_migration", "skip"),
)


def import_dags(folder: Path) -> Any:
    """Import DAGs where nothing can be reached and no connection exists."""
    from airflow.dag_processing.dagbag import DagBag

    def refuse(*_: object) -> None:
        raise AssertionError("importing a DAG must not connect to anything")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.delenv("AIRFLOW_CONN_PGREPL_DEFAULT", raising=False)
        patch.setenv("PGREPL_PIPELINE_FILE", "/nowhere/pipeline.json")
        return DagBag(str(folder))


@pytest.fixture(scope="module")
def bag(airflow_db: None) -> Any:
    """The example DAGs."""
    return import_dags(ROOT / "dags")


def test_the_example_dags_import_without_connections_or_a_pipeline_file(bag: Any) -> None:
    assert bag.import_errors == {}
    assert set(bag.dags) == {f"pgrepl_{name}" for name in NAMES}


def test_dag_in_readme_can_be_copied(airflow_db: None, tmp_path: Path) -> None:
    (dag,) = blocks((ROOT / "README.md").read_text("utf-8"), "python")
    (tmp_path / "shop.py").write_text(dag, encoding="utf-8")
    assert len([line for line in dag.splitlines() if line.strip()]) <= 15
    found = import_dags(tmp_path)
    assert found.import_errors == {}
    assert found.dags["shop_to_lake"].task_ids == ["snapshot", "replicate"]


@pytest.mark.parametrize("name", ["snapshot", "resnapshot", "tables"])
def test_form_field_that_may_stay_empty_is_not_marked_as_required(bag: Any, name: str) -> None:
    """Airflow marks what may not be null."""
    assert "null" in bag.dags[f"pgrepl_{name}"].params.get_param("tables").schema["type"]


@pytest.mark.parametrize("name", ["replicate", "publish"])
def test_continuous_dag_gives_up_after_three_failed_runs(bag: Any, name: str) -> None:
    dag = bag.dags[f"pgrepl_{name}"]
    assert dag.schedule == "@continuous"
    assert dag.max_consecutive_failed_dag_runs == 3
    assert dag.get_task(name).retries > 0


@pytest.mark.parametrize("name", ["snapshot", "resnapshot"])
def test_tables_are_copied_by_one_run_at_a_time(bag: Any, name: str) -> None:
    assert bag.dags[f"pgrepl_{name}"].max_active_runs == 1


def test_tables_are_added_by_one_task_at_a_time_and_others_do_not_wait(bag: Any) -> None:
    """Adding tables copies them, which may take hours."""
    dag = bag.dags["pgrepl_tables"]
    assert dag.max_active_runs > 1
    limits = {task.task_id: task.max_active_tis_per_dag for task in dag.tasks}
    assert {name for name, limit in limits.items() if limit is not None} == {"add"}
    assert limits["add"] == 1


@pytest.mark.parametrize("name", NAMES)
def test_tasks_are_retried_for_as_long_as_airflow_may_take_to_start(bag: Any, name: str) -> None:
    """`airflow standalone` runs tasks before its API answers, which they need."""
    services = yaml.safe_load((ROOT / "docker-compose.yaml").read_text(encoding="utf-8"))["services"]
    limit_s = int(services["airflow"]["healthcheck"]["start_period"].removesuffix("s"))
    waits_s = {
        task.task_id: task.retries * task.retry_delay.total_seconds()
        for task in bag.dags[f"pgrepl_{name}"].tasks
    }
    assert {task_id for task_id, wait_s in waits_s.items() if wait_s < limit_s} == set()


def test_the_example_pipeline_is_a_valid_one() -> None:
    from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline

    pipeline = Pipeline.read(ROOT / "dags" / "pipeline.json")
    assert pipeline.conn_id == "pgrepl_default"


@pytest.mark.parametrize("name", ["snapshot", "replicate", "publish"])
def test_the_spark_applications_are_found(name: str) -> None:
    from airflow_provider_pgrepl.replication.runtime.spark_submit import application

    assert Path(application(name)).read_text(encoding="utf-8").startswith('"""')


FIELDS = {"name": "shop", "lake": "/lake", "tables": ("a.b",)}


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        ({"tabels": []}, "tabels: unknown key"),
        ({"types": {"a.b.c": "decimal(50,2)"}}, r"types\[\"a\.b\.c\"\]: 'decimal\(50,2\)'"),
        (
            {"per_table": {"a.b": {"history": "yes"}}},
            r"per_table\[\"a\.b\"\]\.history: 'yes' must be true or false",
        ),
        ({"per_column": {"a.b.c": {"infinty": "null"}}}, "infinty: unknown key"),
        ({"exclude_columns": ("a.b.c",), "text_columns": ("a.b.c",)}, "both list"),
    ],
)
def test_fields_that_cannot_be_are_refused_when_the_dag_is_parsed(choices: dict[str, Any], says: str) -> None:
    from airflow_provider_pgrepl.operators.snapshot import PgSnapshotOperator

    with pytest.raises(ValueError, match=says):
        PgSnapshotOperator(task_id="t", pipeline={**FIELDS, **choices})


@pytest.mark.parametrize(
    "pipeline",
    [
        {**FIELDS, "types": {"a.b.c": "{{ params.type }}"}},
        {**FIELDS, "tables": ("{% if params.all %}a.*{% else %}a.b{% endif %}",)},
        '{"name": "{{ params.name }}"}',
        "/nowhere/pipeline.json",
    ],
)
def test_templated_or_missing_pipeline_is_not_checked_at_parse_time(pipeline: Any) -> None:
    from airflow_provider_pgrepl.operators.snapshot import PgSnapshotOperator

    assert PgSnapshotOperator(task_id="t", pipeline=pipeline).pipeline == pipeline


def test_a_wrong_pipeline_fails_without_retries_and_names_the_key(tmp_path: Path, airflow_db: None) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    from airflow_provider_pgrepl.operators.replication import PgReplicationOperator

    file = tmp_path / "pipeline.json"
    file.write_text(json.dumps({"name": "shop", "lake": "/lake", "tables": ["a.b"], "tabels": []}))
    operator = PgReplicationOperator(task_id="t", pipeline=str(file))
    with pytest.raises(AirflowFailException, match="tabels: unknown key"):
        operator.execute({})
