"""Records of copied ranges in the lake: which ones a later copy may use, and what is deleted with them."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from airflow_provider_pgrepl.errors import LakeUnavailableError, TableSnapshotError
from airflow_provider_pgrepl.replication.lake.delta.parquet_writer import WrittenFile, data_files
from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import commit_snapshot
from airflow_provider_pgrepl.replication.lake.snapshot import kept_ranges
from airflow_provider_pgrepl.replication.lake.snapshot.kept_ranges import KeptRanges
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column, PgType, Relation
from airflow_provider_pgrepl.replication.settings.tables import TableOptions, TablePolicy
from airflow_provider_pgrepl.replication.source.copy.copy_stream import CopyRange
from airflow_provider_pgrepl.replication.storage import durable
from tests.support.changelogs import epoch_record
from tests.unit.test_torn import commit, empty, half

SCHEMA = pa.schema({"id": pa.int64()})
TABLE = TableName("public", "t")
RELATION = Relation(1, TABLE, (Column("id", 1, 20, -1, "bigint"),))
TEXT = PgType(25, name="text")
OF_EXTENSION = PgType(20_000, name="geometry", extension="postgis")
XMIN = 1000


def kept(
    lake: Path, position: int = 500, relation: Relation = RELATION, options: TableOptions | None = None
) -> KeptRanges:
    return KeptRanges(str(lake), relation, options or TableOptions(), epoch_record(), LSN(position))


def part(start: int) -> CopyRange:
    return CopyRange(1, TABLE, "", 10, leaf_oid=1, start=start, filenode=1)


def write_file(lake: Path) -> list[WrittenFile]:
    with data_files(str(lake), TABLE.path, SCHEMA) as files:
        files.write(pa.record_batch({"id": [1, 2, 3]}, SCHEMA))
        return files.finish()


def copied(lake: Path, *starts: int, xmin: int = XMIN) -> list[WrittenFile]:
    """Copy and record ranges, as a run that is then killed; return their files."""
    ranges = kept(lake)
    ranges.find(xmin)
    files = [write_file(lake)[0] for _ in starts]
    for start, file in zip(starts, files, strict=True):
        ranges.add(part(start), [file])
    ranges.record()
    return files


def paths(lake: Path) -> set[str]:
    return {path.name for path in (lake / TABLE.path).iterdir()}


def records(lake: Path) -> list[Path]:
    return sorted((lake / "_pgrepl/copies").rglob("*.json"))


def test_later_copy_finds_ranges_with_their_files(tmp_path):
    files = copied(tmp_path, 0, 10)
    newer = copied(tmp_path, 20, xmin=XMIN + 1)
    later = kept(tmp_path)
    found = sorted(later.find(XMIN + 5), key=lambda one: one.start)
    assert [(one.start, one.end, one.rows, one.xmin) for one in found] == [
        (0, 10, 3, XMIN),
        (10, 20, 3, XMIN),
        (20, 30, 3, XMIN + 1),
    ]
    assert [later.files(one) for one in found] == [(files[0],), (files[1],), (newer[0],)]


@pytest.mark.parametrize(
    "other",
    [
        {"relation": replace(RELATION, oid=2)},
        {"relation": replace(RELATION, columns=(replace(RELATION.columns[0], xmin=7),))},
        {"options": TableOptions(commit_lsn_column=False)},
        {"options": TableOptions(TablePolicy(deletes="soft"))},
        {"position": 499},
    ],
)
def test_other_definitions_settings_and_earlier_positions_find_nothing(tmp_path, other):
    copied(tmp_path, 0)
    assert kept(tmp_path, **other).find(XMIN) == []


@pytest.mark.parametrize(("since", "is_found"), [(-1, False), (0, True), (2**30 - 1, True), (2**30, False)])
def test_transaction_ids_are_compared_only_where_their_order_is_known(tmp_path, since, is_found):
    copied(tmp_path, 0)
    assert bool(kept(tmp_path).find(XMIN + since)) == is_found


def test_ranges_whose_files_are_old_changed_or_gone_are_not_found(tmp_path):
    files = copied(tmp_path, 0, 10, 20, 30)
    folder = tmp_path / TABLE.path
    (folder / files[0].path).unlink()
    (folder / files[1].path).write_bytes(b"torn")
    before = (datetime.now(UTC) - kept_ranges.MOST_AGE).timestamp() - 1
    os.utime(folder / files[2].path, (before, before))
    assert [one.start for one in kept(tmp_path).find(XMIN)] == [30]


@pytest.mark.parametrize(
    "content", [b"", b'{"layout": 1, "ran', b'{"layout": 2}', b"[]", b'{"layout": 1, "identity": ""}']
)
def test_record_that_is_not_whole_is_left_out(tmp_path, content):
    copied(tmp_path, 0)
    (records(tmp_path)[0].parent / "torn.json").write_bytes(content)
    assert len(kept(tmp_path).find(XMIN)) == 1


def test_forgotten_ranges_are_deleted_with_their_files_but_for_used_ones(tmp_path):
    copied(tmp_path, 0, 10)
    ranges = kept(tmp_path)
    used, _ = ranges.find(XMIN)
    new = write_file(tmp_path)
    ranges.add(part(10), new)
    ranges.forget([*ranges.files(used), *new])
    assert not (tmp_path / "_pgrepl/copies").exists()
    assert paths(tmp_path) == {ranges.files(used)[0].path, new[0].path}
    # The thread that reports may still record what was added.
    ranges.record()
    assert not records(tmp_path)


def test_no_file_is_deleted_that_a_version_or_another_program_has_made(tmp_path):
    committed, free = copied(tmp_path, 0, 10)
    commit_snapshot(f"{tmp_path}/{TABLE.path}", SCHEMA, [committed], LSN(5), "shop", Epoch(1))
    assert [one.start for one in kept(tmp_path).find(XMIN)] == [10]
    kept_ranges.expire(str(tmp_path), datetime.now(UTC) + timedelta(days=1))
    assert not records(tmp_path)
    assert {committed.path, free.path} <= paths(tmp_path)


@pytest.mark.parametrize("tear", [half, empty])
def test_table_with_a_torn_log_can_be_copied(tmp_path, tear):
    """A snapshot is the remedy for it."""
    uri = f"{tmp_path}/{TABLE.path}"
    for position in (5, 6):
        commit_snapshot(uri, SCHEMA, write_file(tmp_path), LSN(position), "shop", Epoch(1))
    copied(tmp_path, 0)
    tear(commit(uri, 1))
    later = kept(tmp_path)
    later.find(XMIN)
    new = write_file(tmp_path)
    later.add(part(0), new)
    later.record()
    later.forget(new)
    commit_snapshot(uri, SCHEMA, new, LSN(7), "shop", Epoch(1))
    assert not records(tmp_path)


def test_table_may_have_the_name_of_a_record(tmp_path):
    relation = replace(RELATION, table=TableName("public", "t.json"))
    ranges = kept(tmp_path, relation=relation)
    ranges.find(XMIN)
    ranges.add(part(0), [WrittenFile("part-0.parquet", 1, 3, "{}")])
    ranges.record()
    kept_ranges.expire(str(tmp_path), datetime(2000, 1, 1, tzinfo=UTC))
    kept_ranges.forget_all(str(tmp_path))
    assert not [path for path in records(tmp_path) if path.is_file()]


def test_no_file_outside_of_the_folder_is_deleted(tmp_path):
    (file,) = copied(tmp_path, 0)
    outside = tmp_path / "part-0.parquet"
    outside.touch()
    record = records(tmp_path)[0]
    record.write_text(record.read_text().replace(file.path, "../../part-0.parquet"))
    kept_ranges.forget_all(str(tmp_path))
    assert outside.exists()


def test_files_that_another_program_has_deleted_are_not_committed(tmp_path):
    (file,) = copied(tmp_path, 0)
    ranges = kept(tmp_path)
    ranges.find(XMIN)
    (tmp_path / TABLE.path / file.path).unlink()
    with pytest.raises(TableSnapshotError, match="was deleted before it was committed"):
        ranges.forget([file])
    assert records(tmp_path)


def test_record_whose_write_seems_to_fail_is_deleted_as_well(tmp_path, monkeypatch):
    ranges = kept(tmp_path)
    ranges.find(XMIN)
    files = write_file(tmp_path)
    ranges.add(part(0), files)
    with monkeypatch.context() as patched:
        patched.setattr(durable, "flush_files", raise_os_error)
        with pytest.raises(LakeUnavailableError):
            ranges.record()
    ranges.record()
    assert len(records(tmp_path)) == 2
    ranges.forget(files)
    assert not records(tmp_path)


def raise_os_error(*_: object) -> None:
    raise OSError(errno.EIO, "no flush")


def test_copy_that_ends_early_leaves_recorded_files_only(tmp_path):
    ranges = kept(tmp_path)
    ranges.find(XMIN)
    recorded, of_no_heap = write_file(tmp_path), write_file(tmp_path)
    ranges.add(part(0), recorded)
    ranges.add(replace(part(0), filenode=0), of_no_heap)
    ranges.leave([*recorded, *of_no_heap])
    assert paths(tmp_path) == {recorded[0].path}
    assert len(kept(tmp_path).find(XMIN)) == 1


def test_ranges_that_could_not_be_recorded_are_recorded_later(tmp_path):
    ranges = kept(tmp_path)
    ranges.find(XMIN)
    ranges.add(part(0), write_file(tmp_path))
    place = tmp_path / "_pgrepl"
    place.write_text("no folder")
    with pytest.raises(Exception, match="_pgrepl"):
        ranges.record()
    place.unlink()
    ranges.record()
    assert len(kept(tmp_path).find(XMIN)) == 1


def test_maintenance_deletes_old_records_with_their_files(tmp_path):
    old, new = copied(tmp_path, 0), copied(tmp_path, 10)
    first = next(path for path in records(tmp_path) if old[0].path in path.read_text())
    before = (datetime.now(UTC) - timedelta(days=8)).timestamp()
    os.utime(first, (before, before))
    kept_ranges.expire(str(tmp_path), datetime.now(UTC) - timedelta(days=7))
    assert len(records(tmp_path)) == 1
    assert paths(tmp_path) == {new[0].path}


def test_new_history_forgets_the_ranges_of_all_tables(tmp_path):
    copied(tmp_path, 0)
    kept_ranges.forget_all(str(tmp_path))
    assert kept(tmp_path).find(XMIN) == []
    assert not paths(tmp_path)
    kept_ranges.forget_all(str(tmp_path / "no lake"))


@pytest.mark.parametrize(
    ("type_", "is_possible"),
    [
        (None, True),
        (PgType(1009, name="text[]", kind="a", parts=(("element", TEXT),)), True),
        (PgType(20_001, name="mood", kind="e", labels=((1, "sad"),)), True),
        (PgType(20_001, name="d", kind="d", parts=(("base", TEXT),)), True),
        (PgType(2205, name="regclass"), False),
        (PgType(790, name="money"), False),
        (PgType(2210, name="regclass[]", kind="a", parts=(("element", PgType(2205)),)), False),
        (PgType(20_001, name="c", kind="c", parts=(("a", TEXT),)), False),
        (PgType(20_002, name="c[]", kind="a", parts=(("element", PgType(20_001, kind="c")),)), False),
        (PgType(20_001, name="d", kind="d", parts=(("base", OF_EXTENSION),)), False),
        (OF_EXTENSION, False),
        (PgType(20_001, kind="x"), False),
    ],
)
def test_ranges_are_kept_if_texts_change_only_with_rows(tmp_path, type_, is_possible):
    column = (
        Column("c", 2, 25, -1, "text") if type_ is None else Column("c", 2, type_.oid, -1, "", type=type_)
    )
    relation = replace(RELATION, columns=(*RELATION.columns, column))
    assert kept(tmp_path, relation=relation).is_possible is is_possible


def test_tables_with_a_history_are_copied_as_a_whole(tmp_path):
    options = TableOptions(TablePolicy(history=True))
    ranges = kept(tmp_path, options=options)
    ranges.find(XMIN)
    ranges.add(part(0), write_file(tmp_path))
    ranges.record()
    assert not records(tmp_path)
