"""Reading a pipeline's lake: tables as of one point in time in Arrow, Spark and SQL, and their changes.

For example::

    from airflow_provider_pgrepl.lake import open_lake

    lake = open_lake("shop.json")
    orders = lake.table("public.orders").to_arrow()
    totals = lake.sql("select customer, sum(total) from orders group by customer")
    before = lake.at("16/B374D848").table("public.orders").to_spark(spark)
    async for change in lake.changes(["public.orders"], follow=True): ...

The names in this module and the classes of `hooks`, `operators`, `sensors` and `triggers` are public. Modules
below `replication` are not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.catalogs import spark_catalog, unity
from airflow_provider_pgrepl.replication.changelog.messages import read_messages
from airflow_provider_pgrepl.replication.events.changes import Change
from airflow_provider_pgrepl.replication.events.formats.json_text import to_json
from airflow_provider_pgrepl.replication.events.position import After, EventPosition
from airflow_provider_pgrepl.replication.events.stream import ChangeStream, stream
from airflow_provider_pgrepl.replication.lake.read import ArrowView, consistent_arrow
from airflow_provider_pgrepl.replication.lake.time_travel.as_of import (
    ArrowAsOf,
    arrow_view_as_of,
    create_views,
    verified,
)
from airflow_provider_pgrepl.replication.lake.time_travel.verification import UnverifiedWarning
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.settings.lake import is_object_store
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.spark.session import build_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = [
    "Change",
    "ChangeStream",
    "Lake",
    "LakeTable",
    "UnverifiedWarning",
    "build_session",
    "open_lake",
    "to_json",
]

_View: TypeAlias = ArrowView | ArrowAsOf
HERE = "here"


def open_lake(lake: str | Path | Pipeline, *, lsn: int | str | None = None, epoch: int | None = None) -> Lake:
    """Return the lake at its newest consistent point, or at the newest one at or before `lsn`.

    The point is looked up at the first use, and then stays the same. Reading the lake between consistent
    points, and changes that follow the pipeline's settings, need the pipeline's file.

    :param lake: the pipeline's file, or its lake root, which is a folder or a URI such as `s3://bucket/lake`
    :param lsn: the LSN up to which the point is looked up; None: the newest point
    :param epoch: the epoch of the LSN; None: the newest one
    :raises ConfigError: for a file that is not a pipeline file
    :raises LakeError: at the first use of the point, if no such point is retained
    """
    opened = lake if isinstance(lake, Pipeline) else _opened(lake)
    return Lake(opened, lambda: consistent_arrow(opened, lsn, epoch))


def _opened(lake: str | Path) -> Pipeline | str:
    if not is_object_store(str(lake)) and Path(lake).is_file():
        return Pipeline.read(str(lake))
    return str(lake)


@dataclass(frozen=True, repr=False)
class Lake:
    """A lake as of one point in time.

    Repeated reads return the same rows, and all tables contain the same transactions.
    """

    _pipeline: Pipeline | str
    _find: Callable[[], _View]

    def __repr__(self) -> str:
        opened = self._pipeline
        return f"Lake({opened.lake_root if isinstance(opened, Pipeline) else opened})"

    @cached_property
    def _view(self) -> _View:
        return self._find()

    @property
    def lsn(self) -> LSN:
        """The position of the lake, which shows exactly the transactions that committed at or before it."""
        return self._view.lsn

    @property
    def epoch(self) -> Epoch:
        """The epoch to which the LSN belongs; LSNs of different epochs are never compared."""
        return self._view.epoch

    @property
    def tables(self) -> tuple[str, ...]:
        """The sorted names of the tables, such as `public.orders`."""
        return self._view.tables

    def table(self, name: str) -> LakeTable:
        """Return a table as of the lake's point in time.

        :param name: the table's name, such as `public.orders` or `"My Schema"."My Table"`
        """
        return LakeTable(name, self._pipeline, self._view)

    def sql(self, query: str) -> pa.Table:
        """Return the rows of a query in DataFusion's SQL, in which tables are named as in PostgreSQL.

        Between consistent points, the tables of the query are read into memory, and the errors of
        `LakeTable.to_arrow` are raised.

        :param query: one query
        :raises ConfigError: for a statement that is not a query
        :raises LakeError: if the query fails, and for a table that the lake does not have at its point in
            time
        """
        with self.sql_reader(query) as rows:
            return rows.read_all()

    def sql_reader(self, query: str) -> AbstractContextManager[pa.RecordBatchReader]:
        """Return a context manager with a reader of a query's rows, which are read on demand.

        The rows need not fit into memory. Raises the errors of `sql`.

        :param query: as in `sql`
        """
        return self._view.sql_reader(query)

    def at(self, moment: int | str | datetime | None = None, *, epoch: int | None = None) -> Lake:
        """Return the lake as of a transaction of the source, even if it has not been applied yet.

        :param moment: an LSN as a number or as text such as `16/B374D848`; a datetime with a time zone, for
            all transactions that committed until then by the source's clock; or None, for the newest durable
            LSN in the changelog
        :param epoch: the epoch of the LSN; None: the newest one
        :raises ConfigError: without the pipeline's file, and for an invalid `moment`
        :raises LakeError: for a point in time that is not known yet or no longer retained
        """
        pipeline = _needs_pipeline(self._pipeline, "to read as of a point in time")
        lsn, timestamp = (None, moment) if isinstance(moment, datetime) else (moment, None)
        view = arrow_view_as_of(pipeline, lsn=lsn, timestamp=timestamp, epoch=epoch)
        return Lake(pipeline, lambda: view)

    def changes(
        self, tables: Collection[str] | None = None, *, after: After | Lake = HERE, follow: bool = False
    ) -> ChangeStream:
        """Return the committed changes of tables, for `for` or `async for`.

        Each change is returned once, in commit order. The errors are raised while iterating, and their hints
        say how to continue.

        :param tables: names, or `schema.*`; None: all tables
        :param after: the position to start from. `here`: after the transactions that this lake shows, so that
            no change is missing or repeated; a `Lake`: after the transactions that it shows; the id of the
            last change that was read; an LSN; a datetime with a time zone; None: the oldest retained change
        :param follow: wait for new changes; otherwise the iterator ends after the last change
        :raises ChangelogError: if changes after `after` are gone, or if a new epoch has begun
        :raises GapError: before a skipped transaction
        :raises ValueRangeError: before a change with a value that its Python type cannot hold
        :raises ConfigError: for an invalid `after` or table
        :raises LakeUnavailableError: if the lake cannot be reached
        """
        where = self if after == HERE else after
        if isinstance(where, Lake):
            where = EventPosition.after_transaction(where.epoch, where.lsn)
        return stream(self._pipeline, tables, after=where, follow=follow)

    def messages(
        self, *, above_lsn: int | None = None, prefix: str | None = None, epoch: int | None = None
    ) -> pa.Table:
        """Return the retained logical messages in commit order, independent of the lake's point in time.

        Columns: `epoch`, `lsn`, `ordinal`, `xid`, `commit_ts`, `transactional`, `prefix`, `content`, `size`
        (bytes).

        :param above_lsn: only messages that committed after it
        :param prefix: only messages with this prefix
        :param epoch: the epoch of the messages; None: the newest one
        :raises ChangelogError: if a skipped transaction comes next, if changes above `above_lsn` are no
            longer retained, and if there is no changelog
        :raises LakeUnavailableError: if the changelog cannot be read
        """
        return read_messages(self._pipeline, above_lsn=above_lsn, prefix=prefix, epoch=epoch)

    def create_views(
        self,
        spark: SparkSession,
        *,
        prefix: str = "",
        names: Mapping[str, str] | None = None,
        variant: bool | Collection[str] = False,
    ) -> dict[str, str]:
        """Register every table as a temporary view of the session, and return the views' names by table.

        The names are quoted for SQL where necessary. A table of schema `public` keeps its name, and another
        one is named `<schema>_<table>`. Views of an earlier call with the same names are replaced. Raises the
        errors of `at` and `to_spark`, too.

        :param spark: the session, which has Delta
        :param prefix: the beginning of every view's name
        :param names: other names for some tables, by table
        :param variant: True: convert all json and jsonb columns to VARIANT; a collection: only the listed
            ones, such as `public.t.c`
        :raises ConfigError: without the pipeline's file, if two tables would have the same name, and if a
            column in `variant` is not json or jsonb; no view is registered then
        """
        pipeline = _needs_pipeline(self._pipeline, "to name views")
        return create_views(
            spark, pipeline, lsn=self.lsn, epoch=self.epoch, prefix=prefix, names=names, variant=variant
        )

    def register_tables(self, spark: SparkSession) -> dict[str, str]:
        """Register the lake's tables in the catalog of a session, and return their names by location.

        Tables that are already registered are left unchanged.

        :param spark: a session with your catalog, and Delta
        :raises ConfigError: without the pipeline's file
        :raises ToolError: if the session has no Delta
        :raises LakeError: if there is no consistent point yet; after registering all others, if a name
            identifies something else
        """
        return spark_catalog.register_tables(spark, _needs_pipeline(self._pipeline, "to name tables"))

    def register_in_unity(self, url: str, catalog: str, token: str | None = None) -> dict[str, str]:
        """Register the lake's tables in a Unity Catalog server, and return their full names by location.

        The tables are registered with their current columns.

        :param url: the server's address, such as `http://localhost:8080`
        :param catalog: the name of an existing catalog
        :param token: the token of a user of the server; None: the server has no logins
        :raises ConfigError: without the pipeline's file, and for an address, a catalog name or a token that
            cannot be used
        :raises LakeError: if there is no consistent point, no such catalog, or a right is missing; after
            registering all others, if a name identifies something else
        :raises LakeUnavailableError: if the lake or the server cannot be reached
        """
        pipeline = _needs_pipeline(self._pipeline, "to name tables")
        return unity.register_in_unity(pipeline, url, catalog, token)


@dataclass(frozen=True)
class LakeTable:
    """A table of a lake as of the lake's point in time. `name`: `schema.name`."""

    name: str
    _pipeline: Pipeline | str = field(repr=False)
    _view: _View = field(repr=False)

    def to_arrow(self) -> pa.Table:
        """Return the whole table at the lake's point in time, never at another one.

        Between consistent points, an UnverifiedWarning is issued for unverified rows.

        :raises LakeError: if the lake does not have the table at that point
        :raises DriftError: between consistent points, if the table was altered in a way that the lake table
            cannot follow
        :raises LakeTableError: between consistent points, if the lake table cannot be used
        :raises ValueRangeError: between consistent points, for a value that its lake type cannot hold
        """
        return self._view.table(self.name)

    def to_spark(self, spark: SparkSession) -> DataFrame:
        """Return the table as a Spark data frame, which executors read when it is used.

        Raises the errors of `to_arrow`, too.

        :param spark: a session with Delta, as `build_session` makes it
        :raises ToolError: if the session has no Delta
        """
        return self._view.for_spark(spark).table(self.name)

    def history_to_arrow(self) -> pa.Table:
        """Return every version that each row had up to the lake's point in time, with its lifetime.

        The end is null for versions that are valid at that point. Raises the errors of `to_arrow`, too.

        :raises LakeError: if the table has no history
        """
        return self._view.history(self.name)

    def history_to_spark(self, spark: SparkSession) -> DataFrame:
        """Return the rows of `history_to_arrow` as a Spark data frame.

        Raises the errors of `history_to_arrow`, too.

        :param spark: a session with Delta
        :raises ToolError: if the session has no Delta
        """
        return self._view.for_spark(spark).history(self.name)

    def is_verified(self) -> bool:
        """Return False if DDL before the lake's point in time may be missing in the rows.

        Raises the errors of `Lake.at` and `to_arrow`, too.

        :raises ConfigError: without the pipeline's file
        """
        view = self._view
        if isinstance(view, ArrowAsOf):
            return view.verified(self.name)
        pipeline = _needs_pipeline(self._pipeline, "to know of DDL")
        return verified(pipeline, self.name, lsn=view.lsn, epoch=view.epoch)


def _needs_pipeline(pipeline: Pipeline | str, why: str) -> Pipeline:
    if isinstance(pipeline, Pipeline):
        return pipeline
    raise ConfigError(
        f"{why}, the pipeline's settings are needed, but the lake was opened by its root {pipeline}",
        "open it by the pipeline's file, as open_lake('shop.json')",
    )
