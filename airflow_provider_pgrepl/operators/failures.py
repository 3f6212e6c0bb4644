"""The translation of this package's errors and exit codes into Airflow's exceptions, and the name of a task's
try in messages and records.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from airflow.sdk.exceptions import AirflowException, AirflowFailException

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import PgReplError, Retry
from airflow_provider_pgrepl.spark_driver.follow import AppEnd
from airflow_provider_pgrepl.spark_driver.process import AppState

FORSAKEN = "the process of Airflow that watches this task has died; the app continues"
EXIT_NEVER = 78
"""The exit code of an app that a retry cannot help. Every other failure is retried."""


def as_airflow(error: PgReplError) -> AirflowException:
    """Return Airflow's exception for an error: AirflowFailException (no retries) if a retry cannot help."""
    failure = AirflowFailException if error.retry is Retry.NEVER else AirflowException
    return failure(f"{error.__class__.__name__}: {error}")


def raise_failed(event: Mapping[str, Any]) -> None:
    """Raise the error of a trigger's event as Airflow's exception, if its status is `failed`."""
    if event["status"] == "failed":
        kind: type[PgReplError] = getattr(errors, event["error"])
        raise as_airflow(kind(event["message"], event["hint"]))


@contextmanager
def translated() -> Iterator[None]:
    """Raise errors of the block as Airflow's exceptions. For operators, and @task functions with the hook."""
    try:
        yield
    except PgReplError as error:
        # Leave the error itself out of the chain: it has the same text, and Airflow would show both traces.
        raise as_airflow(error) from error.__cause__


def raise_unless_well(end: AppEnd, was_asked_to_stop: bool) -> None:
    """Raise an exception unless the app ended with exit code 0 and without a stop request."""
    if was_asked_to_stop:
        # If `execute` returns, Airflow marks the task as successful, so a requested stop must raise.
        raise AirflowException(f"stopped on request; the app ended with exit code {end.exit_code}")
    if end.status is AppState.LOST or end.exit_code is None:
        raise AirflowException("the app vanished without an exit code: it or its host was killed")
    if end.exit_code:
        raise failure_of(end.exit_code, end.why)


def failure_of(exit_code: int, why: str) -> AirflowException:
    """Return the exception for an app's exit code. `why`: the error in its log, or ""."""
    said = f":\n{why}" if why else ""
    if exit_code == EXIT_NEVER:
        return AirflowFailException(f"the app says that a retry will not help (exit code 78){said}")
    return AirflowException(f"the app ended with exit code {exit_code}{said}")


def task_of(context: Any) -> str:
    """Return a readable name of the task's try, or of this process if there is no task."""
    task = context.get("ti")
    if task is None:
        return f"process {os.getpid()}"
    return f"task {task.task_id} of {task.dag_id}, run {task.run_id}, try {task.try_number}"
