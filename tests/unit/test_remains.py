"""changelog/remains.py: what a changelog says of itself that cannot be opened."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable

from airflow_provider_pgrepl.errors import LakeUnavailableError
from airflow_provider_pgrepl.replication.changelog import reader
from airflow_provider_pgrepl.replication.changelog.remains import ReadableChangelog, read_remains
from tests.support.changelogs import Written, new_changelog


def commit_file(uri: str, version: int) -> Path:
    return Path(uri, "_delta_log", f"{version:020d}.json")


@pytest.fixture
def one(tmp_path: Path) -> Written:
    one = Written(new_changelog(tmp_path))
    for lsn in (100, 200, 300):
        one.transaction(lsn, r7=1)
        one.flush()
    return one


@pytest.mark.parametrize("is_cleaned", [False, True])
def test_identity_and_position_are_those_before_the_damage(one: Written, *, is_cleaned: bool) -> None:
    newest = int(DeltaTable(one.uri).version())
    before = reader.open_changelog(one.uri)
    before.load_as_version(newest - 1)
    expected = (
        newest - 1,
        reader.read_epoch(one.uri),
        reader.lake_id(before),
        reader.read_token(before),
        reader.read_durable_lsn(before),
    )
    if is_cleaned:
        DeltaTable(one.uri, version=newest - 1).create_checkpoint()
        for version in range(newest):
            commit_file(one.uri, version).unlink()
    commit_file(one.uri, newest).write_text("{")
    with pytest.raises(LakeUnavailableError):
        reader.open_changelog(one.uri)
    for damaged in (newest, None):
        found = read_remains(one.uri, damaged)
        assert (found.version, found.record, found.lake_id, found.token, found.durable_lsn) == expected


def test_nothing_behind_a_gap_counts(one: Written) -> None:
    commit_file(one.uri, 2).unlink()
    assert read_remains(one.uri, 3).version == 1
    commit_file(one.uri, 0).unlink()
    assert read_remains(one.uri, None) == ReadableChangelog()
