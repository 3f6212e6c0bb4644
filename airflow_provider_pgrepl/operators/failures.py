"""The one place where this package's errors and exit codes become Airflow's exceptions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from airflow.sdk.exceptions import AirflowException, AirflowFailException

from airflow_provider_pgrepl.errors import PgReplError, Retry
from airflow_provider_pgrepl.spark_driver.follow import End
from airflow_provider_pgrepl.spark_driver.process import AppState

FORSAKEN = "the process of Airflow that watches this task has died; the application runs on"
EXIT_NEVER = 78
"""The application says that trying again will not help; every other failure is retried."""


def as_airflow(error: PgReplError) -> AirflowException:
    """Turn an error into Airflow's: AirflowFailException (no retries) when trying again cannot help."""
    failure = AirflowFailException if error.retry is Retry.NEVER else AirflowException
    return failure(f"{error.__class__.__name__}: {error}")


@contextmanager
def translated() -> Iterator[None]:
    """Raise this package's errors as Airflow's; for operators, and for @task functions that use the hook."""
    try:
        yield
    except PgReplError as error:
        # Not from the error itself, which says the same: Airflow would show both, each with its trace.
        raise as_airflow(error) from error.__cause__


def raise_unless_well(end: End, was_asked_to_stop: bool) -> None:
    """Raise for an application that ended otherwise than well and by itself."""
    if was_asked_to_stop:
        # Airflow goes by how `execute` ends: returning would count as success.
        raise AirflowException(f"stopped on request; the application ended with exit code {end.exit_code}")
    if end.status is AppState.LOST or end.exit_code is None:
        raise AirflowException("the application vanished without an exit code: it or its host was killed")
    if end.exit_code:
        raise failure_of(end.exit_code, end.why)


def failure_of(exit_code: int, why: str) -> AirflowException:
    """The exception for an application that ended with this exit code, and its own words about it."""
    said = f":\n{why}" if why else ""
    if exit_code == EXIT_NEVER:
        return AirflowFailException(f"the application says that a retry will not help (exit code 78){said}")
    return AirflowException(f"the application ended with exit code {exit_code}{said}")
