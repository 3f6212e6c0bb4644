"""The name of a task's try, for messages and records."""

from __future__ import annotations

import os
from typing import Any


def task_of(context: Any) -> str:
    """Return a readable name of the task's try, or of this process if there is no task."""
    task = context.get("ti")
    if task is None:
        return f"process {os.getpid()}"
    return f"task {task.task_id} of {task.dag_id}, run {task.run_id}, try {task.try_number}"
