"""Readers of changes while the hours that they read are joined, and the files that these had are gone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from airflow_provider_pgrepl.errors import ChangelogFileGoneError
from airflow_provider_pgrepl.replication.changelog.layout import changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import live_files, open_changelog
from airflow_provider_pgrepl.replication.events.reader import ChangeReader
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from tests.support.received import Received
from tests.support.replicated import execute
from tests.unit.test_maintenance import eager, parquet_files

LATER = timedelta(hours=2)


@pytest.fixture
def received(dsn: str, tmp_path: Path) -> Received:
    execute(dsn, "create table t(id int primary key, v text)")
    pipeline = Received(dsn, tmp_path, ("public.t",), flush_interval_s=0.05)
    pipeline.begin()
    for number in range(4):
        execute(dsn, f"insert into t select {number} * 10 + g, 'x' from generate_series(0, 4) g")
        pipeline.receive()
    return pipeline


def join_and_vacuum(received: Received) -> None:
    lake = Path(received.pipeline.lake_root)
    maintenance, uri = eager(lake), changelog_uri(str(lake))
    assert maintenance.run(datetime.now(UTC) + LATER).compacted_files >= 4
    done = maintenance.run(datetime.now(UTC) + LATER, reader_version=open_changelog(uri).version())
    assert done.files >= 4
    assert len(parquet_files(Path(uri))) <= 2, "two, when an hour ended meanwhile"


def ids(changes) -> list[int]:
    return [change.data["id"] for change in changes]


def test_a_reader_that_lags_goes_on_in_the_joined_files(received: Received) -> None:
    reader = ChangeReader(received.pipeline)
    found = ids(next(changes for changes in reader.read() if changes))
    assert len(found) == 5
    join_and_vacuum(received)
    found += [number for changes in reader.read() for number in ids(changes)]
    assert found == [number * 10 + g for number in range(4) for g in range(5)]


@pytest.mark.thorough("test_a_reader_that_lags_goes_on_in_the_joined_files")
def test_a_reader_goes_on_after_hours_were_joined_behind_it(received: Received, dsn: str) -> None:
    reader = ChangeReader(received.pipeline)
    assert len([number for changes in reader.read() for number in ids(changes)]) == 20
    join_and_vacuum(received)
    execute(dsn, "insert into t values (100, 'x')")
    received.receive()
    assert [number for changes in reader.read() for number in ids(changes)] == [100]


def test_a_file_that_is_lost_is_told(received: Received) -> None:
    reader = ChangeReader(received.pipeline)
    assert next(changes for changes in reader.read() if changes)
    uri = changelog_uri(received.pipeline.lake_root)
    for file in live_files(open_changelog(uri), Epoch(1), LSN(0))[1:]:
        Path(uri, file.path).unlink()
    with pytest.raises(ChangelogFileGoneError, match=r"changelog file .* no longer exists"):
        list(reader.read())
