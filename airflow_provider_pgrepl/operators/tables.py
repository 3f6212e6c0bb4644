"""The operators that pause, resume, retry and remove tables. They need no Spark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowFailException

from airflow_provider_pgrepl.hooks.pipeline import (
    PipelineArgument,
    check_at_parse_time,
    read_flag,
    read_pipeline,
    read_tables,
)
from airflow_provider_pgrepl.hooks.replication import access_with_lake
from airflow_provider_pgrepl.replication.app.access import Access

from .failures import task_of, translated

if TYPE_CHECKING:
    from airflow_provider_pgrepl.replication.app.operations.tables import RetryResult


class TablesOperator(BaseOperator):
    """The base of the operators on single tables.

    :param pipeline: a Pipeline, a dict of its fields, JSON text, or the path of a JSON file (templated)
    :param tables: a list, or a comma-separated text (templated)
    """

    template_fields: Sequence[str] = ("pipeline", "tables")
    template_fields_renderers: ClassVar[dict[str, str]] = {"pipeline": "json"}
    ui_color = "#d9e8f5"
    done: ClassVar[str]
    """The operation as a past participle, for the log."""

    def __init__(
        self, *, pipeline: PipelineArgument, tables: Sequence[str] | str | None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        check_at_parse_time(pipeline)
        self.pipeline = pipeline
        self.tables = tables

    def execute(self, context: Any) -> dict[str, Any]:
        with translated():
            done = self.operate(
                access_with_lake(read_pipeline(self.pipeline), task_of(context)),
                read_tables(self.tables),
                context,
            )
        self.log.info("%s: %s", self.done, ", ".join(done["tables"]) or "no table")
        return done

    def operate(self, access: Access, tables: list[str], context: Any) -> dict[str, Any]:
        """Change the tables, and return the result for XCom."""
        raise NotImplementedError


# Import the operations where they run: they import deltalake, which parsing a DAG does not need.


class PgPauseTablesOperator(TablesOperator):
    """Set tables to `paused`. XCom: `tables`.

    Their changes stay in the changelog while they are paused, and are applied after they are resumed.
    """

    done = "paused"

    def operate(self, access: Access, tables: list[str], context: Any) -> dict[str, Any]:  # noqa: ARG002
        from airflow_provider_pgrepl.replication.app.operations.tables import pause_tables

        pause_tables(access, tables)
        return {"tables": tables}


class PgResumeTablesOperator(TablesOperator):
    """Resume paused tables: they catch up with the other tables from the changelog. XCom: `tables`."""

    done = "resumed"

    def operate(self, access: Access, tables: list[str], context: Any) -> dict[str, Any]:  # noqa: ARG002
        from airflow_provider_pgrepl.replication.app.operations.tables import resume_tables

        resume_tables(access, tables)
        return {"tables": tables}


class PgRetryTablesOperator(TablesOperator):
    """Move errored tables to `catching_up`, so that they continue from the changelog without a new copy.

    If tables are named, either all are moved or none. Otherwise, a table that cannot continue stays errored
    and fails the task.

    :param tables: a list, or a comma-separated text; None or empty: all errored tables (templated)

    XCom: `tables` that continue, and `refused`: the reasons of the others by table.
    """

    done = "retried"

    def __init__(self, *, tables: Sequence[str] | str | None = None, **kwargs: Any) -> None:
        super().__init__(tables=tables, **kwargs)

    def operate(self, access: Access, tables: list[str], context: Any) -> dict[str, Any]:
        from airflow_provider_pgrepl.replication.app.operations.tables import retry_tables

        tried = retry_tables(access, tables or None)
        refused = {str(table.table): _why(table) for table in tried if table.refused is not None}
        result = {
            "tables": [str(one.table) for one in tried if one.refused is None and not one.is_overtaken],
            "refused": refused,
        }
        if refused:
            context["ti"].xcom_push(key="return_value", value=result)
            raise AirflowFailException("\n".join(f"{table}: {why}" for table, why in refused.items()))
        return result


def _why(tried: RetryResult) -> str:
    """Return the error that keeps a table errored, without the table's name at its start."""
    return str(tried.refused).removeprefix(f"{tried.table}: ")


class PgRemoveTablesOperator(TablesOperator):
    """Remove tables from the pipeline and from its publication.

    :param drop_lake_tables: also drop their lake tables and histories (templated; only `true` or `false`)

    XCom: `tables` and `dropped`.
    """

    done = "removed"

    template_fields: Sequence[str] = (*TablesOperator.template_fields, "drop_lake_tables")

    def __init__(self, *, drop_lake_tables: bool | str = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.drop_lake_tables = drop_lake_tables

    def operate(self, access: Access, tables: list[str], context: Any) -> dict[str, Any]:  # noqa: ARG002
        from airflow_provider_pgrepl.replication.app.operations.removal import remove_tables

        dropped = read_flag("drop_lake_tables", self.drop_lake_tables)
        remove_tables(access, tables, drop_lake_tables=dropped)
        return {"tables": tables, "dropped": dropped}
