"""Tables with deletion vectors: who reads them, what becomes of their files, who may write them meanwhile."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from deltalake.exceptions import DeltaProtocolError
from duckdb_extensions import import_extension
from pyarrow import fs

from airflow_provider_pgrepl.errors import FencedError, LakeTableError
from airflow_provider_pgrepl.replication.delta.log import put_commit
from airflow_provider_pgrepl.replication.lake.delta.commit import commit_actions, narrow_bounds
from airflow_provider_pgrepl.replication.lake.delta.live_files import check_files, live_files
from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import commit_snapshot
from airflow_provider_pgrepl.replication.lake.delta.statistics import declared_columns
from airflow_provider_pgrepl.replication.lake.delta.table import app_id, open_table, read_position
from airflow_provider_pgrepl.replication.lake.delta.vacuum import TableFiles
from airflow_provider_pgrepl.replication.lake.files import merge_on_read
from airflow_provider_pgrepl.replication.lake.files.compaction import clustered, compact, withdraw_vectors
from airflow_provider_pgrepl.replication.lake.files.row_search import FileRows
from airflow_provider_pgrepl.replication.lake.merge.merge import apply_changes
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.values import lake_schema
from tests.support.changes import column, relation, table_of
from tests.support.model import Change

APP = app_id("p", Epoch(1))
OF = relation(column("id", "bigint", key=True), column("v"))
SLICE = 1 << 20


class Lake:
    """One table, of which every update is merged on read."""

    def __init__(self, folder: Path, rows: int = 100) -> None:
        self.uri = str(folder / "t")
        pipeline = Pipeline(name="p", lake=str(folder), tables=("public.t",), merge="merge_on_read")
        self.options = pipeline.options(OF.table)
        self.lsn = 1
        self.expected = dict.fromkeys(range(rows), "old")
        commit_snapshot(self.uri, lake_schema(OF, self.options), [], LSN(1), "p", Epoch(1))
        self.apply(*(Change("I", new=(str(number), "old"), commit_lsn=10) for number in range(rows)))

    def apply(self, *changes: Change, through: DeltaTable | None = None) -> DeltaTable:
        table = through or open_table(self.uri)
        apply_changes(table, table_of(changes), OF, self.options, APP, SLICE)
        self.lsn = max(self.lsn, *(change.commit_lsn for change in changes))
        return table

    def update(self, *keys: int, value: str = "new", through: DeltaTable | None = None) -> None:
        lsn = self.lsn + 10
        self.apply(*(Change("U", new=(str(key), value), commit_lsn=lsn) for key in keys), through=through)
        self.expected |= dict.fromkeys(keys, value)

    def delete(self, *keys: int) -> None:
        lsn = self.lsn + 10
        self.apply(*(Change("D", old=(str(key), None), commit_lsn=lsn) for key in keys))
        for key in keys:
            del self.expected[key]

    def marked(self) -> int:
        files = live_files(open_table(self.uri)).values()
        return sum(file.vector.rows for file in files if file.vector is not None)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


def by_datafusion(uri: str, version: int | None = None) -> dict[int, str]:
    table = QueryBuilder().register("t", DeltaTable(uri, version=version))
    found = pa.table(table.execute("select id, v from t").read_all())
    assert len(found) == len(set(found["id"].to_pylist()))
    return dict(zip(found["id"].to_pylist(), found["v"].to_pylist(), strict=True))


def by_duckdb(uri: str) -> dict[int, str]:
    """Read a table through DuckDB's Delta extension, which uses Delta's kernel."""
    connection = duckdb.connect()
    import_extension("delta", con=connection)
    connection.execute("load delta")
    rows = connection.sql(f"select id, v from delta_scan('{uri}')").fetchall()
    assert len(rows) == len(dict(rows))
    return dict(rows)


def by_polars(uri: str) -> dict[int, str]:
    rows = pl.scan_delta(uri).select("id", "v").collect().rows()
    assert len(rows) == len(dict(rows))
    return dict(rows)


def by_arrow(uri: str) -> dict[int, str]:
    files = fs.SubTreeFileSystem(uri, fs.LocalFileSystem())
    found = DeltaTable(uri).to_pyarrow_table(filesystem=files)
    return dict(zip(found["id"].to_pylist(), found["v"].to_pylist(), strict=True))


def test_an_update_marks_the_old_row_and_adds_the_new_one(lake: Lake) -> None:
    before = dict(live_files(open_table(lake.uri)))
    lake.update(3, 50)
    after = live_files(open_table(lake.uri))
    (old,) = before
    assert after[old].vector is not None
    assert after[old].vector.rows == 2
    assert (after[old].statistics["numRecords"], after[old].statistics["tightBounds"]) == (100, False)
    (new,) = after.keys() - before.keys()
    assert after[new].statistics["numRecords"] == 2
    assert by_datafusion(lake.uri) == lake.expected


def test_a_file_of_which_all_rows_are_gone_goes(lake: Lake) -> None:
    (old,) = live_files(open_table(lake.uri))
    lake.update(*range(60))
    lake.delete(*range(60, 100))
    assert old not in live_files(open_table(lake.uri))
    assert lake.marked() == 0
    assert by_datafusion(lake.uri) == lake.expected


@pytest.mark.parametrize("read", [by_datafusion, by_duckdb, by_polars])
def test_readers_find_the_rows_that_are_left(lake: Lake, read) -> None:
    for number in range(0, 40, 3):
        lake.update(number, 99 - number, value=f"v{number}")
    lake.delete(0, 99, 50)
    assert lake.marked() > 0
    assert read(lake.uri) == lake.expected


def test_deltalakes_arrow_dataset_refuses_and_reads_again_once_vectors_are_withdrawn(lake: Lake) -> None:
    lake.update(1, 2)
    with pytest.raises(DeltaProtocolError, match="deletionVectors"):
        by_arrow(lake.uri)
    assert withdraw_vectors(open_table(lake.uri), APP)
    assert by_arrow(lake.uri) == by_polars(lake.uri) == by_duckdb(lake.uri) == lake.expected


def test_withdrawing_leaves_the_old_versions_as_they_were(lake: Lake) -> None:
    lake.update(1, 2)
    before, version = dict(lake.expected), open_table(lake.uri).version()
    assert withdraw_vectors(open_table(lake.uri), APP)
    table = open_table(lake.uri)
    assert (table.protocol().min_reader_version, table.protocol().reader_features) == (1, None)
    assert (read_position(table, APP), lake.marked()) == (lake.lsn, 0)
    assert not withdraw_vectors(table, APP)
    lake.update(5, value="later")
    assert [by_datafusion(lake.uri, version), by_datafusion(lake.uri), by_duckdb(lake.uri)] == [
        before, lake.expected, lake.expected,
    ]  # fmt: skip


def test_the_protocol_names_vectors_and_nothing_else(lake: Lake) -> None:
    assert open_table(lake.uri).protocol().min_reader_version == 1
    lake.update(1)
    protocol = open_table(lake.uri).protocol()
    assert (protocol.min_reader_version, protocol.min_writer_version) == (3, 7)
    assert (protocol.reader_features, protocol.writer_features) == (["deletionVectors"], ["deletionVectors"])


def test_a_commit_by_somebody_else_is_seen_and_the_places_are_looked_up_again(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An OPTIMIZE right before this package's commit moves the rows that the commit marks to another file."""
    lake.update(1)
    real, optimized = commit_actions, iter([True])

    def commit_late(*arguments) -> None:
        if next(optimized, False):
            DeltaTable(lake.uri).optimize.compact()
        real(*arguments)

    monkeypatch.setattr(merge_on_read, "commit_actions", commit_late)
    lake.update(1, 2, 3, value="newest")
    assert by_datafusion(lake.uri) == lake.expected
    assert by_duckdb(lake.uri) == lake.expected
    assert DeltaTable(lake.uri).history()[1]["operation"] == "OPTIMIZE"


def test_a_writer_that_was_overtaken_is_fenced(lake: Lake) -> None:
    stale = open_table(lake.uri)
    lake.update(1)
    with pytest.raises(FencedError):
        lake.update(2, through=stale, value="stale")
    lake.expected[2] = "old"
    assert by_datafusion(lake.uri) == lake.expected


def test_exactly_one_concurrent_commit_to_a_version_succeeds(lake: Lake) -> None:
    version = int(open_table(lake.uri).version()) + 1
    won: list[int] = []
    ready = threading.Barrier(8)

    def write(number: int) -> None:
        ready.wait()
        if put_commit(lake.uri, version, {"writer": number}, []):
            won.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    text = (Path(lake.uri) / f"_delta_log/{version:020}.json").read_text()
    assert [json.loads(text)["commitInfo"]["writer"]] == won


def test_vacuum_keeps_the_vectors_that_kept_versions_need(lake: Lake) -> None:
    kept: dict[int, dict[int, str]] = {}
    files = TableFiles(lake.uri)
    for number in range(12):
        lake.update(number, number + 20, value=f"v{number}")
        if number % 4 == 0:
            kept[int(open_table(lake.uri).version())] = dict(lake.expected)
        if number == 6:
            compact(open_table(lake.uri), APP, at_least=3, gone_share=0.01)
            files.measure()
    before = len(list(Path(lake.uri).glob("*.bin")))
    later = datetime.now(UTC) + timedelta(hours=1)
    assert files.vacuum(list(kept), later, grace=timedelta(0), orphan_age=timedelta(0)) > 0
    assert 0 < len(list(Path(lake.uri).glob("*.bin"))) < before
    for version, rows in kept.items():
        assert by_datafusion(lake.uri, version) == rows
    assert by_datafusion(lake.uri) == by_duckdb(lake.uri) == lake.expected
    fresh = TableFiles(lake.uri)
    assert fresh.vacuum([], later, grace=timedelta(0), orphan_age=timedelta(0)) > 0
    assert by_datafusion(lake.uri) == by_duckdb(lake.uri) == lake.expected
    check_files(open_table(lake.uri))


def test_a_vector_that_is_gone_is_a_damage(lake: Lake) -> None:
    lake.update(1)
    (vector,) = Path(lake.uri).glob("*.bin")
    vector.unlink()
    with pytest.raises(LakeTableError, match="1 of its 3 files are gone"):
        check_files(open_table(lake.uri))
    with pytest.raises(LakeTableError, match="gone"):
        lake.update(2)


def test_the_live_files_are_those_of_the_log_whatever_was_read_before(lake: Lake) -> None:
    table = open_table(lake.uri)
    for number in range(25):
        lake.update(number, value=f"v{number}")
        if number % 10 == 9:
            open_table(lake.uri).create_checkpoint()
    for version in (3, 25, 12, 26, 7):
        at = DeltaTable(lake.uri, version=version)
        rows = FileRows(at)
        found = {
            key: value
            for number in range(len(rows.files))
            for some in rows.all_of(number)
            for key, value in zip(some["id"].to_pylist(), some["v"].to_pylist(), strict=True)
        }
        assert found == by_datafusion(lake.uri, version)
    assert table.version() < 26


def test_a_table_that_demands_more_of_writers_is_merged_by_deltalake(lake: Lake) -> None:
    table = open_table(lake.uri)
    table.alter.set_table_properties({"delta.enableChangeDataFeed": "true"})
    lake.update(1, 2)
    assert lake.marked() == 0
    assert by_datafusion(lake.uri) == lake.expected


def test_properties_are_set_without_features_that_nothing_uses(lake: Lake) -> None:
    """deltalake would add variantType, for which other readers refuse the table."""
    lake.update(1)
    table = open_table(lake.uri)
    assert declared_columns(table) != []
    narrow_bounds(table, APP, [])
    assert declared_columns(open_table(lake.uri)) == []
    assert open_table(lake.uri).protocol().reader_features == ["deletionVectors"]
    lake.update(2)
    assert by_duckdb(lake.uri) == by_datafusion(lake.uri) == lake.expected


def test_appends_of_others_are_not_lost_from_the_list(lake: Lake) -> None:
    lake.update(1)
    write_deltalake(lake.uri, pa.table({"id": [12345]}), mode="append", schema_mode="merge")
    assert any("12345" in json.dumps(file.statistics) for file in live_files(open_table(lake.uri)).values())


def test_files_that_are_joined_are_ordered_by_the_key_or_by_chosen_columns(lake: Lake) -> None:
    for first in range(10):
        lake.update(*range(first, 100, 10), value=f"v{9 - first}")
    for cluster_by, ordered_by in ((("id",), "id"), (("gone", "v"), "v")):
        table = open_table(lake.uri)
        compact(table, APP, cluster_by, at_least=1, gone_share=0.0)
        (file,) = live_files(table).values()
        values = pq.read_table(Path(lake.uri) / file.path)[ordered_by].to_pylist()
        assert values == sorted(values)
        assert by_duckdb(lake.uri) == lake.expected


def test_clustering_by_nested_column_keeps_row_order() -> None:
    rows = pa.table({"k": [[3], [1], [2]], "v": [3, 1, 2]})
    batches = clustered([rows.slice(0, 2), rows.slice(2)], ("k",))
    assert pa.Table.from_batches(batches)["v"].to_pylist() == [3, 1, 2]
    assert list(clustered([], ("k",))) == []
