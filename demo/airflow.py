"""An Airflow (`airflow standalone`) below `.demo/`, on 127.0.0.1, with this repository's DAGs."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from demo import processes
from demo.airflow_api import AirflowApi
from demo.errors import DemoError
from demo.folder import ROOT, Folder
from demo.postgres import free_port

_READY_WAIT_S = 600


class Airflow:
    """Airflow's scheduler, DAG processor, triggerer and API server. `api` is a client of the API server."""

    def __init__(
        self, folder: Folder, port: int, variables: Mapping[str, str], dags: Path = ROOT / "dags"
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder.logs / "airflow.log"
        self.api = AirflowApi(self.url)
        self._folder = folder
        self._env = {**_clean_environment(), **_settings(folder, port, self.url, dags), **variables}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start all components, without waiting until they are ready (`wait_until_ready`)."""
        _empty_database(self._folder, self._env, self.log)
        command = [sys.executable, "-m", "airflow", "standalone"]
        self._process = processes.start(command, log=self.log, env=self._env, cwd=self._folder.airflow)

    def wait_until_ready(self, *dag_ids: str) -> None:
        """Wait until every component is healthy and the DAGs are known.

        Raises DemoError if Airflow ends, or is not ready after 600 s.
        """
        deadline = time.monotonic() + _READY_WAIT_S
        while not (self.api.is_healthy() and self.api.has_dags(dag_ids)):
            self.check_alive()
            if time.monotonic() > deadline:
                raise DemoError(self._why_not_ready())
            time.sleep(0.5)

    def check_alive(self) -> None:
        """Raise DemoError if Airflow has ended."""
        if self._process is not None and (code := self._process.poll()) is not None:
            raise DemoError(
                f"Airflow ended with exit code {code}; {self.log} ends with\n{processes.tail(self.log)}"
            )

    def _why_not_ready(self) -> str:
        errors = self.api.import_errors()
        if errors:
            return "Airflow cannot import a DAG:\n" + "\n".join(errors)
        return (
            f"Airflow was not ready after {_READY_WAIT_S} s; {self.log} ends with\n{processes.tail(self.log)}"
        )


def _settings(folder: Folder, port: int, url: str, dags: Path) -> dict[str, str]:
    return {
        "AIRFLOW_HOME": str(folder.airflow),
        "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__PARALLELISM": "4",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{url}/execution/",
        "AIRFLOW__CORE__FERNET_KEY": "",
        # By default, Airflow kills a task if the server does not answer its start within 5 s. A busy host is
        # slower.
        "AIRFLOW__WORKERS__EXECUTION_API_TIMEOUT": "60",
        "AIRFLOW__API__HOST": "127.0.0.1",
        "AIRFLOW__API__PORT": str(port),
        "AIRFLOW__API__BASE_URL": url,
        "AIRFLOW__API__WORKERS": "1",
        "AIRFLOW__API__SECRET_KEY": secrets.token_hex(16),
        "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_hex(32),
        "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": str(free_port()),
        "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": str(free_port()),
        "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }


def _clean_environment() -> dict[str, str]:
    """Return this process's environment without variables that name another Airflow, Spark or Python."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AIRFLOW", "PGREPL_", "SPARK_", "PYSPARK_", "PYTHON"))
        or name == processes.MARK
    }
    binaries = str(Path(sys.executable).parent)
    return {**kept, "PATH": f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}"}


def _empty_database(folder: Folder, env: Mapping[str, str], log: Path) -> None:
    """Create an empty metadata database of Airflow.

    The first demo with this Airflow version creates a template, which later demos copy. Raises DemoError.
    """
    template = folder.root / f"airflow-{version('apache-airflow-core')}.db"
    database = folder.airflow / "airflow.db"
    if not template.exists():
        process = processes.start([sys.executable, "-m", "airflow", "db", "migrate"], log=log, env=env)
        if process.wait() != 0:
            raise DemoError(f"Airflow could not make its database; {log} ends with\n{processes.tail(log)}")
        partial = template.with_suffix(".partial")
        with sqlite3.connect(database) as source, sqlite3.connect(partial) as copy:
            source.backup(copy)
        partial.rename(template)
    else:
        shutil.copy(template, database)


def connection(conn_type: str, **fields: object) -> str:
    """Return the value of an AIRFLOW_CONN_… variable, as JSON text."""
    return json.dumps({"conn_type": conn_type, **fields})
