"""What Airflow says of this task: where its applications live, and what it is called."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from airflow.sdk import conf


def run_folder() -> Path:
    """The folder of `[pgrepl] run_folder`; `pgrepl` below AIRFLOW_HOME when none is named."""
    named = str(conf.get("pgrepl", "run_folder", fallback="")).strip()
    home = os.environ.get("AIRFLOW_HOME") or "~/airflow"
    return Path(named or f"{home}/pgrepl").expanduser()


def task_of(context: Any) -> str:
    """This try, as a person would look for it."""
    task = context.get("ti")
    if task is None:
        return f"process {os.getpid()}"
    return f"task {task.task_id} of {task.dag_id}, run {task.run_id}, try {task.try_number}"
