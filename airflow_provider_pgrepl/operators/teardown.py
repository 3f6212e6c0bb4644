"""The operator that drops a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from airflow.sdk import BaseOperator

from airflow_provider_pgrepl.hooks.pipeline import (
    PipelineArgument,
    check_at_parse_time,
    read_flag,
    read_pipeline,
)
from airflow_provider_pgrepl.hooks.replication import access_with_lake

from .failures import task_of, translated


class PgTeardownOperator(BaseOperator):
    """Drop the slots, the publication and the records of a pipeline; with `drop_lake`, also its lake.

    Stop the pipeline's tasks first. While an app runs, the task waits up to `timeout_s` seconds, then
    fails and can be retried.

    :param pipeline: a Pipeline, a dict of its fields, JSON text, or the path of a JSON file (templated)
    :param drop_lake: also drop its lake tables and changelog (templated; only `true` or `false`)
    :param give_up: the name of the source, if it has another history than the lake, as after a restore. The
        error of a try without this parameter names it (templated)
    :param report_only: drop nothing, and report what would be dropped (templated; only `true` or `false`)
    :param timeout_s: seconds to wait for running apps

    XCom: `dropped` and `kept`, a phrase for each object.
    """

    template_fields: Sequence[str] = ("pipeline", "drop_lake", "give_up", "report_only")
    template_fields_renderers: ClassVar[dict[str, str]] = {"pipeline": "json"}
    ui_color = "#d9e8f5"

    def __init__(
        self,
        *,
        pipeline: PipelineArgument,
        drop_lake: bool | str = False,
        give_up: str = "",
        report_only: bool | str = False,
        timeout_s: float = 60.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_at_parse_time(pipeline)
        self.pipeline = pipeline
        self.drop_lake = drop_lake
        self.give_up = give_up
        self.report_only = report_only
        self.timeout_s = timeout_s

    def execute(self, context: Any) -> dict[str, Any]:
        # Import this here: it imports deltalake, which parsing a DAG does not need.
        from airflow_provider_pgrepl.replication.app.operations.teardown import teardown

        with translated():
            result = teardown(
                access_with_lake(read_pipeline(self.pipeline), task_of(context)),
                drop_lake=read_flag("drop_lake", self.drop_lake),
                timeout_s=self.timeout_s,
                dry_run=read_flag("report_only", self.report_only),
                give_up=[self.give_up] if self.give_up else (),
            )
        self.log.info("%s", result.to_text())
        return {"dropped": result.dropped, "kept": result.kept}
