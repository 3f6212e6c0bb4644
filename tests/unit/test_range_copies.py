"""The ranges of one table: when they are copied again, and the files left by a copy that fails."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from airflow_provider_pgrepl.errors import PrivilegeError, SourceConnectionError, TableSnapshotError
from airflow_provider_pgrepl.replication.lake.delta.parquet_writer import data_files
from airflow_provider_pgrepl.replication.lake.snapshot.range_copy import CopyJob, RangeCopies, RangeOutcome
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.source.copy.copy_stream import CopyRange
from tests.support.changes import work_of

SCHEMA = pa.schema({"id": pa.int64()})
ENDED = SourceConnectionError("terminating connection due to administrator command")


RANGE = CopyRange(7, TableName("public", "t"), "", 1)


class Keeper:
    """A keeper that can be renewed `loans` times, each time under another snapshot."""

    def __init__(self, loans: int) -> None:
        self.snapshot, self._left = "first", loans

    def check(self) -> None:
        """Do nothing: the lock is never given up."""

    def renew(self) -> bool:
        self._left -= 1
        self.snapshot = f"{self._left} left"
        return self._left >= 0


def copies(keeper: Any, lake_root: str = "/nowhere") -> RangeCopies:
    more: Any = ()
    job = CopyJob("", keeper.snapshot, work_of(7).relation, more, lake_root, more, more)
    return RangeCopies(SimpleNamespace(), job, keeper, 1)  # type: ignore[arg-type]


def test_ranges_begin_again_under_the_new_snapshot_without_a_pause(monkeypatch):
    seen = list[str]()

    def attempt(self: Any, left: Any, done: Any) -> Any:
        seen.append(self._job.snapshot)
        if len(seen) < 9:
            return ENDED
        done.update({number: RangeOutcome(number, ()) for number in left})
        return None

    monkeypatch.setattr(RangeCopies, "_try", attempt)
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it has paused"))
    ranges = [RANGE]
    assert copies(Keeper(8)).run(ranges) == []
    assert seen == ["first", *(f"{left} left" for left in range(7, -1, -1))]


@pytest.mark.parametrize("error", [TableSnapshotError("the copy was given up"), KeyboardInterrupt()])
def test_files_of_a_copy_that_fails_are_deleted_and_no_others(monkeypatch, tmp_path, error):
    relation = work_of(7).relation
    folder = tmp_path / relation.table.path
    folder.mkdir(parents=True)
    (folder / "part-of-a-person.parquet").touch()

    def attempt(self: Any, left: Any, done: Any) -> Any:
        for number in left:
            with data_files(str(tmp_path), relation.table.path, SCHEMA) as files:
                files.write(pa.record_batch({"id": [1]}, SCHEMA))
                done[number] = RangeOutcome(number, tuple(files.finish()))
        assert len(list(folder.iterdir())) == 3

    def given_up() -> None:
        raise error

    monkeypatch.setattr(RangeCopies, "_try", attempt)
    failing = copies(SimpleNamespace(snapshot="", check=given_up), str(tmp_path))
    ranges = [RANGE, RANGE]
    with pytest.raises(type(error)):
        failing.run(ranges)
    assert [path.name for path in folder.iterdir()] == ["part-of-a-person.parquet"]


@pytest.mark.parametrize(("error", "tries"), [(ENDED, 4), (PrivilegeError("denied"), 1)])
def test_range_copy_tries_lost_connection_four_times_and_missing_privilege_once(monkeypatch, error, tries):
    tried = list[object]()
    monkeypatch.setattr(RangeCopies, "_try", lambda *_: tried.append(1) or error)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    ranges = [RANGE]
    with pytest.raises(type(error)):
        copies(Keeper(0)).run(ranges)
    assert len(tried) == tries
