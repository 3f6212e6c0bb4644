"""A standalone Spark cluster: a master and two workers, as processes that share nothing but the loopback."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import airflow_provider_pgrepl
from airflow_provider_pgrepl import applications
from demo.postgres import free_port
from demo.server_process import ServerProcess
from tests.support.replicated import ROOT, Replicated

PACKAGE = Path(airflow_provider_pgrepl.__file__).parent
WORKERS = 2


class Node(ServerProcess):
    """Spark's own program of a part of the cluster, in a folder and a home of its own."""

    def __init__(self, folder: Path, master: str = "") -> None:
        super().__init__(folder)
        self.name, self.master, self.ui = (
            "a Spark worker" if master else "Spark's master",
            master,
            free_port(),
        )

    def command(self) -> list[str]:
        program = Path(applications.spark_submit()).with_name("spark-class")
        listens = ["--host", "127.0.0.1", "--port", str(self.port), "--webui-port", str(self.ui)]
        if not self.master:
            return [str(program), "org.apache.spark.deploy.master.Master", *listens]
        share = ["--cores", "1", "--memory", "1g", "--work-dir", str(self.folder / "work")]
        return [str(program), "org.apache.spark.deploy.worker.Worker", *listens, *share, self.master]

    def environment(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "JAVA_HOME") if name in os.environ}
        own = {"HOME": str(self.folder), "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_DAEMON_MEMORY": "256m"}
        # Spark's programs are those of pyspark, which are found by the Python on the path.
        path = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
        return {**kept, **own, "PATH": path}

    def prepare(self) -> None:
        if self.master:
            (self.folder / "work").mkdir(exist_ok=True)

    def answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.ui), 1):
            return True
        return False


class Cluster:
    """`python`: the interpreter of executors, that of a host which has this package installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.master = Node(folder / "master")
        self.python = executor_python(folder / "python")
        self.workers: list[Node] = []

    @property
    def url(self) -> str:
        return f"spark://127.0.0.1:{self.master.port}"

    def start(self) -> None:
        self.master.start()
        for number in range(1, WORKERS + 1):
            worker = Node(self.folder / f"worker{number}", self.url)
            self.workers.append(worker)
            worker.start()

    def stop(self) -> None:
        for node in (*self.workers, self.master):
            node.stop()

    def executors(self) -> list[int]:
        """The processes of applications' executors, those of the first worker first."""
        return [int(found) for worker in self.workers for found in executors_in(worker.folder)]


def executors_in(folder: Path) -> Iterator[str]:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            arguments = (process / "cmdline").read_bytes()
            if (
                b"CoarseGrainedExecutorBackend" in arguments
                and folder in (process / "cwd").readlink().parents
            ):
                yield process.name


def executor_python(folder: Path, version: str = "", *, with_package: bool = True) -> Path:
    """A Python of another place, that has the libraries, and this package (as another version) or not."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    # What is installed for development by a .pth file there is not found this way.
    (packages / "libraries.pth").write_text("".join(f"{path}\n" for path in libraries))
    if with_package:
        copied = shutil.copytree(
            PACKAGE, packages / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__")
        )
        if version:
            told = copied / "__init__.py"
            told.write_text(told.read_text().replace(airflow_provider_pgrepl.__version__, version))
    return folder / "bin" / "python"


@contextlib.contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


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
        """What Spark's REST API says of the app that runs."""
        root = f"http://127.0.0.1:{self.ui}/api/v1/applications"
        app = _get(root)[0]["id"]
        return _get(f"{root}/{app}/{what}")

    def tasks_by_executor(self) -> dict[str, int]:
        """Of the app that runs, those that have ended."""
        found = self.asked("allexecutors")
        return {one["id"]: one["completedTasks"] for one in found if one["id"] != "driver"}

    def logged_events(self) -> str:
        """All of Spark's event logs of its apps."""
        return "".join(file.read_text() for file in self.events.rglob("events_*"))

    def logged_tasks(self) -> dict[str, int]:
        """As the event logs have them: those that have ended well, by executor."""
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
    """As the kernel does when a host is short of memory."""
    os.kill(process, signal.SIGKILL)
