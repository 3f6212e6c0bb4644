"""A standalone Spark cluster: a master and two workers, as processes that share only the loopback network."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import airflow_provider_pgrepl
from airflow_provider_pgrepl.replication.runtime import spark_submit
from airflow_provider_pgrepl.replication.runtime.spark_submit import SMALL_JVM
from demo.postgres import free_port
from demo.server_process import ServerProcess

PACKAGE = Path(airflow_provider_pgrepl.__file__).parent
WORKERS = 2


class Node(ServerProcess):
    """A Spark master or worker as a process, with its folder as home. `master`: the URL, for a worker."""

    def __init__(self, folder: Path, master: str = "") -> None:
        super().__init__(folder)
        self.name, self.master, self.ui = (
            "a Spark worker" if master else "Spark's master",
            master,
            free_port(),
        )

    def command(self) -> list[str]:
        program = Path(spark_submit.spark_submit()).with_name("spark-class")
        listens = ["--host", "127.0.0.1", "--port", str(self.port), "--webui-port", str(self.ui)]
        if not self.master:
            return [str(program), "org.apache.spark.deploy.master.Master", *listens]
        share = ["--cores", "1", "--memory", "1g", "--work-dir", str(self.folder / "work")]
        return [str(program), "org.apache.spark.deploy.worker.Worker", *listens, *share, self.master]

    def environment(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "JAVA_HOME") if name in os.environ}
        own = {"HOME": str(self.folder), "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_DAEMON_MEMORY": "256m"}
        # For these processes alone: an application chooses the options of its executors.
        own |= dict.fromkeys(("SPARK_DAEMON_JAVA_OPTS", "SPARK_LAUNCHER_OPTS"), SMALL_JVM)
        # Spark's scripts are part of pyspark. They find it by the Python on the path.
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
    """A master and its workers. `python`: the interpreter of executors, which has this package installed."""

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
        """Return the pids of the executors, in the order of their workers."""
        return [int(found) for worker in self.workers for found in executors_in(worker.folder)]


def executors_in(folder: Path) -> Iterator[str]:
    """Yield the pids of the executors of the worker in `folder`."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            arguments = (process / "cmdline").read_bytes()
            if (
                b"CoarseGrainedExecutorBackend" in arguments
                and folder in (process / "cwd").readlink().parents
            ):
                yield process.name


def executor_python(folder: Path, version: str = "", *, with_package: bool = True) -> Path:
    """Create a virtual environment in `folder` with this one's libraries, and return its Python.

    `version`: the version that its copy of this package reports, by default the same. `with_package`: if
    False, the environment lacks this package.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    # A package that is installed for development, by a .pth file in these folders, is not found this way.
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
    """Start a cluster, yield it, and stop it at the end of the block."""
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
