"""Partitioned lake tables: their readers, the files that merges read and write, and rows that move."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from duckdb_extensions import import_extension
from pyarrow import fs

from airflow_provider_pgrepl.errors import LakeChangedError, LakeTableError
from airflow_provider_pgrepl.replication.lake.delta import commit
from airflow_provider_pgrepl.replication.lake.delta.live_files import live_files
from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import commit_snapshot
from airflow_provider_pgrepl.replication.lake.delta.table import app_id, open_table
from airflow_provider_pgrepl.replication.lake.delta.vacuum import TableFiles
from airflow_provider_pgrepl.replication.lake.files.compaction import compact, withdraw_vectors
from airflow_provider_pgrepl.replication.lake.files.row_search import FileRows
from airflow_provider_pgrepl.replication.lake.merge import slice_commit
from airflow_provider_pgrepl.replication.lake.merge.merge import apply_changes
from airflow_provider_pgrepl.replication.lake.schema_evolution.evolution import Evolution
from airflow_provider_pgrepl.replication.lake.snapshot.range_copy import write_files
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.tables import PARTITION
from airflow_provider_pgrepl.replication.values import lake_schema
from tests.support.changes import column, relation, table_of
from tests.support.model import Change
from tests.support.partitioned import check_partitions, files_by_partition

pytestmark = pytest.mark.slow

APP = app_id("p", Epoch(1))
OF = relation(column("id", "bigint", key=True), column("p"), column("v"))
KEYED = relation(column("id", "bigint", key=True), column("p", key=True), column("v"))
ODD = [
    "a/b=c%2F",
    "x y",
    "two\nlines",
    "ü中文",
    None,
    "",
    "..",
    "C:\\x",
    "?q#h&",
    "a:b*",
    "'\"",
    "%",
    "中" * 30,
    "x" * 70,
    "__HIVE_DEFAULT_PARTITION__",
    "\x01\x7f",
    "+[b]{c}~",
    " ",
    "2026-01",
    "\U0001f600" * 20,
]
Row = tuple[int, str | None, str]


class Lake:
    """One table, partitioned by p."""

    def __init__(self, root: Path, merge: str, of: Relation = OF, **policy: Any) -> None:
        self.root, self.of, self.uri, self.lsn = root, of, str(root / of.table.path), 1
        policies = {"partition_by": "p", "merge": merge, **policy}
        self.pipeline = Pipeline(
            name="p", lake=str(root), tables=("public.t",), per_table={"public.t": policies}
        )
        self.options = self.pipeline.options(of.table)
        commit_snapshot(self.uri, lake_schema(of, self.options), [], LSN(1), "p", Epoch(1))

    def apply(self, *changes: Change) -> None:
        apply_changes(open_table(self.uri), table_of(changes), self.of, self.options, APP, 1 << 24)

    def insert(self, *rows: Row) -> None:
        self._each("I", rows)

    def update(self, *rows: Row, old: list[tuple[str | None, ...]] | None = None) -> None:
        self._each("U", rows, old)

    def _each(self, op: str, rows: tuple[Row, ...], old: list[tuple[str | None, ...]] | None = None) -> None:
        self.lsn += 10
        olds = old or [None] * len(rows)
        self.apply(
            *(
                Change(op, new=(str(row[0]), *row[1:]), old=before, commit_lsn=self.lsn)
                for row, before in zip(rows, olds, strict=True)
            )
        )

    def rows(self) -> dict[int, tuple[str | None, str]]:
        return by_datafusion(self.uri)

    def check(self) -> dict[str | None, int]:
        return check_partitions(self.uri, self.of, self.options)


@pytest.fixture(params=["rewrite", "merge_on_read"])
def merge(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def lake(tmp_path: Path, merge: str) -> Lake:
    return Lake(tmp_path, merge)


Found = dict[int, tuple[str | None, str]]


def by_datafusion(uri: str) -> Found:
    found = QueryBuilder().register("t", DeltaTable(uri)).execute(f"select id, p, v, {PARTITION} from t")
    return _found([tuple(row.values()) for row in pa.table(found.read_all()).to_pylist()])


def by_duckdb(uri: str) -> Found:
    connection = duckdb.connect()
    import_extension("delta", con=connection)
    connection.execute("load delta")
    return _found(connection.sql(f"select id, p, v, {PARTITION} from delta_scan('{uri}')").fetchall())


def by_polars(uri: str) -> Found:
    return _found(pl.scan_delta(uri).select("id", "p", "v", PARTITION).collect().rows())


def by_arrow(uri: str) -> Found:
    files = fs.SubTreeFileSystem(uri, fs.LocalFileSystem())
    found = DeltaTable(uri).to_pyarrow_table(filesystem=files).select(["id", "p", "v", PARTITION])
    return _found([tuple(row.values()) for row in found.to_pylist()])


def _found(rows: list[tuple[Any, ...]]) -> Found:
    for _, p, _, partition in rows:
        shown = (p or "").encode()[:64].decode(errors="ignore")
        assert partition == (shown if shown not in ("", "__HIVE_DEFAULT_PARTITION__") else None)
    assert len({row[0] for row in rows}) == len(rows)
    return {row[0]: row[1:3] for row in rows}


@pytest.mark.thorough("the same test, with merge on read", "rewrite")
def test_all_readers_find_the_rows_of_odd_partitions(lake: Lake, merge: str) -> None:
    lake.insert(
        *((n, p, "old") for n, p in enumerate(ODD)), *((n + 100, p, "old") for n, p in enumerate(ODD))
    )
    lake.update(*((n, p, "new") for n, p in enumerate(ODD)))
    lake.update(*((n + 100, ODD[n - 1], "moved") for n in range(len(ODD))))
    expected = {n: (p, "new") for n, p in enumerate(ODD)}
    expected |= {n + 100: (ODD[n - 1], "moved") for n in range(len(ODD))}
    # Rows without a partition value share one partition.
    assert len(lake.check()) == len(ODD) - 2
    readers = [by_datafusion, by_duckdb, by_polars]
    for read in [*readers, by_arrow] if merge == "rewrite" else readers:
        assert read(lake.uri) == expected, read
    compact(open_table(lake.uri), APP, at_least=2, gone_share=0.0)
    for read in readers:
        assert read(lake.uri) == expected, read


def test_a_row_moves_with_its_value(lake: Lake) -> None:
    lake.insert((1, "a", "x"), (2, "a", "x"), (3, "b", "x"))
    lake.update((1, "b", "x"), (3, None, "y"))
    assert lake.check() == {"a": 1, "b": 1, None: 1}
    assert lake.rows() == {1: ("b", "x"), 2: ("a", "x"), 3: (None, "y")}


def test_update_with_unchanged_partition_column_keeps_row_in_partition(lake: Lake) -> None:
    """UNCHANGED is no NULL: the row stays in the partition of the lake's value."""
    lake.insert((1, "a", "x"), (2, "b", "x"))
    lake.apply(Change("U", new=("1", None, "y"), unchanged=(1,), commit_lsn=100))
    lake.apply(Change("U", new=("7", None, "z"), old=("2", None, None), unchanged=(1,), commit_lsn=110))
    assert lake.check() == {"a": 1, "b": 1}
    assert lake.rows() == {1: ("a", "y"), 7: ("b", "z")}


def test_under_soft_deletes_what_was_not_sent_goes_along_to_another_key(tmp_path: Path, merge: str) -> None:
    lake = Lake(tmp_path, merge, deletes="soft")
    lake.insert((1, "a", "x"), (2, "b", "x"))
    lake.apply(Change("U", new=("7", None, "z"), old=("2", None, None), unchanged=(1,), commit_lsn=100))
    assert lake.check() == {"a": 1, "b": 2}
    lake.apply(Change("T", new=("0",), commit_lsn=110), Change("I", new=("8", "c", "n"), commit_lsn=120))
    assert lake.check() == {"a": 1, "b": 2, "c": 1}
    query = "select id, _pgrepl_deleted, _pgrepl_commit_lsn from t order by id"
    found = pa.table(QueryBuilder().register("t", DeltaTable(lake.uri)).execute(query).read_all())
    assert [tuple(row.values()) for row in found.to_pylist()] == [
        *((1, True, 110), (2, True, 100), (7, True, 110), (8, False, 120))
    ]


def test_a_truncated_table_keeps_its_partitioning(lake: Lake) -> None:
    lake.insert((1, "a", "x"), (2, "b", "x"))
    lake.apply(Change("T", new=("0",), commit_lsn=100), Change("I", new=("1", "c", "n"), commit_lsn=100))
    assert lake.check() == {"c": 1}
    assert lake.rows() == {1: ("c", "n")}


def keyed_rows() -> list[Row]:
    return [(n, f"p{n % 10}", "old") for n in range(200)]


def test_only_files_of_the_keys_partitions_are_looked_at_and_written_again(
    tmp_path: Path, merge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The partition column belongs to the key, and the ranges of ids of all partitions overlap."""
    lake = Lake(tmp_path, merge, KEYED)
    lake.insert(*keyed_rows())
    before, looked_at = dict(live_files(open_table(lake.uri))), set[str | None]()
    parts = FileRows._parts

    def noted(self: FileRows, search: Any, file: int) -> Any:
        looked_at.add(self.files[file].partition)
        return parts(self, search, file)

    monkeypatch.setattr(FileRows, "_parts", noted)
    lake.update((3, "p3", "new"), (193, "p3", "new"))
    assert looked_at == {"p3"}
    gone = [file for path, file in before.items() if live_files(open_table(lake.uri)).get(path) != file]
    assert [file.partition for file in gone] == ["p3"]
    assert lake.check() == {f"p{n}": 20 for n in range(10)}
    lake.update((3, "p4", "moved"), old=[("3", "p3", None)])
    assert lake.check() == {f"p{n}": 20 for n in range(10)} | {"p3": 19, "p4": 21}


def test_rows_without_key_are_looked_for_in_their_partitions(
    tmp_path: Path, merge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = relation(column("id", "bigint"), column("p"), column("v"), identity="f")
    lake = Lake(tmp_path, merge, of)
    lake.insert(*keyed_rows())
    looked_at: set[str | None] = set()
    parts = FileRows._parts
    monkeypatch.setattr(
        FileRows,
        "_parts",
        lambda self, search, file: looked_at.add(self.files[file].partition) or parts(self, search, file),
    )
    lake.update((3, "p9", "new"), old=[("3", "p3", "old")])
    assert looked_at == {"p3"}
    assert lake.check() == {f"p{n}": 20 for n in range(10)} | {"p3": 19, "p9": 21}


@pytest.mark.parametrize("of", [OF, KEYED])
@pytest.mark.parametrize("policy", [{}, {"deletes": "soft"}])
@pytest.mark.thorough("the same test, of each policy with the other partitions", "policy0-of0", "policy1-of1")
def test_partitioned_table_merged_by_deltalake_has_correct_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: Relation, policy: dict[str, str]
) -> None:
    """This package's writer does not support the protocol. Files are in folders, and lack the column."""
    monkeypatch.setattr(slice_commit, "can_commit", lambda table: False)
    lake = Lake(tmp_path, "rewrite", of, **policy)
    rows = [(n, p, "old") for n, p in enumerate(ODD) if of is OF or p is not None]
    lake.insert(*rows)
    lake.update(*((n, p, "new") for n, p, _ in rows[::2]))
    expected = {n: (p, "new" if place % 2 == 0 else "old") for place, (n, p, _) in enumerate(rows)}
    assert by_datafusion(lake.uri) == by_duckdb(lake.uri) == by_arrow(lake.uri) == expected
    if policy:
        lake.apply(Change("T", new=("0",), commit_lsn=100))
        lake.lsn = 100
        assert by_datafusion(lake.uri) == expected
        lake.insert(*((n, p, "new") for n, p, _ in rows))
    monkeypatch.undo()
    lake.update(*((n, p, "newer") for n, p, _ in rows))
    assert by_polars(lake.uri) == by_duckdb(lake.uri) == {n: (p, "newer") for n, p, _ in rows}
    lake.check()


def test_deltalakes_merge_leaves_out_the_files_of_other_partitions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slice_commit, "can_commit", lambda table: False)
    lake = Lake(tmp_path, "rewrite", KEYED)
    lake.insert(*keyed_rows())
    lake.update((3, "p3", "new"), (193, "p3", "new"))
    metrics = open_table(lake.uri).history(1)[0]["operationMetrics"]
    assert (metrics["num_target_files_scanned"], metrics["num_target_files_skipped_during_scan"]) == (1, 9)


def test_files_are_joined_within_their_partition_and_counted_there(lake: Lake) -> None:
    for n in range(12):
        lake.insert((n, "a", "x"), *(((100 + n, "b", "x"),) if n < 5 else ()))
    assert files_by_partition(lake.uri) == {"a": 12, "b": 5}
    assert compact(open_table(lake.uri), APP, ("id",)) == 12
    assert files_by_partition(lake.uri) == {"a": 1, "b": 5}
    assert compact(open_table(lake.uri), APP, ("id",), at_least=2) == 5
    assert files_by_partition(lake.uri) == {"a": 1, "b": 1}
    assert lake.check() == {"a": 12, "b": 5}


def test_vectors_can_be_withdrawn(tmp_path: Path) -> None:
    lake = Lake(tmp_path, "merge_on_read")
    lake.insert(*((n, f"p{n % 3}", "old") for n in range(30)))
    lake.update((1, "p1", "new"), (2, "p0", "new"))
    assert withdraw_vectors(open_table(lake.uri), APP)
    assert lake.check() == {"p0": 11, "p1": 10, "p2": 9}
    assert by_arrow(lake.uri) == by_duckdb(lake.uri) == by_polars(lake.uri) == lake.rows()


def snapshot(lake: Lake, rows: list[Row], options: Any, lsn: int) -> None:
    schema = pa.schema([("id", pa.int64()), ("p", pa.string()), ("v", pa.string())])
    batch = pa.RecordBatch.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema)
    of = lake.of
    files = write_files(
        iter([batch]), of, options, str(lake.root), LSN(lsn), datetime(2026, 1, 1, tzinfo=UTC)
    )
    commit_snapshot(lake.uri, lake_schema(of, options), files, LSN(lsn), "p", Epoch(1))


@pytest.mark.parametrize("merge", ["rewrite", "merge_on_read"])
@pytest.mark.thorough("the same test, with merge on read", "rewrite")
def test_a_resnapshot_partitions_a_table_otherwise_and_back(tmp_path: Path, merge: str) -> None:
    lake = Lake(tmp_path, merge)
    plain = Pipeline(name="p", lake=str(tmp_path), tables=("public.t",), merge=merge).options(OF.table)
    rows = [(n, p, "old") for n, p in enumerate(ODD)]
    expected = {n: (p, "old") for n, p, _ in rows}
    snapshot(lake, rows, plain, 10)
    assert open_table(lake.uri).metadata().partition_columns == []
    with pytest.raises(LakeChangedError, match=PARTITION):
        lake.apply(Change("I", new=("99", "a", "b"), commit_lsn=15))
    snapshot(lake, rows, lake.options, 20)
    assert len(lake.check()) == len(ODD) - 2
    assert by_polars(lake.uri) == by_duckdb(lake.uri) == by_arrow(lake.uri) == lake.rows() == expected
    lake.lsn = 30
    lake.update((0, "z", "new"))
    assert lake.rows() == expected | {0: ("z", "new")}
    snapshot(lake, rows, lake.options, 100)
    assert len(lake.check()) == len(ODD) - 2
    snapshot(lake, rows, plain, 110)
    table = open_table(lake.uri)
    assert (table.metadata().partition_columns, PARTITION in table.schema().to_json()) == ([], False)
    assert FileRows(table).schema.names[:3] == ["id", "p", "v"]
    assert len(live_files(table)) == 1
    apply_changes(
        table, table_of([Change("U", new=("1", "a", "n"), commit_lsn=120)]), OF, plain, APP, 1 << 20
    )
    found = QueryBuilder().register("t", open_table(lake.uri)).execute("select v from t where id = 1")
    assert pa.table(found.read_all())["v"].to_pylist() == ["n"]


def test_snapshot_rejects_partitioning_change_on_unsupported_table_protocol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake(tmp_path, "rewrite")
    plain = Pipeline(name="p", lake=str(tmp_path), tables=("public.t",)).options(OF.table)
    snapshot(lake, [(1, "a", "x")], plain, 10)
    monkeypatch.setattr(commit, "can_commit", lambda table: False)
    with pytest.raises(LakeTableError, match="its partitioning cannot be changed"):
        snapshot(lake, [(1, "a", "x")], lake.options, 20)
    assert open_table(lake.uri).metadata().partition_columns == []


def test_a_column_that_comes_with_a_default_leaves_partitions_as_they_are(lake: Lake) -> None:
    lake.insert((1, "a", "x"), (2, None, "y"))
    of, more = lake.of, column("n", "integer")
    of = Relation(**{**vars(of), "columns": tuple(_numbered(of.columns))})
    wider = Relation(**{**vars(of), "columns": tuple(_numbered((*lake.of.columns, _missing(more))))})
    Evolution(of, wider, lake.options, str(lake.root), APP).evolve(open_table(lake.uri), None)
    # As any column, the new one comes after this package's own columns.
    assert open_table(lake.uri).schema().fields[-1].name == "n"
    lake.of = wider
    assert lake.check() == {"a": 1, None: 1}
    lake.apply(Change("U", new=("2", "b", "y", "5"), commit_lsn=100))
    assert lake.check() == {"a": 1, "b": 1}
    found = QueryBuilder().register("t", open_table(lake.uri)).execute("select id, n from t order by id")
    assert pa.table(found.read_all())["n"].to_pylist() == [7, 5]


def _numbered(columns: Any) -> Any:
    return (type(c)(**{**vars(c), "attnum": n}) for n, c in enumerate(columns, start=1))


def _missing(of: Any) -> Any:
    return type(of)(**{**vars(of), "missing": "7"})


def test_maintenance_takes_what_nobody_needs_also_of_folders_that_deltalake_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake(tmp_path, "rewrite")
    monkeypatch.setattr(slice_commit, "can_commit", lambda table: False)
    rows = [(n, p, "old") for n, p in enumerate(ODD)]
    lake.insert(*rows)
    lake.update(*((n, p, "new") for n, p, _ in rows))
    monkeypatch.undo()
    lake.update(*((n, p, "newer") for n, p, _ in rows))
    later = datetime.now(UTC) + timedelta(days=30)
    gone = TableFiles(lake.uri).vacuum((), later, grace=timedelta(0), orphan_age=timedelta(0))
    assert gone == 2 * len(files_by_partition(lake.uri))
    assert [path.name for path in Path(lake.uri).iterdir() if path.is_dir()] == ["_delta_log"]
    assert lake.rows() == {n: (p, "newer") for n, p, _ in rows}


def test_a_table_with_partitions_of_another_rule_is_not_written(tmp_path: Path) -> None:
    lake = Lake(tmp_path, "auto")
    lake.apply(Change("I", new=("1", "a", "b"), commit_lsn=10))
    lake.options = Lake(tmp_path / "other", "auto", partition_by="v").options
    with pytest.raises(LakeChangedError, match="other partitions than partition_by gives it"):
        lake.apply(Change("I", new=("2", "a", "b"), commit_lsn=20))
    assert lake.rows() == {1: ("a", "b")}
