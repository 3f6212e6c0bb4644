"""From what is recorded of a pipeline's tables to the work on them."""

from __future__ import annotations

import logging

from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.lake.copied_choices import changed_choices, pipeline_of
from airflow_provider_pgrepl.replication.lake.points import Points
from airflow_provider_pgrepl.replication.lake.table import app_id
from airflow_provider_pgrepl.replication.lake.table_work import TableWork
from airflow_provider_pgrepl.replication.relation import TableName
from airflow_provider_pgrepl.replication.state.store import TableRecord

log = logging.getLogger(__name__)


class RecordedTables:
    """Makes the work of tables; remembers by which choices each was copied."""

    def __init__(self, pipeline: Pipeline, record: EpochRecord, points: Points) -> None:
        self._pipeline = pipeline
        self._record = record
        self._points = points
        self._copied: dict[TableName, tuple[str | None, Pipeline]] = {}

    def work(self, record: TableRecord, version: int | None = None) -> TableWork:
        """The work of a table that has been copied; `version`: one that is known to be ours.

        Without it that of the latest consistent point, if it names the table. Raises ConfigError, LakeError.
        """
        assert record.relation is not None
        return TableWork(
            record.relation,
            self._choices(record),
            app_id(self._pipeline.name, self._record.epoch),
            changelog_uri(self._pipeline.lake_root),
            self._named(record.table) if version is None else version,
        )

    def _named(self, table: TableName) -> int | None:
        point = self._points.latest()
        if point is None or point.epoch != self._record.epoch:
            return None
        return point.tables.get(str(table))

    def _choices(self, record: TableRecord) -> Pipeline:
        config, pipeline = self._copied.get(record.table, (None, None))
        if pipeline is None or config != record.config:
            changed = changed_choices(self._pipeline, record.config, record.table)
            if changed:
                log.warning(
                    "table %s: %s changed in the pipeline file; takes effect when the table is taken anew",
                    record.table,
                    ", ".join(changed),
                )
            pipeline = pipeline_of(self._pipeline, record.config, record.table)
            self._copied[record.table] = record.config, pipeline
        return pipeline
