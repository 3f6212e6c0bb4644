"""The operator that skips a transaction that the server cannot send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from airflow.sdk import BaseOperator

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.hooks.pipeline import (
    PipelineArgument,
    check_at_parse_time,
    read_flag,
    read_pipeline,
    read_tables,
)
from airflow_provider_pgrepl.hooks.replication import access_with_lake

from .failures import task_of, translated


class PgSkipTransactionOperator(BaseOperator):
    """Skip the transaction that the server cannot send. The tables that it may have changed become `errored`.

    Stop the replication first. The task receives all changes before the transaction.

    :param pipeline: a Pipeline, a dict of its fields, JSON text, or the path of a JSON file (templated)
    :param lsn: the LSN of the transaction, as the error `UnsendableError` names it (templated)
    :param unchanged_tables: tables that the transaction did not change, which continue: a list, or a
        comma-separated text (templated)
    :param report_only: skip nothing, and report the tables that would become `errored` (templated; only
        `true` or `false`)

    XCom: `lsn`, `xid`, and `errored` and `unchanged`, the names of tables.
    """

    template_fields: Sequence[str] = ("pipeline", "lsn", "unchanged_tables", "report_only")
    template_fields_renderers: ClassVar[dict[str, str]] = {"pipeline": "json"}
    ui_color = "#d9e8f5"

    def __init__(
        self,
        *,
        pipeline: PipelineArgument,
        lsn: str,
        unchanged_tables: Sequence[str] | str | None = None,
        report_only: bool | str = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_at_parse_time(pipeline)
        self.pipeline = pipeline
        self.lsn = lsn
        self.unchanged_tables = unchanged_tables
        self.report_only = report_only

    def execute(self, context: Any) -> dict[str, Any]:
        # Import this here: it imports deltalake, which parsing a DAG does not need.
        from airflow_provider_pgrepl.replication.app.operations.losses import skip_transaction

        with translated():
            if not self.lsn:
                raise ConfigError("lsn: is empty", "give the LSN that the error UnsendableError names")
            result = skip_transaction(
                access_with_lake(read_pipeline(self.pipeline), task_of(context)),
                self.lsn,
                read_tables(self.unchanged_tables),
                dry_run=read_flag("report_only", self.report_only),
            )
        self.log.info("%s", result.to_text())
        return {
            "lsn": str(result.lsn),
            "xid": result.xid,
            "errored": [str(table) for table in result.touched],
            "unchanged": [str(table) for table in (*result.named, *result.seen)],
        }
