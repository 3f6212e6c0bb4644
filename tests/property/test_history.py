"""The history of a table, whatever the transactions, however they are cut, and whenever a writer dies."""

from __future__ import annotations

import contextlib
import tempfile
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from hypothesis import assume, example, given
from hypothesis import strategies as st

from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import commit_snapshot
from airflow_provider_pgrepl.replication.lake.delta.table import app_id, open_table
from airflow_provider_pgrepl.replication.lake.history import apply as history_apply
from airflow_provider_pgrepl.replication.lake.history.table import history_uri, prepare_history
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.values import lake_schema
from tests.property.histories import COLUMNS, KEY, rows, steps, take_step
from tests.support.changes import History, commit_ts, relation, table_of
from tests.support.examples import examples
from tests.support.model import Change, Row
from tests.support.version_model import VersionModel

APP = app_id("p", Epoch(1))
ROW = ("1", None, "1", None)
EXPORTED = datetime(2024, 5, 1, tzinfo=UTC)


@st.composite
def transactions(draw: st.DrawFn) -> tuple[list[Row], list[Change], list[int], Relation]:
    """Rows of a snapshot, the changes of some transactions after it, and the commits at which to cut."""
    full = draw(st.booleans())
    history = History(len(COLUMNS), KEY, full=full)
    for row in draw(st.lists(rows, min_size=3, max_size=6)):
        take_step(history, ("insert", row))
    snapshot = list(history.model.rows.values())
    history.changes.clear()
    for transaction in draw(st.lists(st.lists(steps, min_size=1, max_size=4), min_size=3, max_size=12)):
        history.commit()
        for step in transaction:
            take_step(history, step)
    lsns = sorted({change.commit_lsn for change in history.changes})
    cuts = draw(st.lists(st.sampled_from(lsns), max_size=3)) if lsns else []
    return snapshot, history.changes, sorted(cuts), relation(*COLUMNS, identity="f" if full else "d")


class DyingError(Exception):
    """The death of the writer."""


class Lake:
    """A table that keeps its history, and a writer that may die between the two commits of a slice."""

    def __init__(self, folder: str, of: Relation, rows: list[Row], **policy: str) -> None:
        self.folder, self.of, self.policy = folder, of, policy
        pipeline = self.pipeline(1 << 20)
        self.uri, self.history = f"{folder}/{of.table.path}", history_uri(folder, of.table)
        prepare_history(of, pipeline, LSN(1), Epoch(1), EXPORTED)
        commit_snapshot(
            self.uri, lake_schema(of, pipeline.options(of.table)), [], LSN(1), "p", Epoch(1), EXPORTED
        )
        self.apply([Change("I", new=row, commit_lsn=2) for row in rows], 1 << 20)

    def pipeline(self, slice_bytes: int) -> Pipeline:
        return Pipeline(
            name="p",
            lake=self.folder,
            tables=("public.t",),
            history=True,
            slice_bytes=slice_bytes,
            **self.policy,
        )

    def apply(self, changes: list[Change], slice_bytes: int, dies_after: int | None = None) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if dies_after is not None:
                patch.setattr(history_apply, "apply_changes", dying(dies_after))
            with contextlib.suppress(DyingError):
                history_apply.apply_with_history(
                    open_table(self.uri),
                    open_table(self.history),
                    table_of(changes),
                    self.of,
                    self.pipeline(slice_bytes).options(self.of.table),
                    APP,
                    self.folder,
                    slice_bytes,
                )

    def ended(self) -> list[tuple]:
        times = "_pgrepl_from_lsn, _pgrepl_to_lsn, _pgrepl_to_op, _pgrepl_from_ts, _pgrepl_to_ts"
        found = []
        for row in rows_of(self.history, f"a, v, b, doc, {times}, _pgrepl_from_epoch, _pgrepl_to_epoch"):
            assert row[7:] == (commit_ts(row[4]), commit_ts(row[5]), 1, 1)
            found.append((row[:4], *row[4:7]))
        return sorted(found, key=repr)

    def open(self) -> list[tuple]:
        where = "where not _pgrepl_deleted" if self.policy["deletes"] == "soft" else ""
        found = rows_of(self.uri, "a, v, b, doc, _pgrepl_commit_lsn", where)
        return sorted(((row[:4], row[4]) for row in found), key=repr)


def dying(after: int):
    """Return an `apply_changes` that is killed when it is called more than `after` times."""
    real, calls = history_apply.apply_changes, iter(range(after))  # type: ignore[attr-defined]

    def apply_changes(*arguments):
        if next(calls, None) is None:
            raise DyingError
        return real(*arguments)

    return apply_changes


def rows_of(uri: str, columns: str, where: str = "") -> list[tuple]:
    sql = f"select {columns} from t {where}"
    found = QueryBuilder().register("t", DeltaTable(uri)).execute(sql).read_all()
    return [tuple(row.values()) for row in pa.table(found).to_pylist()]


@given(
    transactions(),
    st.lists(st.tuples(st.integers(1, 100), st.integers(0, 3)), max_size=3),
    st.sampled_from(["hard", "soft"]),
    st.sampled_from(["apply", "apply", "ignore"]),
    st.sampled_from(["rewrite", "merge_on_read"]),
)
@example(
    drawn=(
        [ROW],
        [
            Change("T", new=("0",), commit_lsn=110),
            Change("I", new=ROW, commit_lsn=120),
            Change("T", new=("0",), commit_lsn=120),
        ],
        [],
        relation(*COLUMNS),
    ),
    deaths=[],
    deletes="hard",
    truncate="ignore",
    merge="rewrite",
)
@examples(60)
def test_history_and_table_are_the_model_however_cut_and_whenever_a_writer_died(
    drawn, deaths, deletes: str, truncate: str, merge: str
) -> None:
    snapshot, changes, cuts, of = drawn
    full = of.replica_identity == "f"
    model = VersionModel(KEY, full=full, rows=snapshot, made_at=2, ignoring=truncate == "ignore")
    model.apply(changes)
    assume(model.is_sure)
    with tempfile.TemporaryDirectory() as folder:
        lake = Lake(folder, of, snapshot, deletes=deletes, truncate=truncate, merge=merge)
        for slice_bytes, dies_after in deaths:
            lake.apply(changes, slice_bytes, dies_after)
        for cut in [*cuts, 10**9]:
            lake.apply([change for change in changes if change.commit_lsn <= cut], 1 << 20)
        assert lake.ended() == sorted(model.ended, key=repr)
        assert lake.open() == sorted(model.open, key=repr)
