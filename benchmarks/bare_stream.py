"""A PySpark stream from a Python data source that has no new rows: `python -m benchmarks.bare_stream`.

It uses the session settings of the replication app, and nothing else of this package.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator

from pyspark.sql import DataFrame
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from airflow_provider_pgrepl.replication.spark.session import build_session

_POLLS_WITH_NEWS = 5


class Reader(DataSourceStreamReader):  # type: ignore[misc]
    """A reader that returns one row, so that Spark starts all its processes, and then none."""

    polls = 0

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        return {"version": 0}

    def latestOffset(self, start: dict[str, int], limit: object) -> dict[str, int]:  # noqa: N802, ARG002
        time.sleep(1)
        Reader.polls += 1
        return {"version": int(Reader.polls >= _POLLS_WITH_NEWS)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:  # noqa: ARG002
        return [InputPartition("work")]

    def read(self, partition: InputPartition) -> Iterator[tuple[str]]:
        yield (str(partition.value),)


class Nothing(DataSource):  # type: ignore[misc]
    """The data source of `spark.readStream.format("nothing")`."""

    @classmethod
    def name(cls) -> str:
        return "nothing"

    def schema(self) -> str:
        return "work string"

    def streamReader(self, schema: StructType) -> Reader:  # noqa: N802, ARG002 - Spark's name
        return Reader()


def main() -> int:
    """Run the stream until the process is ended."""

    def take(batch: DataFrame, _: int) -> None:
        batch.collect()

    own_workers = {"spark.python.daemon.module": "pyspark.daemon"}
    spark = build_session("bare", extra_conf=own_workers, delta=False)
    spark.dataSource.register(Nothing)
    with tempfile.TemporaryDirectory() as scratch:
        stream = spark.readStream.format("nothing").load().writeStream.option("checkpointLocation", scratch)
        stream.foreachBatch(take).start().awaitTermination()
    return 0


if __name__ == "__main__":
    sys.exit(main())
