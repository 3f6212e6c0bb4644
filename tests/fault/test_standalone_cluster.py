"""A pipeline on a standalone cluster: a master and two workers of Spark, the lake on S3, executors killed."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.runtime.spark_submit import SMALL_JVM
from demo.spark_cluster import Cluster, executor_python, running_cluster
from tests.conftest import closing_connection
from tests.support.replicated import execute, kill, wait_until
from tests.support.standalone import OnCluster, kill_executor
from tests.support.traffic import INSERT_ONLY, SETUP, TABLES, traffic

COPIED = "public.copied"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture
def replicated(cluster: Cluster, s3_lake: str, dsn: str, tmp_path: Path) -> OnCluster:
    execute(
        dsn,
        *SETUP,
        "create table copied(id bigint primary key, text text)",
        "insert into copied select g, repeat('x', 100) from generate_series(1, 50000) g",
    )
    return OnCluster(
        cluster,
        dsn,
        tmp_path,
        (*TABLES, COPIED),
        lake=s3_lake,
        insert_only=INSERT_ONLY,
        merge="merge_on_read",
        snapshot_range_bytes=1 << 20,
    )


@pytest.mark.real_kill
def test_executors_share_work_and_lake_equals_source_after_executor_and_driver_are_killed(
    replicated, cluster, dsn, monkeypatch
):
    replicated.snapshot()
    assert min(replicated.logged_tasks().get(name, 0) for name in ("0", "1")) > 0
    running = replicated.start("replicate")
    try:
        with traffic(dsn, 1) as writing:
            writing.wait_for_more(20)
            wait_until(lambda: shares(replicated, ("0", "1")), what="tasks on both executors")
            assert all(loads_for_its_workers(process) for process in cluster.executors())
            (submit,) = psutil.Process(running.pid).children()
            assert all(SMALL_JVM in arguments_of(process) for process in (*cluster.executors(), submit.pid))
            kill_executor(cluster.executors()[0])
            writing.wait_for_more(50)
            wait_until(lambda: shares(replicated, ("2",)), what="tasks on the executor that came instead")
            settings = json.dumps(replicated.asked("environment"))
    finally:
        kill(running, signal.SIGKILL)
    replicated.catch_up()
    replicated.assert_equal(*replicated.pipeline.tables)
    told = settings + replicated.logged_events() + replicated.log.read_text()
    assert "spark.pyspark.python" in told
    for secret in (dsn, "pgrepl-secret"):
        assert secret not in told


def arguments_of(process: int) -> str:
    return Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")


def loads_for_its_workers(executor: int) -> bool:
    """Return True if the process that forks an executor's Python workers has loaded what they need."""
    threads = Path(f"/proc/{executor}/task").glob("*/children")
    (daemon,) = {child for children in threads for child in children.read_text().split()}
    return "libarrow" in Path(f"/proc/{daemon}/maps").read_text()


def shares(replicated: OnCluster, executors: tuple[str, ...]) -> bool:
    """Return True if each executor has done ten tasks of the app that runs."""
    # The app's page may not be there yet, or may have no executors yet.
    with contextlib.suppress(OSError, IndexError, json.JSONDecodeError):
        done = replicated.tasks_by_executor()
        return all(done.get(name, 0) >= 10 for name in executors)
    return False


@pytest.mark.parametrize(
    ("version", "with_package", "said"),
    [("", False, "lacks airflow_provider_pgrepl"), ("0.0.1", True, "has airflow_provider_pgrepl 0.0.1")],
)
def test_executors_of_another_version_or_without_package_are_refused(
    replicated, dsn, tmp_path, version, with_package, said
):
    """Before anything is made: there is no slot afterwards."""
    replicated.python = executor_python(tmp_path / "python", version, with_package=with_package)
    assert replicated.run("snapshot") == process.WILL_NOT_HELP, replicated.log_tail()
    assert said in replicated.log_tail()
    assert "run-on-a-cluster" in replicated.log_tail()
    assert not has_slots(dsn)


def test_directory_that_executors_do_not_have_is_refused(replicated, dsn):
    """Below the folder in which a process runs each has another."""
    replicated.configure(lake="/proc/self/cwd/lake")
    assert replicated.run("snapshot") == process.WILL_NOT_HELP, replicated.log_tail()
    assert "is not the directory that the driver has there" in replicated.log_tail()
    assert not has_slots(dsn)


def has_slots(dsn: str) -> bool:
    with closing_connection(dsn) as source, source.cursor() as cursor:
        cursor.execute("select from pg_replication_slots where database = current_database()")
        return cursor.fetchone() is not None
