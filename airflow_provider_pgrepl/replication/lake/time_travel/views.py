"""All tables of a pipeline as temporary views for Spark SQL, at one point in time."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import TYPE_CHECKING

from airflow_provider_pgrepl.errors import ConfigError, LakeError
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoints
from airflow_provider_pgrepl.replication.lake.time_travel.as_of import SparkAsOf, as_of
from airflow_provider_pgrepl.replication.lake.time_travel.spark_overlay import quoted
from airflow_provider_pgrepl.replication.postgres import oids
from airflow_provider_pgrepl.replication.postgres.names import ColumnName, TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DEFAULT_SCHEMA = "public"
_JSON_TYPES = (oids.JSON, oids.JSONB)


def create_views(
    spark: SparkSession,
    pipeline: Pipeline,
    *,
    lsn: int | str | None = None,
    timestamp: datetime | None = None,
    epoch: int | None = None,
    prefix: str = "",
    names: Mapping[str, str] | None = None,
    variant: bool | Collection[str] = False,
) -> dict[str, str]:
    """Register every table of the pipeline as a temporary view of the session, all at one LSN. Return the
    views' names by table, quoted for SQL where necessary.

    A table of schema `public` keeps its name, and another one is named `<schema>_<table>`, both after the
    `prefix`. `names` gives other names for some tables. Views of an earlier call with the same names are
    replaced. Without an LSN or a timestamp, the newest consistent point is read. `variant`: True converts all
    json and jsonb columns to VARIANT, a collection only the listed ones, such as `public.t.c`.

    Raises what `as_of` raises, and ConfigError if two tables would get the same name or a column in `variant`
    is not json or jsonb. No view is registered then.
    """
    if lsn is None and timestamp is None:
        point = ConsistentPoints(pipeline.lake_root).at_or_before(2**63 - 1, epoch)
        if point is not None:
            lsn, epoch = point.lsn, point.epoch
    lake = as_of(spark, pipeline, lsn=lsn, timestamp=timestamp, epoch=epoch)
    if not lake.tables:
        raise LakeError(
            f"no consistent point at or before {lake.lsn} is kept, so which tables there were is not known",
            "the replication app writes the first one when the tables have caught up",
        )
    views = view_names(lake.tables, prefix, names or {})
    wanted = None if isinstance(variant, bool) else {ColumnName.parse(column) for column in variant}
    frames = {}
    for table in views:
        frame = lake.table(table)
        frames[table] = _with_variants(lake, table, frame, wanted) if variant else frame
    if wanted:
        listed = ", ".join(sorted(map(str, wanted)))
        raise ConfigError(f"variant: these columns are no json or jsonb column of a table here: {listed}")
    for table, view in views.items():
        frames[table].createOrReplaceTempView(view)
    return views


def view_names(tables: Collection[str], prefix: str, names: Mapping[str, str]) -> dict[str, str]:
    """Return the views' names by table. Raises ConfigError if two tables would get the same name, or `names`
    has an unknown table."""
    given = {str(TableName.parse(table)): view for table, view in names.items()}
    unknown = sorted(given.keys() - set(tables))
    if unknown:
        raise ConfigError(f"names: not a table here: {', '.join(unknown)}", f"there are: {', '.join(tables)}")
    views = {table: given.get(table) or prefix + _plain_name(TableName.parse(table)) for table in tables}
    owners = defaultdict(list)
    for table, view in views.items():
        # Names in Spark are not case-sensitive.
        owners[view.casefold()].append(table)
    doubles = [" and ".join(owner) for owner in owners.values() if len(owner) > 1]
    if doubles:
        raise ConfigError(
            f"these tables would get one view name: {'; '.join(doubles)}",
            'name one of them otherwise, as names={"sales.orders": "orders_of_sales"}',
        )
    return {table: view if _PLAIN.fullmatch(view) else quoted(view) for table, view in views.items()}


def _plain_name(table: TableName) -> str:
    return table.name if table.schema == _DEFAULT_SCHEMA else f"{table.schema}_{table.name}"


def _with_variants(
    lake: SparkAsOf, table: str, frame: DataFrame, wanted: set[ColumnName] | None
) -> DataFrame:
    """Return the frame with its JSON columns as VARIANT: all if `wanted` is None, otherwise those in it.
    These are removed from `wanted`."""
    from pyspark.sql import functions
    from pyspark.sql.types import StringType

    relation = lake.relation(table)
    strings = {field.name for field in frame.schema.fields if isinstance(field.dataType, StringType)}
    replaced = {}
    for column in relation.columns:
        name = ColumnName(relation.table, column.name)
        holds_json = column.type_oid in _JSON_TYPES and column.name in strings
        if holds_json and (wanted is None or name in wanted):
            replaced[column.name] = functions.parse_json(functions.col(quoted(column.name)))
            if wanted is not None:
                wanted.discard(name)
    return frame.withColumns(replaced) if replaced else frame
