"""A changelog to publish, and a run of a publisher over all of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from airflow_provider_pgrepl.replication.app.event_makers import converter_factory
from airflow_provider_pgrepl.replication.changelog.layout import changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import open_changelog, read_durable_lsn
from airflow_provider_pgrepl.replication.events.position import begin_after
from airflow_provider_pgrepl.replication.events.publish.publisher import Publisher
from airflow_provider_pgrepl.replication.events.publish.record import PublisherLog, PublisherRecord
from airflow_provider_pgrepl.replication.events.targets.base import Target
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.publisher import PublisherSettings, parse_publisher
from benchmarks import pipelines, workload
from benchmarks.receive import receive
from benchmarks.source import Source

_INSERTS, _UPDATES = 150_000, 75_000


def received(source: Source, folder: Path, scale: float) -> tuple[Pipeline, int]:
    """Return a pipeline with a changelog, and the number of events in it."""
    workload.create_table(source)
    pipeline = pipelines.make_pipeline(folder, "publish", workload.TABLE)
    pipelines.publish(source.dsn, pipeline)
    source.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", pipeline.slot)
    step = workload.ROWS_A_TRANSACTION
    inserts, updates = (int(count * scale) // step * step for count in (_INSERTS, _UPDATES))
    workload.fill(source, inserts, updates)
    source.settle()
    receive(source, pipeline, source.end_lsn())
    return pipeline, inserts + updates


def settings(pipeline: Pipeline, name: str, given: Mapping[str, Any]) -> PublisherSettings:
    """Return the settings of a publisher, with defaults for those that are not in `given`."""
    return parse_publisher(pipeline.name, name, dict(given))


def publish(pipeline: Pipeline, name: str, given: Mapping[str, Any], target: Target) -> float:
    """Return the seconds from connecting until all events are acknowledged and the position is on disk."""
    changelog = open_changelog(changelog_uri(pipeline.lake_root))
    publisher_log = PublisherLog(pipeline.lake_root, name)
    record = publisher_log.take(PublisherRecord(begin_after(changelog, None)), "bench")
    started = time.perf_counter()
    told = settings(pipeline, name, given)
    publisher = Publisher(pipeline, told, publisher_log, record, target, _wait, converter_factory(told))
    if not publisher.run(LSN(read_durable_lsn(changelog) - 1)):
        raise RuntimeError("not everything was published")
    return time.perf_counter() - started


def _wait(seconds: float) -> bool:
    time.sleep(seconds)
    return False
