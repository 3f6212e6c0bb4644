"""changelog/: one writer, whole transactions in one commit, and a reader that finds only what it asks for."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from airflow_provider_pgrepl.errors import (
    ChangelogError,
    FencedError,
    LakeError,
    LakeUnavailableError,
    Retry,
    RewoundError,
)
from airflow_provider_pgrepl.replication.changelog import reader
from airflow_provider_pgrepl.replication.changelog.layout import (
    LAYOUT_VERSION,
    PUBLISHED_APP,
    RECEIVER_APP,
    ROW_SCHEMA,
    EpochRecord,
)
from airflow_provider_pgrepl.replication.changelog.writer import (
    ChangelogWriter,
    Fence,
    begin_epoch,
    create_changelog,
    mark,
    mark_torn_down,
)
from airflow_provider_pgrepl.replication.delta import single_writer_log
from airflow_provider_pgrepl.replication.delta.log import put_version
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from tests.support import wire_bytes as wire
from tests.support.announced import announce, relation
from tests.support.changelogs import Written, epoch_record, new_changelog

ALL = LSN(0)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return new_changelog(tmp_path)


def read(uri: str, relation_id: int, above: int = 0) -> pa.Table:
    files = reader.live_files(DeltaTable(uri), Epoch(1), LSN(above))
    paths = [file.path for file in files if file.may_hold(relation_id)]
    return reader.read_rows(pafs.LocalFileSystem(), uri, paths, relation_id, LSN(above))


def commit_of(uri: str, version: int) -> reader.Commit:
    return reader.read_commit(pafs.LocalFileSystem(), uri, version)


# One writer.


def test_a_new_writer_fences_the_old_one(uri: str) -> None:
    old = Written(uri)
    old.transaction(100, r7=1)
    old.flush()
    new = Written(uri)
    version = new.writer.version
    old.transaction(200, r7=1)
    with pytest.raises(FencedError):
        old.flush()
    with pytest.raises(FencedError):
        old.writer.record_keepalive(LSN(300))
    assert DeltaTable(uri).version() == version
    new.transaction(200, r7=2)
    new.flush()
    assert read(uri, 7)["commit_lsn"].to_pylist() == [100, 100, 200, 200, 200]


def test_an_idle_writer_is_fenced_at_its_next_keepalive(uri: str) -> None:
    old = ChangelogWriter(uri)
    ChangelogWriter(uri)
    with pytest.raises(FencedError):
        old.record_keepalive(LSN(60))


def test_one_that_was_replaced_is_not_continued_in_the_name_of_who_replaced_it(uri: str) -> None:
    old = ChangelogWriter(uri)
    ChangelogWriter(uri)
    with pytest.raises(FencedError):
        old.record_keepalive(LSN(9_000))
    with pytest.raises(FencedError):
        ChangelogWriter(uri, old.sequence)


def test_writer_replaced_after_commit_keeps_old_commit_and_is_fenced_at_next(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, put, successors = Written(uri), put_version, list[ChangelogWriter]()

    def put_and_be_replaced(*arguments: Any) -> bool:
        is_done = put(*arguments)
        if not successors:
            monkeypatch.setattr(single_writer_log, "put_version", put)
            successors.append(ChangelogWriter(uri))
        return is_done

    monkeypatch.setattr(single_writer_log, "put_version", put_and_be_replaced)
    old.transaction(100, r7=1)
    old.flush()
    assert successors[0].durable_lsn == old.writer.durable_lsn == 108
    old.transaction(200, r7=1)
    with pytest.raises(FencedError):
        old.flush()
    assert read(uri, 7)["commit_lsn"].to_pylist() == [100, 100]


def test_markers_and_upkeep_stand_before_a_commit_and_another_shape_does_not(uri: str) -> None:
    written = Written(uri)
    mark(uri)
    mark(uri)
    written.transaction(100, r7=1)
    written.flush()
    assert written.writer.version == DeltaTable(uri).version()
    DeltaTable(uri).alter.set_table_properties({"delta.logRetentionDuration": "interval 9 days"})
    written.transaction(200, r7=1)
    with pytest.raises(FencedError):
        written.flush()


def test_rows_that_somebody_deletes_are_not_passed_over(uri: str) -> None:
    written = Written(uri)
    written.transaction(100, r7=1)
    written.flush()
    DeltaTable(uri).delete("commit_lsn = 100")
    written.transaction(200, r7=1)
    with pytest.raises(FencedError):
        written.flush()


def test_a_changelog_that_was_put_back_gets_no_commit_above_a_gap(uri: str, tmp_path: Path) -> None:
    written = Written(uri)
    shutil.copytree(uri, tmp_path / "backup")
    for lsn in (100, 200, 300):
        written.transaction(lsn, r7=1)
        written.flush()
    shutil.rmtree(uri)
    shutil.copytree(tmp_path / "backup", uri)
    version = DeltaTable(uri).version()
    with pytest.raises(FencedError):
        written.writer.record_keepalive(LSN(400))
    assert DeltaTable(uri).version() == version


def test_one_that_slept_until_the_log_was_cleaned_does_not_take_its_place_for_free(uri: str) -> None:
    """A halted machine resumes: others have written for hours, and a checkpoint replaced their commits."""
    old, new = Written(uri), Written(uri)
    for lsn in (100, 200, 300):
        new.transaction(lsn, r7=1)
        new.flush()
    DeltaTable(uri).create_checkpoint()
    for version in range(DeltaTable(uri).version()):
        (Path(uri) / "_delta_log" / f"{version:020d}.json").unlink()
    old.transaction(100, r7=1)
    with pytest.raises(FencedError):
        old.flush()
    assert read(uri, 7)["commit_lsn"].to_pylist() == [100, 100, 200, 300]


def test_only_one_concurrently_started_writer_can_write(uri: str) -> None:
    for _ in range(5):
        barrier, survivors = threading.Barrier(4), []

        def start(barrier: threading.Barrier = barrier, survivors: list[ChangelogWriter] = survivors) -> None:
            barrier.wait()
            try:
                survivors.append(ChangelogWriter(uri))
            except FencedError:
                return

        threads = [threading.Thread(target=start) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        written = 0
        for writer in survivors:
            try:
                writer.record_keepalive(LSN(writer.durable_lsn + 1))
                written += 1
            except FencedError:
                continue
        assert written == 1


def test_a_mark_or_a_commit_without_app_id_does_not_fence(uri: str) -> None:
    written = Written(uri)
    mark(uri)
    written.transaction(100, r7=1)
    written.flush()
    mark(uri)
    written.writer.record_keepalive(LSN(500))
    assert reader.read_durable_lsn(DeltaTable(uri)) == 500
    assert commit_of(uri, DeltaTable(uri).version()).record.kind == "keepalive"


def test_being_fenced_can_be_retried(uri: str) -> None:
    assert FencedError("").retry is Retry.TIMED


# Epochs.


def test_a_new_epoch_fences_the_receiver_and_begins_at_its_consistent_point(uri: str) -> None:
    old = Written(uri)
    old.transaction(1_000, r7=1)
    old.flush()
    begin_epoch(uri, epoch_record(2, 70))
    old.transaction(2_000, r7=1)
    with pytest.raises(FencedError):
        old.flush()
    new = ChangelogWriter(uri)
    assert (new.epoch, new.durable_lsn) == (2, 70)
    table = DeltaTable(uri)
    assert (reader.read_epoch_number(table), reader.read_durable_lsn(table)) == (2, 70)
    assert reader.read_epoch(uri) == epoch_record(2, 70)
    assert reader.live_files(table, Epoch(2), ALL) == []
    assert len(reader.live_files(table, Epoch(1), ALL)) == 1


def test_a_changelog_is_made_once(uri: str) -> None:
    with pytest.raises(LakeError, match="cannot be created"):
        create_changelog(uri, epoch_record())


def test_a_missing_changelog_names_the_snapshot_app(tmp_path: Path) -> None:
    for act in (reader.read_epoch, reader.open_changelog, ChangelogWriter):
        with pytest.raises(ChangelogError, match="no changelog in") as caught:
            act(str(tmp_path / "nothing"))
        assert "pgrepl snapshot" in caught.value.hint


def test_fence_has_the_token_that_the_source_gave_for_the_last_one(uri: str) -> None:
    asked: list[int] = []

    def renew(token: int, record: EpochRecord, _: LSN) -> Fence:
        asked.append(token)
        return Fence(token + 5, record.timeline)

    ChangelogWriter(uri, check_source=renew)
    ChangelogWriter(uri)
    writer = ChangelogWriter(uri, check_source=renew)
    writer.record_keepalive(LSN(writer.durable_lsn + 1))
    assert asked == [0, 5]
    assert reader.read_token(DeltaTable(uri)) == 10


def test_fence_that_follows_another_timeline_records_it_in_one_commit(uri: str) -> None:
    before = ChangelogWriter(uri)
    assert (before.epoch_record.timeline, before.published) == (1, 0)
    before.published = 5
    before.record_keepalive(LSN(before.durable_lsn + 1))
    version = DeltaTable(uri).version()
    writer = ChangelogWriter(uri, check_source=lambda token, *_: Fence(token, 2))
    assert DeltaTable(uri).version() == version + 1
    assert reader.read_epoch(uri).timeline == writer.epoch_record.timeline == 2
    assert replace(reader.read_epoch(uri), timeline=1).to_json() == epoch_record().to_json()
    # What is published is compared again: the former primary's last DDL may be lost.
    assert DeltaTable(uri).transaction_version(PUBLISHED_APP) == writer.published == 0
    with pytest.raises(FencedError):
        before.record_keepalive(LSN(before.durable_lsn + 1))
    writer.record_keepalive(LSN(writer.durable_lsn + 1))


def test_no_fence_is_written_for_a_source_that_lacks_the_token(uri: str) -> None:
    def lacks(*_: object) -> Fence:
        raise RewoundError("a copy")

    before = DeltaTable(uri).version()
    with pytest.raises(RewoundError):
        ChangelogWriter(uri, check_source=lacks)
    assert DeltaTable(uri).version() == before


def test_epoch_that_was_given_up_is_marked_until_a_receiver_or_a_new_epoch_begins(uri: str) -> None:
    for begin in (ChangelogWriter, lambda uri: begin_epoch(uri, replace(epoch_record(), epoch=Epoch(2)))):
        assert not reader.is_torn_down(DeltaTable(uri))
        mark_torn_down(uri)
        assert reader.is_torn_down(DeltaTable(uri))
        begin(uri)
    assert not reader.is_torn_down(DeltaTable(uri))


def test_changelog_is_at_rest_once_its_last_writer_says_that_it_ends(uri: str) -> None:
    assert reader.is_at_rest(DeltaTable(uri)), "none has been there"
    for end in (ChangelogWriter.rest, lambda _: begin_epoch(uri, replace(epoch_record(), epoch=Epoch(2)))):
        writer = ChangelogWriter(uri)
        writer.give_sign_of_life(7, writer.durable_lsn)
        assert not reader.is_at_rest(DeltaTable(uri))
        assert reader.read_token(DeltaTable(uri)) == writer.token == 7
        mark(uri)
        end(writer)
        assert reader.is_at_rest(DeltaTable(uri))
    assert ChangelogWriter(uri).durable_lsn == epoch_record().consistent_point


def test_a_newer_layout_is_refused(tmp_path: Path) -> None:
    uri = str(tmp_path / "changelog")
    create_changelog(uri, replace(epoch_record(), layout=LAYOUT_VERSION + 1))
    for act in (reader.read_epoch, ChangelogWriter):
        with pytest.raises(ChangelogError, match=f"layout version {LAYOUT_VERSION + 1}") as caught:
            act(uri)
        assert "upgrade" in caught.value.hint
    assert DeltaTable(uri).version() == 0


@pytest.mark.parametrize(
    "text", [None, "", "a table of mine", "[]", "{}", '{"layout": "x"}', '{"layout": 1}']
)
def test_a_description_of_somebody_else_is_refused(text: str | None) -> None:
    with pytest.raises(ChangelogError, match="not written by this product"):
        EpochRecord.from_json(text)


def test_somebody_elses_table_is_not_written_to(tmp_path: Path) -> None:
    uri = str(tmp_path / "changelog")
    write_deltalake(uri, pa.table({"a": [1]}))
    with pytest.raises(ChangelogError, match="not written by this product"):
        ChangelogWriter(uri)
    assert DeltaTable(uri).version() == 0


def test_an_epoch_record_survives_its_json() -> None:
    assert EpochRecord.from_json(epoch_record(4, 2**40).to_json()) == epoch_record(4, 2**40)


# Commits.


def test_a_commit_says_what_it_holds(uri: str) -> None:
    written = Written(uri)
    written.transaction(100, r9=2)
    written.transaction(200, r7=1)
    version = written.flush()
    record = commit_of(uri, version).record
    assert record is not None
    assert (record.kind, record.epoch, record.relations, record.rows) == ("data", 1, (7, 9), 5)
    assert (record.first_commit_lsn, record.last_commit_lsn, record.durable_lsn) == (100, 200, 208)
    assert record.last_commit_us == wire.PG_EPOCH_US + 200
    assert record.bytes > 0
    assert written.writer.durable_lsn == reader.read_durable_lsn(DeltaTable(uri)) == 208
    kinds = [commit_of(uri, earlier).record.kind for earlier in range(version + 1)]
    assert kinds == ["epoch", "fence", "data"]


def test_a_flush_without_whole_transactions_commits_nothing(uri: str) -> None:
    written = Written(uri)
    before = written.writer.version
    written.take(written.begin(100), *written.insert(7, 1, 2))
    assert not written.buffer.has_whole
    assert written.flush() == before
    written.take(written.commit(100))
    assert written.flush() == before + 1


def test_an_open_transaction_stays_out_of_the_commit_of_whole_ones(uri: str) -> None:
    written = Written(uri)
    written.take(
        written.begin(100),
        *written.insert(7, 1),
        written.commit(100),
        written.begin(200),
        *written.insert(7, 2),
    )
    written.flush()
    assert read(uri, 7)["commit_lsn"].to_pylist() == [100, 100]
    assert written.writer.durable_lsn == 108
    written.take(*written.insert(7, 3), written.commit(200))
    written.flush()
    assert read(uri, 7)["commit_lsn"].to_pylist() == [100, 100, 200, 200]


def test_a_large_transaction_is_written_ahead_in_parts_that_one_commit_adds(uri: str) -> None:
    written = Written(uri, part_bytes=20_000)
    before = written.writer.version
    written.take(written.begin(100), *written.insert(7, *range(500)))
    for chunk in range(1, 5):
        written.take(*written.insert(7, *range(chunk * 500, (chunk + 1) * 500)))
    ahead = list(Path(uri).glob("*T*/*.parquet"))
    assert len(ahead) >= 4
    assert DeltaTable(uri).version() == before
    assert read(uri, 7).num_rows == 0
    written.take(written.commit(100), written.begin(300), *written.insert(7, "x"), written.commit(300))
    assert written.flush() == before + 1
    commit = commit_of(uri, before + 1)
    assert len(commit.files) == len(ahead) + 1
    rows = read(uri, 7)
    assert rows["ordinal"].to_pylist() == [*range(2_501), 0]
    keys = [
        new[0] for new, op in zip(rows["new"].to_pylist(), rows["op"].to_pylist(), strict=True) if op == "I"
    ]
    assert keys == [*map(str, range(2_500)), "x"]


def test_transactions_without_rows_leave_no_commit(uri: str) -> None:
    written = Written(uri)
    before = written.writer.version
    written.take(written.begin(100), written.commit(100))
    assert not written.buffer.has_whole
    assert written.buffer.whole_bytes == 0
    assert written.flush() == before


def test_a_flush_goes_up_to_what_is_known_to_be_idle(uri: str) -> None:
    written = Written(uri)
    written.transaction(100, r7=1)
    written.buffer.flush(LSN(900))
    assert written.writer.durable_lsn == 900
    written.transaction(900, r7=1)
    written.buffer.flush(LSN(900))
    assert written.writer.durable_lsn == 908


def test_storage_that_refuses_can_be_retried(uri: str) -> None:
    written = Written(uri)
    written.transaction(100, r7=1)
    written.flush()
    for folder in Path(uri).glob("*T*"):
        folder.rename(Path(uri) / "away")
        folder.write_text("not a folder")
    written.transaction(200, r7=1)
    with pytest.raises(LakeUnavailableError):
        written.flush()
    assert LakeUnavailableError("").retry is Retry.TIMED


# Reading.


def test_a_reader_of_one_relation_reads_only_its_row_groups(uri: str) -> None:
    written = Written(uri)
    written.transaction(100, r7=3_000, r8=3_000, r9=3)
    written.transaction(200, r8=10, r10=2)
    written.flush()
    (file,) = reader.live_files(DeltaTable(uri), Epoch(1), ALL)
    metadata = pq.ParquetFile(f"{uri}/{file.path}").metadata
    groups = [metadata.row_group(n).column(5).statistics for n in range(metadata.num_row_groups)]
    assert [(group.min, group.max) for group in groups] == [(7, 7), (8, 8), (9, 10)]
    assert read(uri, 8).num_rows == 3_011
    assert set(read(uri, 10)["relation_id"].to_pylist()) == {10}
    assert read(uri, 10).num_rows == 3
    assert read(uri, 11).num_rows == 0
    assert read(uri, 7).schema == ROW_SCHEMA


def test_rows_come_in_order_and_only_above_an_lsn(uri: str) -> None:
    written = Written(uri)
    for lsn in (100, 200, 300):
        written.transaction(lsn, r7=2)
        written.flush()
    files = reader.live_files(DeltaTable(uri), Epoch(1), ALL)
    assert [file.min_lsn for file in files] == [100, 200, 300]
    backwards = [file.path for file in reversed(files)]
    rows = reader.read_rows(pafs.LocalFileSystem(), uri, backwards, 7, LSN(100))
    assert rows["commit_lsn"].to_pylist() == [200, 200, 300, 300]
    assert [file.min_lsn for file in reader.live_files(DeltaTable(uri), Epoch(1), LSN(200))] == [300]
    assert reader.live_files(DeltaTable(uri), Epoch(1), LSN(300)) == []


def test_every_kind_of_row_comes_back(uri: str) -> None:
    written = Written(uri)
    written.take(
        wire.put_message(80, "p", b"\x01", transactional=False),
        written.begin(100),
        announce(7, "k", "v"),
        wire.put_insert(7, ["1", None]),
        wire.put_update(7, ["2", ...], ["1", None]),
        wire.put_delete(7, ["2", None]),
        wire.put_truncate([7], 2),
        written.commit(100),
    )
    written.flush()
    rows = read(uri, 7)
    assert rows["op"].to_pylist() == ["R", "I", "U", "D", "T"]
    assert rows["new"].to_pylist()[1:] == [["1", None], ["2", None], None, ["restart identity"]]
    assert rows["old"].to_pylist() == [None, None, ["1", None], ["2", None], None]
    assert rows["unchanged"].to_pylist() == [None, None, [1], None, None]
    assert read(uri, 0)["new"].to_pylist() == [["p", "\\x01"]]
    assert pc.unique(rows["relation_version"]).to_pylist() == [relation(7, "k", "v").version]


def test_a_relation_version_is_found_wherever_it_stands(uri: str) -> None:
    written = Written(uri)
    for lsn, columns in ((100, ("k", "v")), (200, ("k", "w"))):
        written.take(
            written.begin(lsn), announce(7, *columns), wire.put_insert(7, ["1", "2"]), written.commit(lsn)
        )
        written.flush()
    written.transaction(300, r8=1)
    written.flush()
    found = reader.find_relation_record(uri, 7, relation(7, "k", "v").version)
    assert found is not None
    assert found.catalog == relation(7, "k", "v")
    assert reader.find_relation_record(uri, 7, 12345) is None


def test_a_file_that_is_gone_is_an_error_not_an_empty_answer(uri: str) -> None:
    written = Written(uri)
    written.transaction(100, r7=1)
    written.flush()
    (file,) = reader.live_files(DeltaTable(uri), Epoch(1), ALL)
    (Path(uri) / file.path).unlink()
    with pytest.raises(ChangelogError, match="no longer exists"):
        read(uri, 7)


def test_a_commit_whose_log_file_is_gone_is_told_apart(uri: str) -> None:
    with pytest.raises(FileNotFoundError):
        commit_of(uri, 99)


def test_the_fence_counts_under_the_receivers_app_id(uri: str) -> None:
    before = DeltaTable(uri).transaction_version(RECEIVER_APP)
    ChangelogWriter(uri)
    assert DeltaTable(uri).transaction_version(RECEIVER_APP) == before + 1
