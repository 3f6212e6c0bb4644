"""Apps on a standalone Spark cluster, and what Spark reports of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from demo.postgres import free_port
from demo.spark_cluster import Cluster
from tests.support.replicated import ROOT, Replicated


class OnCluster(Replicated):
    """Its apps are started as a user of the cluster does, by `pgrepl` in client mode."""

    def __init__(
        self, cluster: Cluster, dsn: str, folder: Path, tables: tuple[str, ...], **options: Any
    ) -> None:
        super().__init__(dsn, folder, tables, **options)
        self.cluster, self.python = cluster, cluster.python
        self.events = folder / "events"
        self.events.mkdir()
        self.ui = free_port()

    def start(self, app: str, *arguments: str, script: Path | None = None) -> subprocess.Popen[bytes]:
        assert script is None
        settings = {
            "spark.pyspark.python": str(self.python),
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.executor.memory": "512m",
            "spark.ui.enabled": "true",
            "spark.ui.port": str(self.ui),
            "spark.eventLog.enabled": "true",
            "spark.eventLog.compress": "false",
            "spark.eventLog.dir": self.events.as_uri(),
        }
        of_spark = [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
        command = [sys.executable, "-m", "airflow_provider_pgrepl", app, str(self.file), *arguments]
        command += ["--", "--master", self.cluster.url, *of_spark]
        env = {**os.environ, "PGREPL_DSN": self.dsn, "PYTHONPATH": str(ROOT)}
        with self.log.open("ab") as log:
            return subprocess.Popen(
                command, env=env, cwd=self.file.parent, stdout=log, stderr=log, start_new_session=True
            )

    def asked(self, what: str) -> Any:
        """Return the part `what` of the running app from Spark's REST API."""
        root = f"http://127.0.0.1:{self.ui}/api/v1/applications"
        app = _get(root)[0]["id"]
        return _get(f"{root}/{app}/{what}")

    def tasks_by_executor(self) -> dict[str, int]:
        """Return the number of completed tasks of the running app by executor."""
        found = self.asked("allexecutors")
        return {one["id"]: one["completedTasks"] for one in found if one["id"] != "driver"}

    def logged_events(self) -> str:
        """Return the text of all event logs that Spark wrote for its apps."""
        return "".join(file.read_text() for file in self.events.rglob("events_*"))

    def logged_tasks(self) -> dict[str, int]:
        """Return the number of successful tasks in the event logs by executor."""
        ended: dict[str, int] = {}
        for line in self.logged_events().splitlines():
            event = json.loads(line)
            if event["Event"] == "SparkListenerTaskEnd" and event["Task End Reason"]["Reason"] == "Success":
                executor = event["Task Info"]["Executor ID"]
                ended[executor] = ended.get(executor, 0) + 1
        return ended


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def kill_executor(process: int) -> None:
    """Kill an executor with SIGKILL, as the kernel does when a host is short of memory."""
    os.kill(process, signal.SIGKILL)
