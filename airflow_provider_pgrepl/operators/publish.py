"""The operator that publishes change events to a broker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow.sdk.exceptions import AirflowException

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.hooks.connections import target_secrets
from airflow_provider_pgrepl.replication.app.access import Access

from .spark_app import SparkAppOperator

_MODES = ("continuous", "caught_up")


class PgPublishOperator(SparkAppOperator):
    """Publish a pipeline's changes with one of its `publishers`.

    :param publisher: the publisher's name in the pipeline (templated)
    :param mode: `continuous` runs until it is stopped; `caught_up` succeeds once everything that the
        changelog held at the start is published (templated)
    :param hand_over_after_s: with `continuous`, seconds after which the task succeeds and leaves the
        app to the next run, which adopts it. The app stops if no run adopts it within 15
        minutes.

    Other parameters: see SparkAppOperator. The app uses only Spark's driver. Set unlimited retries:
    an error that a retry cannot fix fails the task at once.
    """

    app = "publish"
    may_replace = True
    template_fields: Sequence[str] = (*SparkAppOperator.template_fields, "publisher", "mode")

    def __init__(
        self,
        *,
        publisher: str,
        mode: str = "continuous",
        hand_over_after_s: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.publisher = publisher
        self.mode = mode
        self.hand_over_after_s = hand_over_after_s

    @property
    def place_name(self) -> str:
        return f"{self.app}-{self.publisher}"

    @property
    def lock_purpose(self) -> str:
        return f"{self.app} {self.publisher}"

    def app_arguments(self) -> list[str]:
        if self.mode not in _MODES:
            raise ConfigError(f"mode: {self.mode!r} must be one of {', '.join(_MODES)}")
        named = ["--publisher", self._resolved.publisher(self.publisher).name]
        if self.mode == "continuous":
            return named
        self.hand_over_after_s = None
        return [*named, "--until", "caught-up"]

    def secrets(self) -> dict[str, str]:
        return {**super().secrets(), **target_secrets(self._resolved.publisher(self.publisher))}

    def check_start(self, access: Access) -> None:
        # Import this here: it imports the libraries of the lake, which parsing a DAG does not need.
        from airflow_provider_pgrepl.replication.app.publish import check_changelog

        check_changelog(access.pipeline)

    def is_job_succeeded(self, status: str) -> bool:
        # A continuous publisher that has ended must be started again.
        return self.mode == "caught_up" and super().is_job_succeeded(status)

    def ended_well(self) -> None:
        if self.mode == "continuous":
            raise AirflowException(
                "another process stopped the app of a continuous publisher; a retry starts it again"
            )
