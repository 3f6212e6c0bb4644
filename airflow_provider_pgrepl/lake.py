"""A pipeline's lake, for who reads it: tables as of one moment in Arrow, Spark and SQL, and their changes.

    from airflow_provider_pgrepl.lake import open_lake

    lake = open_lake("shop.json")
    orders = lake.table("public.orders").to_arrow()
    totals = lake.sql("select customer, sum(total) from orders group by customer")
    before = lake.at("16/B374D848").table("public.orders").to_spark(spark)
    async for change in lake.changes(["public.orders"], follow=True): ...

What is named here, and the classes of `hooks`, `operators`, `sensors` and `triggers`, is public; modules
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
from airflow_provider_pgrepl.replication.lake.time_travel.as_of import ArrowAsOf, arrow_view_as_of
from airflow_provider_pgrepl.replication.lake.time_travel.verification import UnverifiedWarning
from airflow_provider_pgrepl.replication.lake.time_travel.views import create_views
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

    The point is looked up when it is first needed, and stays the same. `lake`: the pipeline's file, or its
    lake root, a folder or as `s3://bucket/lake`. Only with the file can the lake be read at moments between
    consistent points, and do changes follow the pipeline's choices. `epoch`: of the LSN; else the newest one.

    Raises ConfigError for a file that is none of a pipeline; what uses the point raises LakeError when none
    is kept.
    """
    opened = lake if isinstance(lake, Pipeline) else _opened(lake)
    return Lake(opened, lambda: consistent_arrow(opened, lsn, epoch))


def _opened(lake: str | Path) -> Pipeline | str:
    if not is_object_store(str(lake)) and Path(lake).is_file():
        return Pipeline.read(str(lake))
    return str(lake)


@dataclass(frozen=True, repr=False)
class Lake:
    """A lake as of one moment: the same rows whenever they are read, the same transactions in all tables."""

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
        """All that committed at or before it is shown, and nothing later."""
        return self._view.lsn

    @property
    def epoch(self) -> Epoch:
        """The epoch to which the LSN belongs; LSNs of different epochs are never compared."""
        return self._view.epoch

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the tables, in order, as in `public.orders`."""
        return self._view.tables

    def table(self, name: str) -> LakeTable:
        """Return a table, as `public.orders` or `"My Schema"."My Table"`."""
        return LakeTable(name, self._pipeline, self._view)

    def sql(self, query: str) -> pa.Table:
        """Return the rows of a query of DataFusion's SQL, in which tables are named as in PostgreSQL.

        Raises ConfigError for what is no query, LakeError for a query that fails and for a table that the
        lake does not have at the moment. Between consistent points it reads a table that the query names into
        memory, and raises what `LakeTable.to_arrow` does.
        """
        with self.sql_reader(query) as rows:
            return rows.read_all()

    def sql_reader(self, query: str) -> AbstractContextManager[pa.RecordBatchReader]:
        """The same for `with`: rows are read as they are asked for, and need not fit into memory."""
        return self._view.sql_reader(query)

    def at(self, moment: int | str | datetime | None = None, *, epoch: int | None = None) -> Lake:
        """Return the lake as of a transaction of the source, whether or not it has been applied.

        `moment`: an LSN, a number or as `16/B374D848`; a datetime with a time zone, for all transactions that
        committed until then by the source's clock; None, for the newest transaction in the changelog.
        `epoch`: of the LSN; else the newest one.

        Raises ConfigError without the pipeline's file, and for a moment that cannot be meant; LakeError for
        one that is not known yet or not kept any more.
        """
        pipeline = _needs_pipeline(self._pipeline, "to read as of a moment")
        lsn, timestamp = (None, moment) if isinstance(moment, datetime) else (moment, None)
        view = arrow_view_as_of(pipeline, lsn=lsn, timestamp=timestamp, epoch=epoch)
        return Lake(pipeline, lambda: view)

    def changes(
        self, tables: Collection[str] | None = None, *, after: After | Lake = HERE, follow: bool = False
    ) -> ChangeStream:
        """Return the committed changes of some tables, else of all, each once and in order, for `for` or
        `async for`.

        `after`: where to begin. `here`: after the transactions that this lake shows, so that its rows and
        these changes meet; a `Lake`: likewise; the id of the last change that was read; an LSN, or a datetime
        with a time zone; None: the oldest change that is kept. With `follow` it goes on with what comes.

        Reading raises ChangelogError when changes after it are gone, or a new epoch has begun; GapError
        before a transaction that was skipped; ValueRangeError before a change whose value its type here
        cannot hold; ConfigError, LakeUnavailableError. All say after what to go on.
        """
        where = self if after == HERE else after
        if isinstance(where, Lake):
            where = EventPosition.after_transaction(where.epoch, where.lsn)
        return stream(self._pipeline, tables, after=where, follow=follow)

    def messages(
        self, *, above_lsn: int | None = None, prefix: str | None = None, epoch: int | None = None
    ) -> pa.Table:
        """Return the logical messages that are kept, in commit order, whatever the lake's moment.

        `above_lsn`: only those that committed later; `prefix`: only those of it; `epoch`: of it, else of the
        newest one. Columns: `epoch`,
        `lsn`, `ordinal`, `xid`, `commit_ts`, `transactional`, `prefix`, `content`, `size` (bytes).

        Raises ChangelogError when a skipped transaction comes next, when changes above `above_lsn` are not
        kept any more, and without a changelog; LakeUnavailableError when it cannot be read.
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
        """Register every table as a temporary view of the session; returns the views' names by table, as SQL
        is to write them.

        A table of schema `public` is named as it is, another `<schema>_<table>`, both after the `prefix`;
        `names` gives others for some. Views of an earlier call are replaced. `variant`: all json and jsonb
        columns as VARIANT, or those listed, as `public.t.c`.

        Raises ConfigError without the pipeline's file, when two tables would get one name, and when a column
        to be VARIANT holds no JSON; then no view is registered. Raises what `at` and `to_spark` raise.
        """
        pipeline = _needs_pipeline(self._pipeline, "to name views")
        return create_views(
            spark, pipeline, lsn=self.lsn, epoch=self.epoch, prefix=prefix, names=names, variant=variant
        )

    def register_tables(self, spark: SparkSession) -> dict[str, str]:
        """Register the lake's tables in the catalog of a session, and leave those that are; returns their
        names there by place.

        Raises ConfigError without the pipeline's file, ToolError when the session has no Delta, LakeError
        while there is no consistent point, and for a name that stands for something else, once all others are
        registered.
        """
        return spark_catalog.register_tables(spark, _needs_pipeline(self._pipeline, "to name tables"))

    def register_in_unity(self, url: str, catalog: str, token: str | None = None) -> dict[str, str]:
        """Register the lake's tables, with the columns of now, in a Unity Catalog server; returns their full
        names by place.

        `url`: of the server, as `http://localhost:8080`; `catalog`: one that is there. Raises ConfigError for
        what cannot be used, LakeError without a consistent point, a catalog or a right, and for a name that
        stands for something else, once all others are registered; LakeUnavailableError.
        """
        pipeline = _needs_pipeline(self._pipeline, "to name tables")
        return unity.register_in_unity(pipeline, url, catalog, token)


@dataclass(frozen=True)
class LakeTable:
    """A table of a lake as of the lake's moment."""

    name: str
    _pipeline: Pipeline | str = field(repr=False)
    _view: _View = field(repr=False)

    def to_arrow(self) -> pa.Table:
        """Return the whole table. Raises LakeError for a table that the lake does not have at the moment;
        between consistent points also DriftError, LakeTableError, ValueRangeError, and warns with
        UnverifiedWarning. It never shows another moment."""
        return self._view.table(self.name)

    def to_spark(self, spark: SparkSession) -> DataFrame:
        """Return the table as a data frame, read by executors when it is used. Raises ToolError when the
        session has no Delta, else what `to_arrow` does."""
        return self._view.for_spark(spark).table(self.name)

    def history_to_arrow(self) -> pa.Table:
        """Return every version that a row had up to the moment, with its lifetime; the end of those valid
        then is null. Raises LakeError also when the table keeps no history."""
        return self._view.history(self.name)

    def history_to_spark(self, spark: SparkSession) -> DataFrame:
        """The same as a data frame."""
        return self._view.for_spark(spark).history(self.name)

    def is_verified(self) -> bool:
        """Return False where DDL may have come before the moment that the rows do not show.

        Raises ConfigError without the pipeline's file, and what `Lake.at` and `to_arrow` raise.
        """
        view = self._view
        if isinstance(view, ArrowView):
            pipeline = _needs_pipeline(self._pipeline, "to know of DDL")
            view = arrow_view_as_of(pipeline, lsn=view.lsn, epoch=view.epoch)
        return view.verified(self.name)


def _needs_pipeline(pipeline: Pipeline | str, why: str) -> Pipeline:
    if isinstance(pipeline, Pipeline):
        return pipeline
    raise ConfigError(
        f"{why}, the pipeline's choices are needed, and the lake was opened by its root {pipeline}",
        "open it by the pipeline's file, as open_lake('shop.json')",
    )
