"""The same app under the real spark-submit: a JVM in front of the Python driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_provider_pgrepl.spark_driver.process import AppState, LocalApp
from tests.airflow.conftest import LAKE, Journal, eventually, is_alive

pytestmark = pytest.mark.usefixtures("airflow_db")

HERE = Path(__file__).parent


def launch(journal: Journal, *arguments: str) -> LocalApp:
    from airflow_provider_pgrepl.operators.replication import PgReplicationOperator

    operator = PgReplicationOperator(
        task_id="replicate",
        pipeline={"name": "shop", "tables": ["public.*"], "lake": LAKE},
        application=str(HERE / "stand_in.py"),
        application_args=["--journal", str(journal.path), *arguments],
        master="local[1]",
        preflight=False,
        stop_timeout_s=60,
    )
    submitted: list[LocalApp] = []
    operator.execute_resumable = lambda context: submitted.append(  # type: ignore[method-assign]
        operator._following._adoption.place.find(operator.submit_job(context))
    )
    operator.execute({})
    operator._following._found.charge.release()
    return submitted[0]


def ended(app: LocalApp) -> AppState:
    eventually(lambda: app.status() is not AppState.RUNNING, "the end of the app")
    return app.status()


def test_sigterm_reaches_the_python_driver_and_not_the_jvm(journal: Journal) -> None:
    app = launch(journal)
    pid = journal.wait_for("started")
    app.stop()
    assert ended(app) is AppState.DONE
    assert journal.pids("stopped") == [pid]
    assert not is_alive(pid)
    app.remove()


def test_a_stop_that_comes_before_the_driver_is_there_is_not_lost(journal: Journal) -> None:
    app = launch(journal)
    eventually(lambda: Path(f"/proc/{app.pid}/task/{app.pid}/children").read_text(), "spark-submit")
    app.stop()
    ended(app)
    assert [pid for pid in journal.pids() if is_alive(pid)] == []
    app.remove()


def test_spark_submit_passes_the_exit_code_of_the_application_on(journal: Journal) -> None:
    app = launch(journal, "--exit", "78")
    assert ended(app) is AppState.FAILED
    assert app.exit_code() == 78
    assert "the last words" in [line.text for line in app.log().new_lines(ended=True)]
    app.remove()
