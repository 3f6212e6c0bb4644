"""Changes that are not all in memory at once: by parts, and whole where that cannot be, as a model has it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import QueryBuilder
from hypothesis import assume, given
from hypothesis import strategies as st

from airflow_provider_pgrepl.errors import LakeTableError, Scope
from airflow_provider_pgrepl.replication.changelog.layout import ROW_SCHEMA
from airflow_provider_pgrepl.replication.lake.delta.live_files import live_files
from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import commit_snapshot
from airflow_provider_pgrepl.replication.lake.delta.table import app_id, open_table
from airflow_provider_pgrepl.replication.lake.merge import large_transactions
from airflow_provider_pgrepl.replication.lake.merge.large_transactions import LargeChanges
from airflow_provider_pgrepl.replication.lake.merge.merge import apply_changes
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.storage import open_storage
from airflow_provider_pgrepl.replication.values import lake_schema
from tests.property.histories import strategies
from tests.property.test_policies import counted, distinguished, expected, histories, pipeline_of
from tests.support.changes import column, relation, table_of
from tests.support.examples import examples
from tests.support.model import Change

APP = app_id("p", Epoch(1))
POLICIES = [("hard", "apply"), ("hard", "ignore"), ("soft", "apply")]
NUMBERS = relation(column("id", "bigint", key=True), column("v"))


@pytest.fixture(autouse=True)
def _tiny_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_transactions, "_PART_BYTES", 150)


def write_changelog(
    folder: str, changes: Sequence[Change], ends: Sequence[int], of: Relation
) -> LargeChanges:
    """Write the changes to files that end at the positions `ends`, in row groups of 3 rows."""
    rows = table_of(changes).select(ROW_SCHEMA.names).cast(ROW_SCHEMA)
    relation_id = pa.array([of.oid] * len(rows), pa.int64())
    rows = rows.set_column(rows.schema.get_field_index("relation_id"), "relation_id", relation_id)
    (Path(folder) / "changelog").mkdir(exist_ok=True)
    paths = []
    for start, end in pairwise(sorted({0, *(end for end in ends if end < len(rows)), len(rows)})):
        paths.append(f"{start}-{end - start}.parquet")
        part = rows.slice(start, end - start)
        pq.write_table(part, f"{folder}/changelog/{paths[-1]}", row_group_size=3)
    filesystem, root = open_storage(f"{folder}/changelog")
    return LargeChanges(filesystem, root, paths, of.oid, LSN(0), LSN(2**62))


@pytest.mark.parametrize("policy", POLICIES)
@given(histories(), strategies, st.lists(st.integers(1, 40), max_size=3), st.sampled_from([0, 60, 300]))
@examples(60)
@pytest.mark.thorough("the same test, of the other policy", "policy0", "policy2")
def test_rows_equal_the_model_however_large_changes_are_parted(
    policy: tuple[str, str],
    history: tuple[list[Change], list[int], Relation],
    merges: list[str],
    ends: list[int],
    slice_bytes: int,
) -> None:
    changes, cuts, of = history
    assume(changes)
    pipeline = pipeline_of("/lake", *policy)
    schema = lake_schema(of, pipeline.options(of.table))
    with tempfile.TemporaryDirectory() as folder:
        uri = f"{folder}/t"
        commit_snapshot(uri, schema, [], LSN(1), "p", Epoch(1))
        for cut, merge in zip([*cuts, 10**9], cycle(merges), strict=False):
            large = write_changelog(folder, changes, ends, of)
            large = replace(large, before=LSN(cut + 1))
            options = replace(pipeline, merge=merge).options(of.table)
            told = sum(change.commit_lsn <= cut for change in changes)
            outline = large.outline()
            assert sum(outline[large_transactions.ROWS].to_pylist()) == told
            apply_changes(open_table(uri), outline, of, options, APP, slice_bytes + 1, large)
        names = ", ".join(f'"{name}"' for name in schema.names)
        found = QueryBuilder().register("t", open_table(uri)).execute(f"select {names} from t").read_all()
    model = expected(changes, of, *policy)
    told = distinguished(counted(pa.table(found)), changes, of, policy[0])
    assert told == distinguished(model, changes, of, policy[0])


@pytest.mark.parametrize("merge", ["rewrite", "merge_on_read"])
def test_one_transaction_is_one_commit_of_many_parts(tmp_path: Path, merge: str) -> None:
    pipeline = replace(pipeline_of(str(tmp_path), "hard", "apply"), merge=merge)
    options, uri = pipeline.options(NUMBERS.table), f"{tmp_path}/t"
    commit_snapshot(uri, lake_schema(NUMBERS, options), [], LSN(1), "p", Epoch(1))
    inserts = [Change("I", new=(str(number), "a"), commit_lsn=10) for number in range(200)]
    updates = [Change("U", new=(str(number), "b"), commit_lsn=20) for number in range(0, 200, 2)]
    deletes = [Change("D", old=(str(number), None), commit_lsn=20) for number in range(50)]
    large = write_changelog(str(tmp_path), [*inserts, *updates, *deletes], [70, 150, 260], NUMBERS)
    before = open_table(uri).version()
    outline = large.outline()
    assert len(outline) < 20
    parts = list(large.parts(LSN(20), -1, large_transactions.weight(outline), NUMBERS))
    assert len([part for part in parts if len(part)]) > 5
    applied = apply_changes(open_table(uri), outline, NUMBERS, options, APP, 100, large)
    assert (applied.changes, applied.commits) == (350, 2)
    # A commit that declares the bounds of columns may come before.
    assert applied.version - before <= 4
    rows = QueryBuilder().register("t", open_table(uri)).execute("select id, v from t").read_all()
    found = dict(zip(*(pa.table(rows)[name].to_pylist() for name in ("id", "v")), strict=True))
    assert found == {number: "b" if number % 2 == 0 else "a" for number in range(50, 200)}
    has_vectors = any(file.vector is not None for file in live_files(open_table(uri)).values())
    assert has_vectors == (merge == "merge_on_read")


def test_a_part_on_the_disk_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = tmp_path / "spool"
    spool.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(spool))
    changes = [Change("I", new=(str(number), "a"), commit_lsn=10) for number in range(100)]
    large = write_changelog(str(tmp_path), changes, [], NUMBERS)
    for part in large.parts(LSN(10), -1, 1000, NUMBERS):
        assert len(part)
        assert list(spool.iterdir()) == []


def test_keys_of_several_texts_that_are_one_in_the_lake_go_whole(tmp_path: Path) -> None:
    of = relation(column("k", "numeric", key=True), column("v"))
    pipeline = replace(
        pipeline_of(str(tmp_path), "hard", "apply"),
        types={"public.t.k": "decimal(20,4)"},
        merge="merge_on_read",
    )
    options, uri = pipeline.options(of.table), f"{tmp_path}/t"
    commit_snapshot(uri, lake_schema(of, options), [], LSN(1), "p", Epoch(1))
    one = [Change("I", new=("1.0", "a"), commit_lsn=10)]
    apply_changes(open_table(uri), table_of(one), of, options, APP, 1 << 20)
    many = [Change("I", new=(str(number), "b" * 20), commit_lsn=20) for number in range(100, 110)]
    other = [Change("D", old=("1.0", None), commit_lsn=20), Change("I", new=("1.00", "c"), commit_lsn=20)]
    large = write_changelog(str(tmp_path), [*other, *many], [], of)
    apply_changes(open_table(uri), large.outline(), of, options, APP, 10, large)
    rows = QueryBuilder().register("t", open_table(uri)).execute("select v from t where k = 1").read_all()
    assert pa.table(rows)["v"].to_pylist() == ["c"]


def test_a_full_local_disk_stops_the_table_and_not_the_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = [Change("I", new=(str(number), "a"), commit_lsn=10) for number in range(100)]
    large = write_changelog(str(tmp_path), changes, [], NUMBERS)
    full = Path("/dev/full")
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: full.open("r+b", buffering=0))
    with pytest.raises(LakeTableError, match="local disk: No space left") as raised:
        list(large.parts(LSN(10), -1, 1000, NUMBERS))
    assert raised.value.scope is Scope.TABLE
    assert "TMPDIR" in raised.value.hint
