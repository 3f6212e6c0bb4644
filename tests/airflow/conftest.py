"""A throw-away Airflow for these tests. Its settings must be there before Airflow is imported."""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import shutil
import sqlite3
import tempfile
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from airflow_provider_pgrepl.spark_driver.claim import RunDirectory

HOME = Path(tempfile.mkdtemp(prefix="pgrepl-test-airflow-"))
DATABASE = HOME / "airflow.db"
atexit.register(shutil.rmtree, HOME, ignore_errors=True)
os.environ.update(
    AIRFLOW_HOME=str(HOME),
    # Without it the first program of Airflow writes a key into airflow.cfg, which the tests' process lacks.
    AIRFLOW__CORE__FERNET_KEY=b64encode(b"pgrepl-tests".ljust(32, b".")).decode(),
    AIRFLOW__CORE__LOAD_EXAMPLES="False",
    AIRFLOW__CORE__UNIT_TEST_MODE="False",
    AIRFLOW__CORE__DAGS_FOLDER=str(Path(__file__).parent / "dags"),
    AIRFLOW__DATABASE__SQL_ALCHEMY_CONN=f"sqlite:///{DATABASE}",
    AIRFLOW__LOGGING__BASE_LOG_FOLDER=str(HOME / "logs"),
    NO_COLOR="1",
)

LAKE = f"{HOME}/no-lake"
"""The lake of these tests' pipelines: an app is found by its lake and name, not by its starter."""

SECRET = "canary-0Pen-sesame"
"""The password of the test connection, which may show up nowhere."""


@pytest.fixture(scope="session")
def airflow_db(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Airflow's database: one worker of the run makes it, and the others copy it."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    template = shared / "airflow.db"
    with (shared / "airflow.db.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not template.exists():
            _make_airflow_db()
            unfinished = template.with_suffix(".part")
            with closing(sqlite3.connect(DATABASE)) as made, closing(sqlite3.connect(unfinished)) as copy:
                made.backup(copy)
            unfinished.replace(template)
    if not DATABASE.exists():
        shutil.copyfile(template, DATABASE)


def _make_airflow_db() -> None:
    from airflow.utils.db import initdb

    initdb()


@pytest.fixture(autouse=True)
def connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pgrepl_default` with the secret, at a port where nothing listens."""
    fields = {"conn_type": "pgrepl", "host": "127.0.0.1", "port": 1, "login": "app", "password": SECRET}
    monkeypatch.setenv("AIRFLOW_CONN_PGREPL_DEFAULT", json.dumps({**fields, "schema": "shop"}))


class Journal:
    """The stand-in app's record of its runs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def events(self) -> list[dict[str, object]]:
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]

    def pids(self, event: str = "started") -> list[int]:
        return [int(str(entry["pid"])) for entry in self.events() if entry["event"] == event]

    def wait_for(self, event: str, count: int = 1) -> int:
        """Wait for the count-th such event, and return the pid of the process that wrote it."""
        eventually(lambda: len(self.pids(event)) >= count, f"{event} in the journal")
        return self.pids(event)[count - 1]


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    book = Journal(tmp_path / "journal")
    yield book
    for pid in book.pids():
        if is_alive(pid):
            os.kill(pid, 9)


def eventually(condition: Callable[[], object], what: str, timeout_s: float = 300) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    import psutil  # type: ignore[import-untyped]

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def place(tmp_path: Path) -> RunDirectory:
    """A folder for applications of the pipeline that the stand-in runs."""
    from airflow_provider_pgrepl.spark_driver.claim import RunDirectory
    from tests.airflow.stand_in_app import SHOP

    return RunDirectory(tmp_path / "run", "replicate", SHOP)
