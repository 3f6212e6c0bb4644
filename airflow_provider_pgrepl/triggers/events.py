"""Events of triggers that have failed. Their sensors raise the errors: `operators.failures.raise_failed`."""

from __future__ import annotations

from typing import Any

from airflow.exceptions import AirflowNotFoundException

from airflow_provider_pgrepl.errors import ConfigError, PgReplError


def failed_event(error: PgReplError | AirflowNotFoundException) -> dict[str, Any]:
    """Return the event of a trigger that failed with this error."""
    if not isinstance(error, PgReplError):
        # Airflow reports a missing connection of a task, but of a trigger only that it failed.
        error = ConfigError(str(error), "define the connection")
    return {
        "status": "failed",
        "error": type(error).__name__,
        "message": error.message,
        "hint": error.hint,
    }
