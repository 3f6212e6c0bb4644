"""Lake tables in a catalog of tables, as external ones: where readers look for them by name.

What is registered is the place alone: columns, protocol and rows stand in the table's own log, so that one
that evolves, or is taken anew, stays registered as it is.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import dropwhile
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from airflow_provider_pgrepl.errors import LakeError
from airflow_provider_pgrepl.replication.lake.consistent_points import Points
from airflow_provider_pgrepl.replication.lake.history.table import HISTORY_SUFFIX, is_history, path_of
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.lake import (
    CatalogNames,
    canonical,
    hadoop_uri,
    is_object_store,
)
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.spark.connectors import check_connector
from airflow_provider_pgrepl.replication.spark.session import check_delta

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_DETAILS = "# Detailed Table Information"


@dataclass(frozen=True, order=True)
class CatalogEntry:
    """A lake table, or the history of one, under its name. `uri`: as the lake names the place."""

    database: str
    table: str
    uri: str

    @property
    def name(self) -> str:
        """Quoted for Spark's SQL."""
        return f"`{self.database}`.`{self.table}`"

    @property
    def location(self) -> str:
        """As Spark names the place."""
        return hadoop_uri(self.uri) if is_object_store(self.uri) else f"file://{self.uri}"

    @property
    def url(self) -> str:
        """As catalogs name the place that take nothing but URLs: in a store by Delta's scheme."""
        return self.uri if is_object_store(self.uri) else f"file://{quote(self.uri)}"

    def is_at(self, location: str) -> bool:
        """Whether a catalog means this place. Spark writes a local one with one slash or three, and a store's
        by whatever scheme it was told; others encode what URLs cannot hold."""
        if not location.startswith("file:"):
            return canonical(location) == canonical(self.location)
        path = "/" + location.removeprefix("file:").strip("/")
        return self.uri in (path, unquote(path))


def catalog_entries(pipeline: Pipeline) -> tuple[list[CatalogEntry], list[str]]:
    """All that the newest consistent point holds, by name; and what cannot have one, in words.

    Raises LakeError while there is no point.
    """
    point = Points(pipeline.lake_root).latest()
    if point is None:
        raise LakeError(
            f"the lake {pipeline.lake_root} has no consistent point yet, by which its tables are known",
            "the replication app writes the first one when the tables have caught up",
        )
    names, by_name = names_of(pipeline), defaultdict[tuple[str, str], list[str]](list)
    for key in sorted(point.tables):
        table = TableName.parse(key.removesuffix(HISTORY_SUFFIX))
        by_name[names.of(table, "_history" if is_history(key) else "")].append(key)
    entries, faults = [], []
    for (database, name), keys in sorted(by_name.items()):
        if len(keys) > 1:
            faults.append(f"{' and '.join(keys)} would both be {database}.{name}")
        else:
            entries.append(CatalogEntry(database, name, f"{pipeline.lake_root}/{path_of(keys[0])}"))
    return entries, faults


def names_of(pipeline: Pipeline) -> CatalogNames:
    """As the pipeline chooses them."""
    return CatalogNames(
        pipeline.name,
        pipeline.target_database,
        pipeline.target_table,
        pipeline.target_schemas,
        {TableName.parse(table): name for table, name in pipeline.target_tables.items()},
    )


def catalog_sql(pipeline: Pipeline) -> list[str]:
    """Statements of Spark's SQL that register all of them, and may be run again; what is not registered is a
    comment. A name that stands for another place is left so. Raises LakeError while there is no point."""
    entries, faults = catalog_entries(pipeline)
    return [
        *(f"-- not registered: {fault}" for fault in faults),
        *(f"CREATE DATABASE IF NOT EXISTS `{name}`;" for name in sorted({one.database for one in entries})),
        *(
            f"CREATE TABLE IF NOT EXISTS {one.name} USING DELTA LOCATION {_text(one.location)};"
            for one in entries
        ),
    ]


def register_tables(spark: SparkSession, pipeline: Pipeline) -> dict[str, str]:
    """Register all of them in the catalog of a Spark session, and leave those that are; their names by place.

    Raises ToolError when the session has no Delta, or no way to the lake's store, LakeError while there is no
    point; and, when all others are registered, LakeError for names that something else has.
    """
    check_delta(spark)
    entries, faults = catalog_entries(pipeline)
    for database in sorted({entry.database for entry in entries}):
        spark.sql(f"CREATE DATABASE IF NOT EXISTS `{database}`")
    for entry in entries:
        if spark.catalog.tableExists(entry.name):
            faults += _other_place(spark, entry)
        else:
            _create(spark, entry)
    if faults:
        raise names_taken(faults)
    return {entry.uri: f"{entry.database}.{entry.table}" for entry in entries}


def names_taken(faults: list[str], hint: str = "") -> LakeError:
    """Of tables that were not registered, each in words. `hint`: where it is not their names."""
    names = "have target_database or target_table tell them apart, or name one in target_tables"
    return LakeError(f"not registered: {'; '.join(faults)}", f"{hint or names}; all others are registered")


def _create(spark: SparkSession, entry: CatalogEntry) -> None:
    try:
        spark.sql(f"CREATE TABLE {entry.name} USING DELTA LOCATION {_text(entry.location)}")
    except Exception as error:
        check_connector(error)
        raise


def _other_place(spark: SparkSession, entry: CatalogEntry) -> list[str]:
    """What a name stands for that is not this table, in words; none when it is."""
    rows = spark.sql(f"DESCRIBE TABLE EXTENDED {entry.name}").collect()
    # Its columns come first, of which one may be called as what is looked for.
    details = dropwhile(lambda row: row["col_name"] != _DETAILS, rows)
    found = next((str(row["data_type"]) for row in details if row["col_name"] == "Location"), "")
    if entry.is_at(found):
        return []
    return [f"{entry.database}.{entry.table} stands for another place: {found or 'none'}"]


def _text(text: str) -> str:
    """As a literal of SQL: a directory's name may have quotes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
