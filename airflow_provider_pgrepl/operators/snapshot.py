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
    :param adopt: take lake tables that another program has written: compare them with the source, replace the
        rows that differ, and make them the pipeline's. With `tables`, only these, which are added if they are
        not in the lake yet (templated)
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
        "adopt",
        "take_over_slot",
    )

    def __init__(
        self,
        *,
        tables: Sequence[str] | str | None = None,
        new_epoch: bool | str = False,
        resync: bool | str = False,
        give_up: Sequence[str] | str = "",
        adopt: bool | str = False,
        take_over_slot: str = "",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.tables = tables
        self.new_epoch = new_epoch
        self.resync = resync
        self._takes_all = tables is None
        self.give_up = give_up
        self.adopt = adopt
        self.take_over_slot = take_over_slot

    def app_arguments(self) -> list[str]:
        arguments, tables = [], read_tables(self.tables)
        new_epoch, resync = read_flag("new_epoch", self.new_epoch), read_flag("resync", self.resync)
        adopt = read_flag("adopt", self.adopt)
        if adopt and (resync or new_epoch):
            raise ConfigError("adopt cannot be set with resync or new_epoch", "leave one of them out")
        if (resync or adopt) and not (tables or new_epoch or self._takes_all):
            # A template without a result does not mean all tables.
            raise ConfigError(
                "tables: none was named",
                "name at least one, as public.orders; for a new epoch, in which all tables are compared, set"
                " new_epoch as well",
            )
        if adopt:
            arguments += ["--adopt", *([",".join(tables)] if tables else [])]
        elif tables:
            arguments += ["--resync" if resync else "--tables", ",".join(tables)]
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
        resyncs_all, adopts = read_flag("resync", self.resync) and not tables, read_flag("adopt", self.adopt)
        check_snapshot(
            access,
            resnapshot=() if adopts else tables,
            added=tables if adopts else (),
            new_epoch=read_flag("new_epoch", self.new_epoch) or resyncs_all,
        )
