"""The operator that copies a pipeline's tables into the lake."""

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


class PgSnapshotOperator(OpenLineageOperator, SparkAppOperator):
    """Create publication, slot and epoch if they are missing, and copy the tables that need a copy.

    :param tables: resnapshot these tables, in whatever state they are; None: all that need it (templated)
    :param new_epoch: begin a new epoch, which resnapshots every table (templated)
    :param resync: compare tables with the source, and replace the rows that differ, instead of copying them:
        the tables in `tables`, or all in a new epoch if `tables` is not given, or if `new_epoch` is true as
        well. An interrupted run is continued (templated)
    :param give_up: with `new_epoch` or `resync`, the names of the previous source or lake, if they are not
        the current ones. The error of a try without this parameter names them (templated)
    :param take_over_slot: begin at the position of this slot of another program. Has no effect after
        the pipeline has begun (templated)

    Other parameters: see SparkAppOperator. A table that cannot be copied fails the task after the other
    tables are copied.
    """

    app = "snapshot"
    template_fields: Sequence[str] = (
        *SparkAppOperator.template_fields,
        "tables",
        "new_epoch",
        "resync",
        "give_up",
        "take_over_slot",
    )

    def __init__(
        self,
        *,
        tables: Sequence[str] | str | None = None,
        new_epoch: bool | str = False,
        resync: bool | str = False,
        give_up: Sequence[str] | str = "",
        take_over_slot: str = "",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.tables = tables
        self.new_epoch = new_epoch
        self.resync = resync
        self._takes_all = tables is None
        self.give_up = give_up
        self.take_over_slot = take_over_slot

    def app_arguments(self) -> list[str]:
        arguments, resync = [], read_flag("resync", self.resync)
        tables, new_epoch = read_tables(self.tables), read_flag("new_epoch", self.new_epoch)
        if tables:
            arguments += ["--resync" if resync else "--tables", ",".join(tables)]
        elif resync and not (new_epoch or self._takes_all):
            # A template without a result does not begin a new epoch.
            raise ConfigError(
                "tables: none was named",
                "name at least one, as public.orders; for a new epoch, in which all tables are compared, set"
                " new_epoch as well",
            )
        elif resync:
            arguments.append("--resync")
        if new_epoch and (tables or not resync):
            arguments.append("--new-epoch")
        if self.give_up:
            names = self.give_up if isinstance(self.give_up, str) else ",".join(self.give_up)
            arguments += ["--give-up", names]
        if self.take_over_slot:
            arguments += ["--take-over", self.take_over_slot]
        return arguments

    def lineage_tables(self) -> list[TableName]:
        return parse_tables(read_tables(self.tables))

    def check_start(self, access: Access) -> None:
        tables = parse_tables(read_tables(self.tables))
        resyncs_all = read_flag("resync", self.resync) and not tables
        check_snapshot(
            access,
            resnapshot=tables,
            new_epoch=read_flag("new_epoch", self.new_epoch) or resyncs_all,
        )
