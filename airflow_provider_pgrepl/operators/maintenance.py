"""The operator that maintains a pipeline's lake, by hand or on a schedule."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, ClassVar

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException

from airflow_provider_pgrepl.hooks.pipeline import (
    PipelineArgument,
    check_at_parse_time,
    read_pipeline,
    read_tables,
)
from airflow_provider_pgrepl.hooks.replication import access_with_lake

from .failures import failure_of, translated


class PgMaintenanceOperator(BaseOperator):
    """Compact lake tables and the changelog. Delete old consistent points and unreferenced files.

    The replication app does the same automatically, but less thoroughly. It may run at the same time. This
    operator needs no Spark.

    :param pipeline: a Pipeline, a dict of its fields, JSON text, or the path of a JSON file (templated)
    :param tables: compact these lake tables; None or empty: all (templated)
    :param limit_s: seconds after which no further compaction starts

    XCom: the report of `pgrepl maintain --json`, also if something failed. A table that was too busy is
    logged and does not fail the task.
    """

    template_fields: Sequence[str] = ("pipeline", "tables")
    template_fields_renderers: ClassVar[dict[str, str]] = {"pipeline": "json"}
    ui_color = "#d9e8f5"

    def __init__(
        self,
        *,
        pipeline: PipelineArgument,
        tables: Sequence[str] | str | None = None,
        limit_s: float = 600.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_at_parse_time(pipeline)
        self.pipeline = pipeline
        self.tables = tables
        self.limit_s = limit_s

    def execute(self, context: Any) -> dict[str, Any]:
        # Import this here: it imports deltalake, which parsing a DAG does not need.
        from airflow_provider_pgrepl.replication.app.operations.maintain import maintain

        self._asked_to_end = threading.Event()
        with translated():
            done = maintain(
                access_with_lake(read_pipeline(self.pipeline)),
                read_tables(self.tables),
                self.limit_s,
                wait=self._asked_to_end.wait,
                on_table=lambda table: self.log.info("%s", table.to_text()),
            )
        self.log.info("%s", done.to_text())
        report = done.to_report()
        if done.failures or done.is_stopped:
            context["ti"].xcom_push(key="return_value", value=report)
        if done.failures:
            raise failure_of(done.exit_code, "\n".join(f"{at}: {why}" for at, why in done.failures.items()))
        if done.is_stopped:
            raise AirflowException("stopped on request; what was committed stays")
        return report

    def on_kill(self) -> None:
        """Ask the maintenance to end after the current commit."""
        asked: threading.Event | None = getattr(self, "_asked_to_end", None)
        if asked is not None:
            asked.set()
