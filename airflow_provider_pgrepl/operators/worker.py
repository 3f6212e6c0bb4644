"""The worker and the try, as Airflow knows them, and what a try says to Airflow while it runs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from airflow.sdk import BaseOperatorLink, conf

STATUS = "status"
"""The XCom of how an application stands, renewed while it runs."""


def run_folder() -> Path:
    """The folder of `[pgrepl] run_folder`; `pgrepl` below AIRFLOW_HOME when none is named."""
    named = str(conf.get("pgrepl", "run_folder", fallback="")).strip()
    home = os.environ.get("AIRFLOW_HOME") or "~/airflow"
    return Path(named or f"{home}/pgrepl").expanduser()


def task_of(context: Any) -> str:
    """The try of a task, as a person would look for it."""
    task = context.get("ti")
    if task is None:
        return f"process {os.getpid()}"
    return f"task {task.task_id} of {task.dag_id}, run {task.run_id}, try {task.try_number}"


def push(context: Any, key: str, value: Any) -> None:
    """Give it to XCom now; what was under this key is replaced."""
    if (task := context.get("ti")) is not None:
        task.xcom_push(key=key, value=value)


def show_links(context: Any, operator: Any, links: Iterable[BaseOperatorLink]) -> None:
    """Show the links from the beginning: Airflow itself does at the end of a task, which may take months."""
    if (task := context.get("ti")) is None:
        return
    for link in links:
        push(context, link.xcom_key, link.get_link(operator, ti_key=task))
