"""The operators that resnapshot tables and that add tables, with the snapshot app."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.hooks.pipeline import parse_tables, read_flag, read_tables
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.start_check import check_snapshot
from airflow_provider_pgrepl.replication.postgres.names import TableName

from .lineage import OpenLineageOperator
from .spark_app import SparkAppOperator


class PgResnapshotOperator(OpenLineageOperator, SparkAppOperator):
    """Copy these tables again, in whatever state they are. The other tables are replicated at the same time.

    Readers see the old rows until the new ones are complete. A table that cannot be copied fails the task
    after the other tables are copied.

    :param tables: a list, or a comma-separated text (templated)
    :param reason: recorded in the log and in XCom (templated)
    :param resync: compare the tables with the source, and replace the rows that differ, instead of copying
        them (templated)

    Other parameters: see SparkAppOperator. XCom: `tables` and `reason`.
    """

    app = "snapshot"
    template_fields: Sequence[str] = (*SparkAppOperator.template_fields, "tables", "reason", "resync")

    def __init__(
        self,
        *,
        tables: Sequence[str] | str,
        reason: str | None = None,
        resync: bool | str = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.tables = tables
        self.reason = reason
        self.resync = resync

    def app_arguments(self) -> list[str]:
        tables = read_tables(self.tables)
        if not tables:
            raise ConfigError("tables: none was named", "name at least one, as public.orders")
        return ["--resync" if read_flag("resync", self.resync) else "--tables", ",".join(tables)]

    def lineage_tables(self) -> list[TableName]:
        return parse_tables(read_tables(self.tables))

    def check_start(self, access: Access) -> None:
        check_snapshot(access, resnapshot=parse_tables(read_tables(self.tables)))

    def execute(self, context: Any) -> dict[str, Any]:
        self.log.info("Resnapshotting tables %s; reason: %s", self.tables, self.reason or "none given")
        super().execute(context)
        return {"tables": read_tables(self.tables), "reason": self.reason}


class PgAddTablesOperator(OpenLineageOperator, SparkAppOperator):
    """Add tables to the pipeline: tables that its file does not list, or new tables that match its patterns.

    :param tables: a list, or a comma-separated text; None: all tables that match a pattern now, independent
        of the setting `new_tables` (templated)

    Other parameters: see SparkAppOperator. XCom: `tables`, as given.
    """

    app = "snapshot"
    template_fields: Sequence[str] = (*SparkAppOperator.template_fields, "tables")

    def __init__(self, *, tables: Sequence[str] | str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tables = tables

    def app_arguments(self) -> list[str]:
        return [f"--add={','.join(read_tables(self.tables))}"]

    def lineage_tables(self) -> list[TableName]:
        return parse_tables(read_tables(self.tables))

    def check_start(self, access: Access) -> None:
        check_snapshot(access, added=parse_tables(read_tables(self.tables)))

    def execute(self, context: Any) -> dict[str, Any]:
        super().execute(context)
        return {"tables": read_tables(self.tables)}
