"""app/needed_changes.py: which changes retention must keep for publishers."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_provider_pgrepl.replication.app.needed_changes import retention
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.publish.record import PublisherLog, PublisherRecord
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline

AMID = EventPosition(Epoch(1), LSN(500), 3)
AFTER = EventPosition.after_transaction(Epoch(1), LSN(500))


@pytest.mark.parametrize(("position", "above"), [(AMID, 499), (AFTER, 500)], ids=["amid", "after"])
def test_transaction_that_is_published_in_part_is_kept_whole(
    tmp_path: Path, position: EventPosition, above: int
) -> None:
    publishers = {"events": {"target": "rabbitmq", "publish_retention_h": 10_000}}
    pipeline = Pipeline(
        name="p",
        lake=str(tmp_path),
        tables=("public.t",),
        publishers=publishers,  # type: ignore[arg-type]
    )
    PublisherLog(pipeline.lake_root, "events").take(PublisherRecord(position), "me")
    kept = retention(pipeline, 1, LSN(900))
    assert kept.needed_above == {1: above}
    assert kept.needed_later == ((10_000, {1: 900}),)
