"""What is worked out in one Spark task, and how errors leave it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa

from airflow_provider_pgrepl.errors import LakeTableError, PgReplError
from airflow_provider_pgrepl.replication.settings.store_variables import reaching_store
from airflow_provider_pgrepl.trace import log_unexpected, traced

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

log = logging.getLogger(__name__)

Batches = Iterator[pa.RecordBatch]
Told = TypeVar("Told")


def quoted(name: str) -> str:
    """A column's name as Spark wants it, whatever characters are in it."""
    return "`" + name.replace("`", "``") + "`"


def one_task(spark: SparkSession, schema: StructType, work: Callable[[], pa.Table]) -> DataFrame:
    """What one task works out, as a data frame of this schema."""
    names = schema.names

    def run(batches: Iterable[pa.RecordBatch]) -> Batches:
        for batch in batches:
            if batch.num_rows:
                rows = told(work)
                if rows.num_rows:
                    yield from rows.select(names).combine_chunks().to_batches()

    return spark.range(0, 1, 1, 1).mapInArrow(reaching_store(run), schema)


def told(work: Callable[[], Told]) -> Told:
    """Our own errors pass; of others, whose text may hold values of rows, only class and frames."""
    try:
        return work()
    except PgReplError:
        raise
    except Exception as error:  # noqa: BLE001 - only its kind leaves the task
        doing = "the changes cannot be laid over the lake table"
        log_unexpected(log, doing, error)
        failed = traced(LakeTableError(f"{doing}: {type(error).__name__}"), error)
    raise failed
