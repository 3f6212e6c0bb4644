"""Guarantees that this package needs from an S3 store, on a real server and on one that fails."""

from __future__ import annotations

import threading

import pyarrow as pa
import pytest

from airflow_provider_pgrepl.errors import FencedError, LakeError
from airflow_provider_pgrepl.replication.changelog.layout import changelog_uri
from airflow_provider_pgrepl.replication.changelog.own_tables import check_not_nested
from airflow_provider_pgrepl.replication.changelog.writer import ChangelogWriter, create_changelog
from airflow_provider_pgrepl.replication.delta.log import put_commit
from airflow_provider_pgrepl.replication.delta.table import append_delta, open_delta
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoint, ConsistentPoints
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.storage import objects, open_storage, read_commit, read_parquet
from tests.support.changelogs import Written, epoch_record
from tests.support.faulty_store import Asked, Fault, FaultyStore

ROUNDS = 300


def race(uri: str, version: int, writers: int) -> list[int]:
    """Let writers commit one version at the same time, and return the numbers of those that succeed."""
    ready, won = threading.Barrier(writers), list[int]()

    def write(number: int) -> None:
        ready.wait()
        if put_commit(uri, version, {"writer": number}, []):
            won.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return won


def test_concurrent_s3_commits_have_exactly_one_winner_per_version(s3_lake):
    uri = f"{s3_lake}/public/t"
    append_delta(uri, pa.table({"a": [1]}))
    for version in range(1, ROUNDS + 1):
        won = race(uri, version, 2)
        assert len(won) == 1
        said = read_commit(uri, version)
        assert said is not None
        assert f'"writer":{won[0]},'.encode() in said
    assert open_delta(uri).version() == ROUNDS


@pytest.mark.parametrize("fault", ["throttled", "cut", "answer lost"])
def test_a_commit_whose_put_fails_once_is_the_writers_own(fault, faulty, s3_lake):
    """A writer whose put was done, and whose answer was lost, recognizes its commit when it tries again."""
    uri = f"{s3_lake}/public/t"
    append_delta(uri, pa.table({"a": [1]}))
    faulty.next(fault, when=lambda asked: asked.is_commit)
    assert put_commit(uri, 1, {"operation": "test"}, [])
    assert faulty.faults == {fault: 1}
    assert not put_commit(uri, 1, {"operation": "test"}, [])


def test_put_commit_sends_a_single_put_request(faulty, s3_lake):
    uri = f"{s3_lake}/public/t"
    append_delta(uri, pa.table({"a": [1]}))
    faulty.asked.clear()
    assert put_commit(uri, 1, {"operation": "test"}, [])
    path = uri.removeprefix("s3:/")
    assert faulty.asked == {Asked("PUT", f"{path}/_delta_log/{1:020d}.json"): 1}


@pytest.mark.parametrize("fault", ["throttled", "cut", "answer lost"])
def test_a_receivers_commit_whose_put_fails_once_is_its_own(fault, faulty, s3_lake):
    receive_while_failing(fault, faulty, s3_lake)


def receive_while_failing(fault: Fault, faulty: FaultyStore, lake: str) -> None:
    """Commit while requests fail: no commit is taken for a successor's, and nothing is written twice."""
    uri = changelog_uri(lake)
    create_changelog(uri, epoch_record())
    written = Written(uri)
    for lsn in (100, 200):
        faulty.next(fault, when=lambda asked: asked.is_commit)
        written.transaction(lsn, r7=3)
        written.buffer.flush(LSN(0))
        assert faulty.faults[fault] == lsn // 100
    faulty.fault = lambda _: None
    # The first transaction also writes its relation.
    assert rows_of(uri) == [100] * 4 + [200] * 3


def test_a_receiver_that_was_fenced_is_told_so_there_too(faulty, s3_lake):
    uri = changelog_uri(s3_lake)
    create_changelog(uri, epoch_record())
    written = Written(uri)
    ChangelogWriter(uri)
    written.transaction(100, r7=1)
    with pytest.raises(FencedError):
        written.buffer.flush(LSN(0))


def rows_of(uri: str) -> list[int]:
    """The commit LSNs of a changelog's rows, in order."""
    filesystem, root = open_storage(uri)
    files = pa.table(open_delta(uri).get_add_actions(flatten=True)).column("path").to_pylist()
    rows = [read_parquet(filesystem, f"{root}/{path}", ["commit_lsn"]) for path in files]
    return sorted(pa.concat_tables(rows).column(0).to_pylist())


@pytest.mark.parametrize("fault", ["throttled", "cut", "answer lost"])
def test_a_point_whose_put_fails_once_is_written_once(fault, faulty, s3_lake):
    points = ConsistentPoints(s3_lake)
    first, second = (ConsistentPoint(Epoch(1), LSN(lsn), None, {"public.t": lsn}) for lsn in (1, 2))
    points.append(first)
    faulty.next(fault, when=lambda asked: asked.is_commit)
    points.append(second)
    assert faulty.faults == {fault: 1}
    assert ConsistentPoints(s3_lake).latest() == second


def test_a_receivers_commit_asks_no_more_of_the_store_the_more_there_are(faulty, s3_lake, monkeypatch):
    """A commit of points does not either.

    It writes a file and the commit, and reads the commit before; before the put it checks that this one is
    unchanged. It reads nothing else of what was committed since the last checkpoint.
    """
    # A mark that expires between two commits costs a request more: how many do is up to the host's speed.
    monkeypatch.setattr(objects, "_MARK_S", 600.0)
    uri = changelog_uri(s3_lake)
    create_changelog(uri, epoch_record())
    written, points, asked = Written(uri), ConsistentPoints(s3_lake), []
    for lsn in range(100, 2600, 100):
        faulty.asked.clear()
        written.transaction(lsn, r7=1)
        written.buffer.flush(LSN(0))
        points.append(ConsistentPoint(Epoch(1), LSN(lsn), None, {"public.t": lsn}))
        asked.append(sum(faulty.asked.values()))
    assert max(asked[1:]) <= 8, asked


def test_lake_inside_another_one_in_the_store_is_recognized(s3_lake):
    create_changelog(changelog_uri(f"{s3_lake}/outer"), epoch_record())
    check_not_nested(f"{s3_lake}/outer2")
    with pytest.raises(LakeError, match="would be inside another one"):
        check_not_nested(f"{s3_lake}/outer/public")
    with pytest.raises(LakeError, match="another lake is inside"):
        check_not_nested(s3_lake)
