"""TableVersion: one version of a Delta table, to be opened, read whole, or given to Spark."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from airflow_provider_pgrepl.errors import LakeError, LakeUnavailableError
from airflow_provider_pgrepl.replication.delta.table import open_delta, query_delta
from airflow_provider_pgrepl.replication.lake.delta.live_files import app_version
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.lake import hadoop_uri, is_object_store
from airflow_provider_pgrepl.replication.spark.spark_store import check_connector
from airflow_provider_pgrepl.trace import log_unexpected, traced

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TableVersion:
    """Version `version` of the Delta table at `uri`; errors speak of `name`.

    `position`, under the app id `app`: at which a consistent point saw it; another one is another's.
    """

    name: TableName
    uri: str
    version: int
    app: str | None = None
    position: int | None = None

    def open(self) -> DeltaTable:
        """Raises LakeError."""
        try:
            opened = open_delta(self.uri, self.version)
        except (DeltaError, TableNotFoundError, OSError):
            raise self._unreadable() from None
        if self._is_known and app_version(opened, self.app or "") != self.position:
            raise LakeError(
                f"version {self.version} of {self.name} is not what the consistent point saw: the lake table"
                " was put back",
                "the replication app brings it forward when it runs; read it after that",
            )
        return opened

    def read(self) -> pa.Table:
        """All of it, in the table's own types. Raises LakeError."""
        opened = self.open()
        schema = pa.schema(opened.schema().to_arrow())
        try:
            found = query_delta(opened, "select * from it")
        except LakeUnavailableError:
            raise
        except Exception as error:  # noqa: BLE001 - DataFusion raises plain ones, which may hold values
            log_unexpected(log, f"reading {self.name}", error)
            failed = traced(self._unreadable(), error)
        else:
            return found.select(schema.names).cast(schema)
        raise failed

    def frame(self, spark: SparkSession) -> DataFrame:
        """For Spark, read when it is used. Raises LakeError, ToolError without a connector to its store."""
        if self._is_known:
            self.open()
        try:
            return spark.read.format("delta").option("versionAsOf", self.version).load(hadoop_uri(self.uri))
        except Exception as error:
            check_connector(error)
            # Spark raises one of many classes. Of a store it may be Spark's own way to it that is wrong.
            self.open()
            if is_object_store(self.uri):
                raise self._unreached() from error
            raise self._unreadable() from error

    @property
    def _is_known(self) -> bool:
        return self.app is not None and self.position is not None

    def _unreached(self) -> LakeError:
        return LakeError(
            f"Spark cannot read {self.name} from its store, which this process can",
            "keys have to be in the environment before the session starts, and in that of executors, or come"
            " from a role, or are settings of Hadoop's: docs/how-to/keep-the-lake-on-s3.md, -on-gcs.md and"
            " -on-azure.md. Spark's own words are above",
        )

    def _unreadable(self) -> LakeError:
        return LakeError(
            f"version {self.version} of {self.name} cannot be read any more, or the table is gone",
            "read at a newer consistent point; longer reads need a longer points_keep_all_h",
        )
