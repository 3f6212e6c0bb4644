"""A reader's program, started by test_reading_stores.py: tables at the newest point, and as of now."""

from __future__ import annotations

import json
import sys

from airflow_provider_pgrepl.replication.lake.read import consistent_read
from airflow_provider_pgrepl.replication.lake.time_travel.as_of import as_of
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.spark.session import build_session
from tests.support.spark_program import saying_errors


def main() -> int:
    """Print for each table its rows at the point and as of the newest transaction, the own columns aside."""
    pipeline = Pipeline.read(sys.argv[1])
    spark = build_session("reader", "local[1]")
    with saying_errors(spark):
        point, newest = consistent_read(spark, pipeline), as_of(spark, pipeline)
        for table in sys.argv[2:]:
            told = [
                sorted(json.dumps(row.asDict(), default=str, sort_keys=True) for row in rows.collect())
                for rows in (point.table(table), newest.table(table))
            ]
            print(json.dumps({"table": table, "point": told[0], "newest": told[1]}))
        sys.stderr.write(repr([*spark.sparkContext.getConf().getAll(), *spark.sql("SET").collect()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
