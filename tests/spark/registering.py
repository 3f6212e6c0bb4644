"""A program with a metastore of its own: registers each pipeline that it is asked for, and reads by name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.replication.catalogs.spark_catalog import catalog_sql, register_tables
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.spark.session import build_session
from tests.support.spark_program import END

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def registered(spark: SparkSession, pipeline: Pipeline) -> list[dict[str, Any]]:
    """Register by Python and by SQL; return the names, and each table's columns and rows, or the error."""
    try:
        names = register_tables(spark, pipeline)
    except PgReplError as error:
        return [{"error": type(error).__name__, "said": str(error)}]
    for statement in catalog_sql(pipeline):
        spark.sql(statement.rstrip(";"))
    found = []
    for uri, name in names.items():
        frame = spark.table(name)
        rows = [list(row) for row in frame.select("id", *frame.columns[1:2]).orderBy("id").collect()]
        found.append({"uri": uri, "name": name, "columns": frame.columns, "rows": rows})
    return found


def main() -> int:
    """Answer each line, which names a pipeline's file, with a session that has cached nothing."""
    folder = Path(sys.argv[1])
    metastore = {
        "spark.sql.catalogImplementation": "hive",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.hadoop.javax.jdo.option.ConnectionURL": f"jdbc:derby:{folder / 'metastore'};create=true",
        "spark.hadoop.datanucleus.schema.autoCreateAll": "true",
    }
    spark = build_session("catalog", "local[1]", metastore)
    try:
        for line in sys.stdin:
            for said in registered(spark.newSession(), Pipeline.read(line.strip())):
                print(json.dumps(said))
            print(END, flush=True)
    finally:
        spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
