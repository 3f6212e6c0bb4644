"""Lake tables in a catalog of tables, as external ones: where readers look for them by name.

What is registered is the place alone: columns, protocol and rows stand in the table's own log, so that one
that evolves, or is taken anew, stays registered as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_provider_pgrepl.errors import LakeError
from airflow_provider_pgrepl.replication.catalog_names import CatalogNames
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.lake.history.place import HISTORY_SUFFIX, is_history, path_of
from airflow_provider_pgrepl.replication.lake.points import Points
from airflow_provider_pgrepl.replication.lake.session import check_delta
from airflow_provider_pgrepl.replication.lake.spark_store import check_connector
from airflow_provider_pgrepl.replication.lake_location import hadoop_uri, is_object_store
from airflow_provider_pgrepl.replication.names import TableName

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DIALECTS = ("spark", "trino")


@dataclass(frozen=True, order=True)
class CatalogEntry:
    """A lake table, or the history of one, under its name. `uri`: as the lake names the place."""

    database: str
    table: str
    uri: str

    @property
    def spark_location(self) -> str:
        return hadoop_uri(self.uri) if is_object_store(self.uri) else f"file://{self.uri}"


def catalog_entries(pipeline: Pipeline) -> list[CatalogEntry]:
    """All that the newest consistent point holds, by name.

    Raises LakeError while there is no point, ConfigError when two tables would get one name.
    """
    point = Points(pipeline.lake_root).latest()
    if point is None:
        raise LakeError(
            f"the lake {pipeline.lake_root} has no consistent point yet, by which its tables are known",
            "the replication app writes the first one when the tables have caught up",
        )
    keys = sorted(point.tables)
    by_key = {key: TableName.parse(key.removesuffix(HISTORY_SUFFIX)) for key in keys}
    # A history is called as its table, with this behind it.
    named = {key: TableName(name.schema, f"{name.name}_history") for key, name in by_key.items()}
    asked = {key: named[key] if is_history(key) else name for key, name in by_key.items()}
    found = names_of(pipeline).of_all(asked.values())
    entries = (CatalogEntry(*found[asked[key]], f"{pipeline.lake_root}/{path_of(key)}") for key in keys)
    return sorted(entries)


def names_of(pipeline: Pipeline) -> CatalogNames:
    """As the pipeline chooses them."""
    return CatalogNames(
        pipeline.name, pipeline.target_database, pipeline.target_table, pipeline.target_schemas
    )


def catalog_sql(pipeline: Pipeline, dialect: str = "spark") -> list[str]:
    """Statements that register all of them, and may be run again. Raises what `catalog_entries` does.

    `trino`: for a catalog of its Delta connector, in a session that uses it.
    """
    entries = catalog_entries(pipeline)
    databases, doubled = sorted({entry.database for entry in entries}), "''"
    if dialect == "trino":
        return [f"CREATE SCHEMA IF NOT EXISTS {name};" for name in databases] + [
            f"CALL system.register_table(schema_name => '{entry.database}', table_name => '{entry.table}',"
            f" table_location => {_text(entry.uri, doubled)});"
            for entry in entries
        ]
    return [f"CREATE DATABASE IF NOT EXISTS {name};" for name in databases] + [
        f"CREATE TABLE IF NOT EXISTS {entry.database}.{entry.table} USING DELTA"
        f" LOCATION {_text(entry.spark_location)};"
        for entry in entries
    ]


def register_tables(spark: SparkSession, pipeline: Pipeline) -> dict[str, str]:
    """Register all of them in the catalog of a Spark session, and leave those that are; their names by place.

    Raises ToolError when the session has no Delta, or no way to the lake's store, LakeError for a name that
    something else has; what `catalog_entries` raises.
    """
    check_delta(spark)
    entries = catalog_entries(pipeline)
    for database in sorted({entry.database for entry in entries}):
        spark.sql(f"CREATE DATABASE IF NOT EXISTS {database}")
    for entry in entries:
        name = f"{entry.database}.{entry.table}"
        if spark.catalog.tableExists(name):
            _check_same(spark, name, entry)
            continue
        try:
            spark.sql(f"CREATE TABLE {name} USING DELTA LOCATION {_text(entry.spark_location)}")
        except Exception as error:
            check_connector(error)
            raise
    return {entry.uri: f"{entry.database}.{entry.table}" for entry in entries}


def _check_same(spark: SparkSession, name: str, entry: CatalogEntry) -> None:
    rows = spark.sql(f"DESCRIBE TABLE EXTENDED {name}").collect()
    found = next((str(row["data_type"]) for row in rows if row["col_name"] == "Location"), "")
    if _place(found) != _place(entry.spark_location):
        raise LakeError(
            f"{name} is registered for another place: {found or 'none'}",
            "have target_database or target_table give another name, or drop what is there",
        )


def _place(location: str) -> str:
    """Spark writes a local one with one slash or three."""
    return location.removeprefix("file:").lstrip("/") if location.startswith("file:") else location


def _text(text: str, quote: str = "\\'") -> str:
    """As a literal of SQL, in which a quote is written so: a directory's name may have one."""
    escaped = text.replace("\\", "\\\\") if quote.startswith("\\") else text
    return "'" + escaped.replace("'", quote) + "'"
