"""A program with a metastore of its own, started by the test beside it: registers, and reads by name."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.lake.catalog import catalog_sql, register_tables
from airflow_provider_pgrepl.replication.lake.session import build_session
from tests.support.spark_program import saying_errors


def main() -> int:
    """Register by Python and by SQL; print the names, and each table's columns and rows."""
    pipeline, folder = Pipeline.read(sys.argv[1]), Path(sys.argv[2])
    metastore = {
        "spark.sql.catalogImplementation": "hive",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.hadoop.javax.jdo.option.ConnectionURL": f"jdbc:derby:{folder / 'metastore'};create=true",
        "spark.hadoop.datanucleus.schema.autoCreateAll": "true",
    }
    spark = build_session("catalog", "local[1]", metastore)
    with saying_errors(spark):
        names = register_tables(spark, pipeline)
        for statement in catalog_sql(pipeline):
            spark.sql(statement.rstrip(";"))
        for uri, name in names.items():
            frame = spark.table(name)
            rows = [list(row) for row in frame.select("id", *frame.columns[1:2]).orderBy("id").collect()]
            print(json.dumps({"uri": uri, "name": name, "columns": frame.columns, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
