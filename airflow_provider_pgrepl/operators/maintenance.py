"""PgMaintenanceOperator: a pipeline's lake is maintained by hand, or by a schedule."""

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
from airflow_provider_pgrepl.operators.failures import failure_of, translated


class PgMaintenanceOperator(BaseOperator):
    """Compact lake tables and changelog, let old consistent points go, and delete what nobody needs.

    The replication app does that by itself, less thoroughly; it may run meanwhile. Needs no Spark.

    :param pipeline: a Pipeline, a dict of its fields, JSON text, or the path of a JSON file (templated)
    :param tables: whose lake tables are compacted; none: all (templated)
    :param limit_s: after so many seconds no more files are begun to be joined

    XCom: the report of `pgrepl maintain --json`, also when something failed. A table that was too busy is
    logged, and fails nothing.
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
        # Imported here, as it brings deltalake along, which no parsing of a DAG needs.
        from airflow_provider_pgrepl.replication.app.operations.maintain import maintain

        self._asked_to_end = threading.Event()
        with translated():
            done = maintain(
                access_with_lake(read_pipeline(self.pipeline)),
                read_tables(self.tables),
                self.limit_s,
                wait=self._asked_to_end.wait,
                tell=lambda table: self.log.info("%s", table.to_text()),
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
        """End after the commit that is being made."""
        asked: threading.Event | None = getattr(self, "_asked_to_end", None)
        if asked is not None:
            asked.set()
