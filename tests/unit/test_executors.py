"""spark/executors.py without a cluster: the version check of executors, and its error messages."""

from __future__ import annotations

import fcntl
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_provider_pgrepl import __version__
from airflow_provider_pgrepl.errors import LakeError, Retry, SourceConnectionError, ToolError
from airflow_provider_pgrepl.replication.spark import executors
from airflow_provider_pgrepl.replication.spark.failures import spark_error
from airflow_provider_pgrepl.replication.storage.probe import SharedDirectory

WANTED = {"ours": "1.0", "pyarrow": "26.0.1", "numba": ""}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"ours": "1.0", "pyarrow": "26.0.1", "numba": "0.5"}, ""),
        ({"ours": "", "pyarrow": "26.0.1", "numba": ""}, "lacks ours, numba"),
        ({"ours": "1.0", "pyarrow": "24.0", "numba": "!"}, "cannot load numba and has pyarrow 24.0"),
    ],
)
def test_version_differences_name_host_and_missing_or_different_packages(
    found: dict[str, str], said: str
) -> None:
    told = executors.differences(WANTED, "worker-1", found)
    assert said in told
    assert bool(told) == bool(said)
    if said:
        assert "on worker-1" in told


def test_this_process_has_what_it_has() -> None:
    assert executors.versions(executors.SAME)["airflow_provider_pgrepl"] == __version__
    assert all(executors.versions(executors.NEEDED).values())


def test_a_task_of_another_version_is_refused() -> None:
    assert executors.result_of(executors.on_executor(lambda number: number + 1)(1)) == 2
    wanted = {**executors.versions(executors.SAME), "airflow_provider_pgrepl": "9.9"}
    answer = pickle.loads(pickle.dumps(executors._on_host(wanted, pytest.fail)("not to be done")))
    with pytest.raises(ToolError, match=r"has airflow_provider_pgrepl .* \(the driver has 9\.9\)"):
        executors.result_of(answer)


def test_version_probe_runs_in_python_without_this_package() -> None:
    sent = executors._by_value(executors.look)
    program = (
        "import pickle, sys; sys.path = [one for one in sys.path if 'pgrepl' not in one];"
        "sys.modules['airflow_provider_pgrepl'] = None;"
        f"print(pickle.loads({sent!r})(['airflow_provider_pgrepl', 'pyarrow', 'no_such_one'])[1])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="/"
    )
    assert ended.stdout.startswith("{'airflow_provider_pgrepl': '', 'pyarrow': '")
    assert ended.stdout.strip().endswith("'no_such_one': ''}")


def test_a_directory_is_known_by_what_the_driver_put_there(tmp_path: Path) -> None:
    with SharedDirectory(str(tmp_path / "lake")) as place:
        sent: SharedDirectory = pickle.loads(pickle.dumps(place))
        sent.check()
        other = SharedDirectory(str(tmp_path / "other"), place.name)
        with pytest.raises(LakeError, match="is not the directory that the driver has there"):
            other.check()
    assert list((tmp_path / "lake").iterdir()) == []


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        (
            "ModuleNotFoundError: No module named 'airflow_provider_pgrepl.replication'",
            "lacks airflow_provider",
        ),
        ("[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.9", "is not the driver's 3."),
    ],
)
def test_missing_module_or_python_mismatch_on_executor_is_never_retried(trace: str, said: str) -> None:
    """An executor may come long after the check: Spark then reports the mismatch in its own words."""
    error = spark_error("applying changes", f"org.apache.spark.SparkException: {trace}")
    assert isinstance(error, ToolError)
    assert said in error.message
    assert error.retry is Retry.NEVER


def test_executor_failure_keeps_error_class_and_hint(tmp_path: Path, monkeypatch: Any) -> None:
    """A source with too many connections is not a host without this package: a retry may help."""
    monkeypatch.chdir(tmp_path)
    asked = []

    def reach() -> None:
        asked.append(1)
        raise SourceConnectionError("too many clients already", "wait")

    place = SharedDirectory(str(tmp_path / "lake"))
    with place:
        failure = executors._reach(place, reach)
        assert failure is not None
        assert isinstance(failure.error, SourceConnectionError)
        assert failure.error.hint == "wait"
        assert executors._reach(place, lambda: None) is None
        assert executors._reach(place, reach) is None, "once in an executor"
    assert asked == [1]


def test_tasks_that_come_together_reach_once(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[int] = []
    come = threading.Semaphore(0)

    def lock(file: Any, how: int) -> None:
        come.release()
        fcntl.flock(file, how)

    def reach() -> None:
        asked.append(1)
        assert all(come.acquire(timeout=120) for _ in range(3)), "others are at the lock, too"

    monkeypatch.setattr(executors, "fcntl", SimpleNamespace(flock=lock, LOCK_EX=fcntl.LOCK_EX))

    with SharedDirectory(str(tmp_path / "lake")) as place, ThreadPoolExecutor(3) as threads:
        assert list(threads.map(lambda _: executors._reach(place, reach), range(3))) == [None] * 3
    assert asked == [1]


def test_executor_wait_ends_when_stop_check_returns_true_or_raises(monkeypatch: Any) -> None:
    """A full cluster may have no executor for hours. A receiver that fails during the wait ends the app."""
    cancelled = threading.Event()
    context = SimpleNamespace(cancelAllJobs=cancelled.set)
    spark: Any = SimpleNamespace(sparkContext=context)
    monkeypatch.setattr(executors, "check_executors", lambda *_: cancelled.wait(120))
    answers = iter([False, True])
    assert not executors.await_executors(spark, "/lake", lambda: next(answers))
    cancelled.clear()
    with pytest.raises(SourceConnectionError):
        executors.await_executors(spark, "/lake", raise_it)
    monkeypatch.setattr(executors, "check_executors", lambda *_: None)
    assert executors.await_executors(spark, "/lake", lambda: False)


def raise_it() -> bool:
    raise SourceConnectionError("gone")


def test_a_lake_that_may_not_be_entered_is_told(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    place = SharedDirectory(str(tmp_path / "file" / "lake"))
    failure = executors._reach(place, None)
    assert failure is not None
    assert failure.kind == "LakeError"
