"""Registration of lake tables in a Spark catalog as external tables, so that readers find them by name.

Only the location is registered. Columns, protocol and rows are stored in the table's own Delta log, so the
registration of a table stays valid when the table evolves or is resnapshotted.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import dropwhile
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from airflow_provider_pgrepl.errors import LakeError
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoints
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
    """A lake table, or its history table, and its name in the catalog. `uri`: its location, in the form that
    the lake uses."""

    database: str
    table: str
    uri: str

    @property
    def name(self) -> str:
        """Return `database.table`, quoted for Spark SQL."""
        return f"`{self.database}`.`{self.table}`"

    @property
    def location(self) -> str:
        """Return the location in the form that Spark uses."""
        return hadoop_uri(self.uri) if is_object_store(self.uri) else f"file://{self.uri}"

    @property
    def url(self) -> str:
        """Return the location as a URL, for catalogs that accept only URLs. An object store keeps Delta's
        scheme; a local path becomes a percent-encoded `file://` URL."""
        return self.uri if is_object_store(self.uri) else f"file://{quote(self.uri)}"

    def is_at(self, location: str) -> bool:
        """Return True if `location`, as a catalog reports it, is the location of this table. Spark writes a
        local path with one or three slashes, and a store's with the scheme that it was given. Other catalogs
        percent-encode characters that a URL cannot hold."""
        if not location.startswith("file:"):
            return canonical(location) == canonical(self.location)
        path = "/" + location.removeprefix("file:").strip("/")
        return self.uri in (path, unquote(path))


def catalog_entries(pipeline: Pipeline) -> tuple[list[CatalogEntry], list[str]]:
    """Return an entry for each table of the newest consistent point, by name, and a phrase for each name that
    more than one table would have.

    Raises LakeError if there is no consistent point yet.
    """
    point = ConsistentPoints(pipeline.lake_root).latest()
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
    """Return the database and table names that the pipeline's settings choose."""
    return CatalogNames(
        pipeline.name,
        pipeline.target_database,
        pipeline.target_table,
        pipeline.target_schemas,
        {TableName.parse(table): name for table, name in pipeline.target_tables.items()},
    )


def catalog_sql(pipeline: Pipeline) -> list[str]:
    """Return Spark SQL statements that register every table of the newest consistent point. They can be run
    again. Tables that cannot be registered are listed in comments. A name that is already registered with
    another location is left unchanged. Raises LakeError if there is no consistent point yet."""
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
    """Register every table of the newest consistent point in the session's catalog, and return the names by
    location.

    Tables that are already registered are left unchanged. Raises ToolError if the session has no Delta, or no
    connector to the lake's store. Raises LakeError if there is no consistent point yet. If a name identifies
    something else, or two tables would have the same name, raises LakeError after registering all others.
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
    """Return the error for tables that were not registered. `faults`: a phrase for each of them. `hint`: the
    remedy, if it is not to choose other names."""
    names = "have target_database or target_table tell them apart, or name one in target_tables"
    return LakeError(f"not registered: {'; '.join(faults)}", f"{hint or names}; all others are registered")


def _create(spark: SparkSession, entry: CatalogEntry) -> None:
    try:
        spark.sql(f"CREATE TABLE {entry.name} USING DELTA LOCATION {_text(entry.location)}")
    except Exception as error:
        check_connector(error)
        raise


def _other_place(spark: SparkSession, entry: CatalogEntry) -> list[str]:
    """Return a phrase if the name is registered with another location than this table's; otherwise
    nothing."""
    rows = spark.sql(f"DESCRIBE TABLE EXTENDED {entry.name}").collect()
    # The table's columns come first, and one of them may be named Location.
    details = dropwhile(lambda row: row["col_name"] != _DETAILS, rows)
    found = next((str(row["data_type"]) for row in details if row["col_name"] == "Location"), "")
    if entry.is_at(found):
        return []
    return [f"{entry.database}.{entry.table} stands for another place: {found or 'none'}"]


def _text(text: str) -> str:
    """Return `text` as a literal of Spark SQL, with quotes and backslashes escaped: a directory's name may
    have quotes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
