"""The program `airflow` in a process forked from one that has imported Airflow, which takes seconds."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing.context import ForkServerProcess
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_IMPORTED = (
    "airflow.__main__",
    "airflow.cli.commands.task_command",
    "airflow.dag_processing.dagbag",
    "airflow.sdk.execution_time.task_runner",
    "airflow.api_fastapi.execution_api.app",
    "airflow.providers.apache.spark.operators.spark_submit",
    "airflow_provider_pgrepl.operators.replication",
    "tests.airflow.execution_api",
)


def start(arguments: list[str], log: Path) -> ForkServerProcess:
    """Start it with this process's environment, as the leader of a group of its own; it writes into `log`."""
    _CONTEXT.set_forkserver_preload(list(_IMPORTED))
    process = _CONTEXT.Process(target=_run, args=(arguments, log, dict(os.environ)), daemon=False)
    process.start()
    return process


def _run(arguments: list[str], log: Path, environment: dict[str, str]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    # A shell that runs the tests in its background has them, and all that they start, ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with log.open("ab") as output:
        for number in (1, 2):
            os.dup2(output.fileno(), number)
    from airflow.__main__ import main

    sys.argv = ["airflow", *arguments]
    try:
        main()
    finally:
        # As each interpreter does first at its end: a pool stops its processes before they are joined.
        threading._shutdown()  # type: ignore[attr-defined]
