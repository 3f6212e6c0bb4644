"""The operators under a real Airflow: `dag.test()`, and `airflow tasks test` where a kill is wanted."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil  # type: ignore[import-untyped]
import pytest

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.operators.resnapshot import PgResnapshotOperator
from airflow_provider_pgrepl.operators.snapshot import PgSnapshotOperator
from tests.airflow import airflow_program
from tests.airflow.conftest import HOME, LAKE, SECRET, Journal, eventually, is_alive

pytestmark = pytest.mark.usefixtures("airflow_db")

DAGS = Path(__file__).parent / "dags"


def run_dag(dag_id: str, conf: dict[str, Any] | None = None) -> Any:
    from airflow.dag_processing.dagbag import DagBag

    bag = DagBag(str(DAGS))
    assert bag.import_errors == {}
    return bag.dags[dag_id].test(run_conf=conf)


def task_of(run: Any) -> Any:
    return run.get_task_instances()[0]


@pytest.fixture
def behave(monkeypatch: pytest.MonkeyPatch, journal: Journal) -> Any:
    def choose(*arguments: str) -> None:
        monkeypatch.setenv("STAND_IN_ARGS", " ".join(["--journal", str(journal.path), *arguments]))

    return choose


def test_caught_up_replication_succeeds(behave: Any, journal: Journal) -> None:
    behave()
    assert run_dag("stand_in").state == "success"
    [event] = journal.events()
    assert "--until caught-up" in " ".join(event["argv"])


def test_the_snapshot_gets_its_tables_and_flags(behave: Any, journal: Journal) -> None:
    behave("--exit", "0")
    assert run_dag("stand_in_snapshot").state == "success"
    [event] = journal.events()
    assert "--resync public.a,public.b --new-epoch" in " ".join(event["argv"])


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ({"tables": ["public.a", "public.b"], "resync": True}, ["--resync", "public.a,public.b"]),
        ({"tables": "public.a", "resync": "False"}, ["--tables", "public.a"]),
        ({"resync": "True"}, ["--resync"]),
        # As a template renders without a table.
        ({"tables": "[]", "resync": True}, "tables: none was named"),
        ({"tables": "None", "resync": True}, "tables: none was named"),
        ({"tables": "[]", "resync": True, "new_epoch": "true"}, ["--resync"]),
        ({"tables": "[]", "new_epoch": True}, ["--new-epoch"]),
        ({"tables": "[]"}, []),
        ({"adopt": "true"}, ["--adopt"]),
        ({"tables": ["public.a", "public.b"], "adopt": True}, ["--adopt", "public.a,public.b"]),
        ({"tables": "[]", "adopt": True}, "tables: none was named"),
        ({"tables": "public.a", "adopt": True, "resync": True}, "adopt cannot be set with resync"),
        ({"adopt": True, "new_epoch": True}, "adopt cannot be set with resync"),
    ],
)
def test_resync_or_adoption_of_no_named_table_takes_no_other_table(
    given: dict[str, Any], arguments: Any
) -> None:
    operator = PgSnapshotOperator(task_id="snapshot", pipeline="p.json", **given)
    if isinstance(arguments, str):
        with pytest.raises(ConfigError, match=arguments):
            operator.app_arguments()
    else:
        assert operator.app_arguments() == arguments


def test_native_template_without_a_result_begins_no_new_epoch() -> None:
    operator = PgSnapshotOperator(task_id="s", pipeline="p.json", tables="{{ found }}", resync=True)
    operator.tables = None
    with pytest.raises(ConfigError, match="tables: none was named"):
        operator.app_arguments()


def test_resnapshot_compares_if_it_is_a_resync() -> None:
    operator = PgResnapshotOperator(task_id="r", pipeline="p.json", tables=["public.a"], resync="True")
    assert operator.app_arguments() == ["--resync", "public.a"]


@pytest.mark.parametrize(
    ("code", "status", "tries"), [(1, "different", 1), (2, "not_compared", 2), (1, None, 2), (0, "equal", 1)]
)
@pytest.mark.thorough("the same test, without a result", "2-not_compared-2")
def test_verification_fails_for_good_only_if_a_table_differs(
    behave: Any, journal: Journal, code: int, status: str | None, tries: int
) -> None:
    """Without a result, Spark has crashed: it ends with 1, too."""
    report = {"tables": [{"table": "public.a", "status": status}]} if status else None
    behave("--exit", str(code), f"--result={json.dumps(report, separators=(',', ':')) if report else ''}")
    run = run_dag("stand_in_verify")
    assert run.state == ("failed" if code else "success")
    assert len(journal.pids()) == tries
    assert task_of(run).xcom_pull(task_ids="verify") == report
    assert "--timeout=600 --tables public.a --check=text --sample=1% --show-keys --repair" in " ".join(
        journal.events()[0]["argv"]
    )


def test_templates_are_filled_in_at_any_depth_of_a_pipeline(behave: Any, journal: Journal) -> None:
    behave("--exit", "0")
    assert run_dag("stand_in_choices").state == "success"
    [event] = journal.events()
    given: Any = event["pipeline"]
    assert given["tables"] == ["public.orders", "public.audit"]
    assert given["lake"] == f"{LAKE}/audit"
    assert given["types"] == {"public.orders.total": "decimal(20,4)"}
    assert (given["text_columns"], given["exclude_columns"]) == (
        ["public.orders.grid"],
        ["public.orders.secret"],
    )
    assert given["per_column"] == {"public.orders.due": {"infinity": "null"}}
    assert given["per_table"] == {"public.orders": {"history": True, "deletes": "soft"}}


def test_a_choice_that_a_template_fills_in_wrongly_fails_without_retries(
    behave: Any, journal: Journal, capfd: pytest.CaptureFixture[str]
) -> None:
    behave("--exit", "0")
    run = run_dag("stand_in_choices", {"infinity": "nil"})
    assert run.state == "failed"
    assert task_of(run).try_number == 1
    assert journal.events() == []
    assert "infinity: 'nil' must be one of" in "".join(capfd.readouterr())


@pytest.mark.thorough("the parameter 75", "1-2")
@pytest.mark.parametrize(("code", "tries"), [(75, 2), (1, 2), (78, 1)])
def test_only_a_failure_that_a_retry_may_mend_is_retried(
    behave: Any, journal: Journal, code: int, tries: int
) -> None:
    behave("--exit", str(code))
    assert run_dag("stand_in").state == "failed"
    assert len(journal.pids()) == tries


def test_the_task_log_keeps_levels_and_one_time_and_the_failure_says_the_last_error(
    behave: Any, journal: Journal, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ours = {"pgrepl": 1, "at": datetime.now(UTC).isoformat(), "level": "ERROR"}
    lines = tmp_path / "lines"
    lines.write_text(
        json.dumps({**ours, "level": "WARNING", "text": "table public.b stops"})
        + "\n"
        + json.dumps({**ours, "text": "SlotError: the slot is lost\n  hint: begin a new epoch"})
        + "\n26/11/22 01:18:44 WARN Executor: stopping\n"
        + "\tat org.apache.spark.executor.Executor.run(Executor.scala:1)\n" * 30
    )
    behave("--lines", str(lines), "--exit", "78")
    assert run_dag("stand_in").state == "failed"
    printed = "".join(capfd.readouterr()).splitlines()

    def line_of(text: str) -> str:
        return next(line for line in printed if text in line)

    assert "[warning" in line_of("table public.b stops")
    assert "[error" in line_of("SlotError: the slot is lost")
    assert "[warning" in line_of("Executor: stopping")
    assert not [line for line in printed if "26/11/22" in line or '"pgrepl"' in line]
    failure = next(number for number, line in enumerate(printed) if "a retry will not help" in line)
    said = "\n".join(printed[failure:])
    assert "SlotError: the slot is lost" in said
    assert "hint: begin a new epoch" in said
    assert "Executor.scala" not in said


@pytest.mark.parametrize(
    ("dag_id", "task_id"), [("stand_in", "replicate"), ("stand_in_snapshot", "snapshot")]
)
@pytest.mark.thorough("test_publish_operator, test_app_attachment")
def test_operator_pushes_application_status_and_links_to_xcom(
    behave: Any, journal: Journal, dag_id: str, task_id: str
) -> None:
    behave("--exit", "0")
    task = task_of(run_dag(dag_id))
    for key in ("return_value", "status"):
        assert task.xcom_pull(task_ids=task_id, key=key) == {"tables": 3, "rows": 7, "lsn": "0/A"}
    lake = task.xcom_pull(task_ids=task_id, key="_link_LakeLink")
    assert lake.endswith(f"/pgrepl/lake?path={quote(LAKE, safe='')}")
    assert task.xcom_pull(task_ids=task_id, key="_link_StatusLink").endswith(f"/tasks/{task_id}/xcom")


def test_a_continuous_replication_that_ended_by_itself_is_started_again(
    behave: Any, journal: Journal
) -> None:
    behave("--exit", "0")
    assert run_dag("stand_in", {"mode": "continuous"}).state == "failed"
    assert len(journal.pids()) == 2


def test_the_password_shows_up_nowhere_in_airflow(
    behave: Any, journal: Journal, capfd: pytest.CaptureFixture[str]
) -> None:
    behave()
    task = task_of(run_dag("stand_in"))
    printed = "".join(capfd.readouterr())
    assert "DSN of" in printed, "the app's own words are in the task's log"
    assert SECRET not in printed
    database = sqlite3.connect(HOME / "airflow.db")
    everything = "\n".join(database.iterdump())
    assert task.run_id in everything
    assert SECRET not in everything
    rendered = database.execute(
        "select rendered_fields from rendered_task_instance_fields where run_id = ?", (task.run_id,)
    ).fetchall()
    assert "public.*" in json.dumps(rendered)
    for path in (HOME / "logs").rglob("*.log"):
        assert SECRET not in path.read_text(encoding="utf-8", errors="replace"), path


# --- in a process of its own ---


class Task:
    """`airflow tasks test stand_in replicate` for one run, which may be started again."""

    def __init__(self, run_id: str, mode: str, log: Path) -> None:
        log.touch()
        self._log = log
        self._process = airflow_program.start(
            ["tasks", "test", "stand_in", "replicate", run_id, "-t", json.dumps({"mode": mode})], log
        )

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def interrupt(self) -> None:
        """Interrupt the process as Ctrl-C does, and again each time that Python has lost the interrupt.

        An exception in the callback of a weak reference is only printed.
        """
        lost = -1
        while self._process.is_alive():
            if (now := self.log().count("Exception ignored in: <function WeakSet")) > lost:
                lost = now
                self.send_signal(signal.SIGINT)
            self._process.join(1)

    def wait(self) -> None:
        self._process.join(180)
        assert self._process.exitcode is not None, self.log()

    def kill(self) -> None:
        """With all that it started and that is still in its group."""
        assert self._process.pid is not None
        if self._process.is_alive():
            os.killpg(self._process.pid, signal.SIGKILL)
        self.wait()


def existing_run(run_id: str) -> str:
    """A run in the database: `tasks test` deletes the runs it makes up, and their state with them."""
    import pendulum
    from airflow.models.dagbag import DBDagBag
    from airflow.utils.session import create_session
    from airflow.utils.state import DagRunState
    from airflow.utils.types import DagRunTriggeredByType, DagRunType

    run_dag("stand_in")  # writes the DAG into the database
    now = pendulum.now("UTC")
    with create_session() as session:
        dag = DBDagBag().get_latest_version_of_dag("stand_in", session=session)
        dag.create_dagrun(
            run_id=run_id,
            logical_date=now,
            data_interval=(now, now),
            run_after=now,
            run_type=DagRunType.MANUAL,
            triggered_by=DagRunTriggeredByType.TEST,
            state=DagRunState.RUNNING,
            session=session,
        )
    return run_id


def test_a_killed_task_leaves_its_application_running_and_the_next_try_re_attaches(
    behave: Any, journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__PGREPL__UNFOLLOWED_TIMEOUT_S", "601")
    behave("--exit", "0")
    run_id = existing_run("manual__killed")
    behave()
    first = Task(run_id, "continuous", tmp_path / "first.log")
    second = None
    try:
        pid = journal.wait_for("started", count=2)
        eventually(lambda: "DSN of" in first.log(), "the first line of the app in the task's log")
        arguments = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
        assert SECRET not in json.dumps(arguments)
        assert "--unfollowed-timeout 601.0 " in " ".join(psutil.Process(pid).parent().cmdline())
        first.kill()

        second = Task(run_id, "continuous", tmp_path / "second.log")
        eventually(lambda: "Reconnecting to existing job" in second.log(), "re-attachment")
        assert is_alive(pid)
        second.send_signal(signal.SIGTERM)
        second.wait()
        assert "stopped gracefully" in second.log()
        assert not is_alive(pid)
        assert journal.pids("started")[1:] == [pid]
    finally:
        first.kill()
        if second is not None:
            second.kill()


@pytest.mark.thorough("the next try re-attaches; adoption in test_app_attachment")
def test_the_next_run_adopts_the_application_that_nobody_is_in_charge_of(
    behave: Any, journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it runs another version of a DAG bundle, which is another folder with a copy of the files."""
    behave()
    version = tmp_path / "version 1"
    version.mkdir()
    fields = {"name": "shop", "tables": ["public.*"], "lake": LAKE}
    (version / "pipeline.json").write_text(json.dumps(fields), encoding="utf-8")
    monkeypatch.setenv("STAND_IN_PIPELINE", str(version / "pipeline.json"))
    first = Task("manual__last_try", "continuous", tmp_path / "first.log")
    second = None
    try:
        pid = journal.wait_for("started")
        eventually(lambda: "DSN of" in first.log(), "the first line of the app in the task's log")
        first.kill()
        moved = version.rename(tmp_path / "version 2")
        monkeypatch.setenv("STAND_IN_PIPELINE", str(moved / "pipeline.json"))
        second = Task("manual__next_run", "continuous", tmp_path / "second.log")
        eventually(lambda: "Adopting the app that runs" in second.log(), "adoption")
        assert is_alive(pid)
        second.send_signal(signal.SIGTERM)
        second.wait()
        assert journal.pids("started") == [pid]
        assert journal.pids("stopped") == [pid]
    finally:
        first.kill()
        if second is not None:
            second.kill()


@pytest.mark.thorough("the task that re-attaches, above, is stopped by SIGTERM and stops its application")
def test_an_interrupted_task_stops_its_application(behave: Any, journal: Journal, tmp_path: Path) -> None:
    behave()
    task = Task("manual__interrupted", "continuous", tmp_path / "log")
    try:
        pid = journal.wait_for("started")
        eventually(lambda: "DSN of" in task.log(), "the first line of the app in the task's log")
        task.interrupt()
        task.wait()
        assert journal.pids("stopped") == [pid]
        assert not is_alive(pid)
    finally:
        task.kill()
