"""PgSnapshotOperator: copy a pipeline's tables into the lake."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow_provider_pgrepl.hooks.pipeline import parse_tables, read_flag, read_tables
from airflow_provider_pgrepl.operators.spark_app import SparkAppOperator
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.start_check import check_snapshot


class PgSnapshotOperator(SparkAppOperator):
    """Create publication, slot and epoch where missing, and copy the tables that are not yet `streaming`.

    :param tables: resnapshot these, whatever their state (templated); None: all that need it
    :param new_epoch: begin a new epoch, which resnapshots every table (templated)
    :param give_up: with `new_epoch`, the names of the source or lake that it gives up, where these are other
        ones than now (templated; the error of a try without it says the names)
    :param take_over: begin where this slot of another program stands; nothing once begun (templated)

    The rest as in SparkAppOperator. A table that cannot be copied fails the task once the others are done.
    """

    app = "snapshot"
    template_fields: Sequence[str] = (
        *SparkAppOperator.template_fields,
        "tables",
        "new_epoch",
        "give_up",
        "take_over",
    )

    def __init__(
        self,
        *,
        tables: Sequence[str] | str | None = None,
        new_epoch: bool | str = False,
        give_up: Sequence[str] | str = "",
        take_over: str = "",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.tables = tables
        self.new_epoch = new_epoch
        self.give_up = give_up
        self.take_over = take_over

    def app_arguments(self) -> list[str]:
        arguments = []
        if tables := read_tables(self.tables):
            arguments += ["--tables", ",".join(tables)]
        if read_flag("new_epoch", self.new_epoch):
            arguments.append("--new-epoch")
        if self.give_up:
            names = self.give_up if isinstance(self.give_up, str) else ",".join(self.give_up)
            arguments += ["--give-up", names]
        if self.take_over:
            arguments += ["--take-over", self.take_over]
        return arguments

    def check_start(self, access: Access) -> None:
        check_snapshot(
            access,
            resnapshot=parse_tables(read_tables(self.tables)),
            new_epoch=read_flag("new_epoch", self.new_epoch),
        )
