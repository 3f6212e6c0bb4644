"""The example DAGs that people start by a form: what the form offers, and what a run then does."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg2.extensions
import pytest

from airflow_provider_pgrepl.replication.changelog.layout import changelog_uri
from airflow_provider_pgrepl.replication.changelog.writer import create_changelog
from airflow_provider_pgrepl.replication.state.tables import TableState
from tests.airflow.conftest import SECRET
from tests.support.changelogs import epoch_record
from tests.support.recorded import Recorded

ROOT = Path(__file__).parents[2]
FIELDS = {"name": "shop", "lake": "/nowhere", "trust_table_owners": True}

pytestmark = pytest.mark.usefixtures("airflow_db")


@pytest.fixture
def pipeline_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "pipeline.json"
    file.write_text(json.dumps({**FIELDS, "tables": ["public.b", "public.a"]}), encoding="utf-8")
    monkeypatch.setenv("PGREPL_PIPELINE_FILE", str(file))
    return file


@pytest.fixture
def submitted(tmp_path: Path, pipeline_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which a stand-in for spark-submit records the arguments of the snapshot app."""
    lake = str(tmp_path / "lake")
    create_changelog(changelog_uri(lake), replace(epoch_record(), pipeline="shop"))
    fields = json.loads(pipeline_file.read_text(encoding="utf-8"))
    pipeline_file.write_text(json.dumps({**fields, "lake": lake}), encoding="utf-8")
    script, record = tmp_path / "spark-submit", tmp_path / "submitted"
    script.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >"{record}"\n', encoding="utf-8")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return record


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch, dsn: str, pg: Any) -> Recorded:
    """A source with tables, some of them replicated, and Airflow's connection to it."""
    for table in ("a", "b", "c"):
        pg.cursor().execute(f"create table {table} (id int primary key)")
    pg.cursor().execute(
        "create schema x; create table x.y (id int primary key); create table x.z (id int primary key)"
    )
    parts = psycopg2.extensions.parse_dsn(dsn)
    fields = {"conn_type": "pgrepl", "host": parts["host"], "port": int(parts["port"]), "password": SECRET}
    named = {"schema": parts["dbname"], "login": parts["user"]}
    monkeypatch.setenv("AIRFLOW_CONN_PGREPL_DEFAULT", json.dumps({**fields, **named}))
    return Recorded(dsn, "public.a", "public.b", "public.c")


def dag(name: str) -> Any:
    from airflow.dag_processing.bundles.manager import DagBundlesManager
    from airflow.dag_processing.dagbag import DagBag, sync_bag_to_db

    bag = DagBag(str(ROOT / "dags" / f"{name}.py"))
    assert bag.import_errors == {}
    DagBundlesManager().sync_bundles_to_db()
    sync_bag_to_db(bag, "dags-folder", None)
    return bag.dags[f"pgrepl_{name}"]


def states(run: Any) -> dict[str, str]:
    return {task.task_id: task.state for task in run.get_task_instances()}


@pytest.mark.parametrize("name", ["resnapshot", "tables"])
def test_dag_is_tagged_with_its_pipeline(name: str, pipeline_file: Path) -> None:
    assert sorted(dag(name).tags) == ["pgrepl", "pipeline:shop"]
    pipeline_file.unlink()
    assert sorted(dag(name).tags) == ["pgrepl"]


@pytest.mark.parametrize("name", ["resnapshot", "tables"])
def test_the_form_offers_the_tables_that_the_pipeline_lists(pipeline_file: Path, name: str) -> None:
    assert dag(name).params.get_param("tables").schema["examples"] == ["public.a", "public.b"]
    assert "more_tables" in dag(name).params
    pipeline_file.write_text(json.dumps({**FIELDS, "tables": ["public.a", "sales.*"]}), encoding="utf-8")
    assert "examples" not in dag(name).params.get_param("tables").schema
    assert "more_tables" not in dag(name).params
    pipeline_file.unlink()
    assert "examples" not in dag(name).params.get_param("tables").schema


def test_the_picked_tables_and_the_reason_reach_the_application_and_the_log(
    pipeline_file: Path, submitted: Path, shop: Recorded, capfd: pytest.CaptureFixture[str]
) -> None:
    conf = {"tables": ["public.a"], "more_tables": ["public.c"], "reason": "looked odd"}
    run = dag("resnapshot").test(run_conf=conf)
    assert run.state == "success"
    assert submitted.read_text().splitlines()[-2:] == ["--tables", "public.a,public.c"]
    assert "reason: looked odd" in "".join(capfd.readouterr())
    (task,) = run.get_task_instances()
    found = {"tables": ["public.a", "public.c"], "reason": "looked odd"}
    assert task.xcom_pull(task_ids="resnapshot") == found


@pytest.mark.parametrize("conf", [{}, {"tables": None}])
def test_a_run_without_tables_takes_none(pipeline_file: Path, submitted: Path, conf: dict[str, Any]) -> None:
    run = dag("resnapshot").test(run_conf=conf)
    assert states(run) == {"resnapshot": "failed"}
    assert not submitted.exists()


@pytest.mark.parametrize("conf", [{"tables": "public.a"}, {"tables": [1]}])
def test_a_run_with_what_is_no_list_of_tables_does_not_begin(
    pipeline_file: Path, submitted: Path, conf: dict[str, Any]
) -> None:
    from airflow.sdk.exceptions import ParamValidationError

    with pytest.raises(ParamValidationError):
        dag("resnapshot").test(run_conf=conf)
    assert not submitted.exists()


@pytest.mark.parametrize(("tables", "argument"), [(["x.y", "x.z"], "--add=x.y,x.z"), ([], "--add=")])
@pytest.mark.thorough("the same test, of two tables", "tables1---add=")
def test_adding_starts_the_application_and_nothing_else(
    pipeline_file: Path, submitted: Path, shop: Recorded, tables: list[str], argument: str
) -> None:
    run = dag("tables").test(run_conf={"action": "add", "tables": tables})
    assert submitted.read_text().splitlines()[-1] == argument
    others = dict.fromkeys(("pause", "resume", "retry", "maintain", "remove"), "skipped")
    assert states(run) == {"choose": "success", "add": "success", **others}


def test_tables_are_paused_and_drift_is_found_by_the_example_dags(
    pipeline_file: Path, shop: Recorded, pg: Any
) -> None:
    assert dag("drift").test().state == "success"
    assert dag("tables").test(run_conf={"action": "pause", "tables": ["public.a"]}).state == "success"
    assert shop.record("public.a").state is TableState.PAUSED
    pg.cursor().execute("drop table b")
    assert states(dag("drift").test()) == {"drift": "failed"}
    assert shop.record("public.b").state is TableState.ERRORED
