"""changelog/maintenance.py: which hours go, and that the receiver does not notice."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from airflow_provider_pgrepl.replication.changelog.layout import (
    PARTITION,
    RECEIVER_APP,
    TABLE_SCHEMA,
    EpochRecord,
    changelog_uri,
)
from airflow_provider_pgrepl.replication.changelog.maintenance import DroppedHours, drop_expired
from airflow_provider_pgrepl.replication.changelog.writer import ChangelogWriter, create_changelog
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch

NOW = datetime(2026, 5, 4, 12, 30, tzinfo=UTC)


@pytest.fixture
def lake(tmp_path: Path) -> str:
    record = EpochRecord("shop", Epoch(1), "7", 1, "pgrepl_shop", "pgrepl_shop", 16_400, LSN(0))
    create_changelog(changelog_uri(str(tmp_path)), record)
    return str(tmp_path)


def rows(*lsns: int, epoch: int = 1, hour: str = "2026-05-04T12") -> pa.Table:
    values = [
        {
            "epoch": epoch,
            "commit_lsn": lsn,
            "ordinal": 0,
            "relation_id": 7,
            "op": "I",
            "new": ["x"],
            PARTITION: hour,
        }
        for lsn in lsns
    ]
    return pa.Table.from_pylist(values, TABLE_SCHEMA)


def land(lake: str, hour: int, *lsns: int, day: int = 4, epoch: int = 1) -> None:
    """One changelog file in an hour of May 2026."""
    data = rows(*lsns, epoch=epoch, hour=f"2026-05-{day:02d}T{hour:02d}")
    write_deltalake(changelog_uri(lake), data, mode="append")


def held(lake: str) -> dict[str, list[int]]:
    actions = pa.table(DeltaTable(changelog_uri(lake)).get_add_actions(flatten=True)).to_pylist()
    found: dict[str, list[int]] = {}
    for file in actions:
        found.setdefault(file[f"partition.{PARTITION}"][-5:], []).append(file["max.commit_lsn"])
    return {hour: sorted(found[hour]) for hour in sorted(found)}


def test_hours_older_than_the_retention_go_whole_and_in_one_commit(lake: str) -> None:
    for hour, lsn in ((8, 10), (8, 20), (9, 30), (10, 40), (11, 50)):
        land(lake, hour, lsn)
    version = DeltaTable(changelog_uri(lake)).version()
    dropped = drop_expired(lake, 2, {1: 1_000}, NOW)
    assert dropped.hours == ("2026-05-04T08", "2026-05-04T09")
    assert dropped.files == 3
    assert dropped.bytes > 0
    assert held(lake) == {"04T10": [40], "04T11": [50]}
    assert DeltaTable(changelog_uri(lake)).version() == version + 1
    assert drop_expired(lake, 2, {1: 1_000}, NOW) == DroppedHours()
    assert DeltaTable(changelog_uri(lake)).version() == version + 1


def test_an_hour_counts_from_its_end(lake: str) -> None:
    land(lake, 10, 1)
    assert drop_expired(lake, 2, {1: 1_000}, NOW).files == 0
    assert drop_expired(lake, 1, {1: 1_000}, NOW).files == 1


def test_an_hour_with_a_change_that_a_table_has_a_right_to_stays_and_all_after_it(lake: str) -> None:
    for hour, lsns in ((1, (10,)), (2, (20, 31)), (3, (25,)), (4, (40,))):
        land(lake, hour, *lsns)
    assert drop_expired(lake, 1, {1: 30}, NOW).hours == ("2026-05-04T01",)
    assert held(lake) == {"04T02": [31], "04T03": [25], "04T04": [40]}
    assert drop_expired(lake, 1, {1: 31}, NOW).hours == ("2026-05-04T02", "2026-05-04T03")


def test_one_needed_file_keeps_all_files_of_its_hour(lake: str) -> None:
    land(lake, 1, 10)
    land(lake, 1, 50)
    assert drop_expired(lake, 1, {1: 49}, NOW) == DroppedHours()
    assert held(lake) == {"04T01": [10, 50]}


def test_an_epoch_that_is_over_needs_nothing_and_a_later_one_everything(lake: str) -> None:
    land(lake, 1, 900, epoch=1)
    land(lake, 2, 5, epoch=2)
    land(lake, 3, 6, epoch=3)
    assert drop_expired(lake, 1, {2: 5}, NOW).hours == ("2026-05-04T01", "2026-05-04T02")
    assert held(lake) == {"04T03": [6]}


def test_nothing_goes_when_nobody_says_what_is_needed(lake: str) -> None:
    land(lake, 1, 10)
    assert drop_expired(lake, 1, {}, NOW) == DroppedHours()


def test_a_file_without_statistics_stays(lake: str) -> None:
    land(lake, 1, 10)
    uri = changelog_uri(lake)
    log = max(Path(uri, "_delta_log").glob("*.json"))
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        if "add" in line:
            line["add"]["stats"] = json.dumps({"numRecords": 1})
    log.write_text("\n".join(map(json.dumps, lines)))
    assert drop_expired(lake, 1, {1: 1_000}, NOW) == DroppedHours()


def test_the_receiver_neither_fails_nor_is_fenced_by_it(lake: str) -> None:
    land(lake, 1, 10)
    writer = ChangelogWriter(changelog_uri(lake))
    assert drop_expired(lake, 1, {1: 1_000}, NOW).files == 1
    part = writer.write_part(rows(60).drop_columns([PARTITION]))
    writer.append([part], durable_lsn=LSN(61), first_lsn=LSN(60), last_lsn=LSN(60), last_commit_us=0)
    assert drop_expired(lake, 1, {1: 1_000}, NOW) == DroppedHours()
    table = DeltaTable(changelog_uri(lake))
    assert table.transaction_version(RECEIVER_APP) == 3
    assert len(table.file_uris()) == 1


def test_a_changelog_that_is_not_there_yet_is_nothing_to_do(tmp_path: Path) -> None:
    assert drop_expired(str(tmp_path), 1, {1: 1}, NOW) == DroppedHours()
