"""The watch that judges tables without lake tables, on a changelog that was really received."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from airflow_provider_pgrepl.replication.app import table_watch
from airflow_provider_pgrepl.replication.app.table_watch import TableWatch
from airflow_provider_pgrepl.replication.changelog.gaps import Gap, record_gap
from airflow_provider_pgrepl.replication.changelog.layout import ROW_SCHEMA, STATUS_ORDINAL
from airflow_provider_pgrepl.replication.changelog.reader import open_changelog, read_epoch
from airflow_provider_pgrepl.replication.changelog.writer import ChangelogWriter
from airflow_provider_pgrepl.replication.lake.apply.work_item import ApplierProgress
from airflow_provider_pgrepl.replication.pgoutput.columns import TransactionBegin
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.state.tables import TableState
from tests.support.kept import A, B, Kept, kept_tables
from tests.support.replicated import execute


@pytest.fixture
def kept(dsn: str, tmp_path: Path) -> Kept:
    return kept_tables(dsn, tmp_path)


@pytest.fixture
def watch(kept: Kept) -> Iterator[TableWatch]:
    with kept.access.state_db("watch") as state_db:
        yield TableWatch(kept.pipeline, state_db, read_epoch(kept.changelog), ApplierProgress())


def look(kept: Kept, watch: TableWatch) -> None:
    watch.look(int(open_changelog(kept.changelog).version()))


def skip(kept: Kept, oid: int, lsn: LSN) -> None:
    """Record a gap, as a `pgrepl skip` that died before it had marked tables."""
    begun = TransactionBegin(lsn, 700, 1_700_000_000_000_000)
    record_gap(kept.pipeline.lake_root, Gap(begun, frozenset([oid]), "it cannot be sent"), None)


def test_a_skipped_transaction_stops_the_tables_that_it_may_have_changed(kept, watch):
    lsn = kept.durable_lsn
    skip(kept, kept.record(A).relation.oid, lsn)
    look(kept, watch)
    assert kept.states() == {A: "errored", B: "streaming"}
    assert (kept.record(A).error, kept.record(A).lsn) == ("GapError", lsn)


def test_publication_status_row_does_not_hide_skipped_transaction(kept, watch):
    relation, lsn = kept.record(A).relation, kept.durable_lsn
    standing = {
        "epoch": 1,
        "commit_lsn": lsn,
        "ordinal": STATUS_ORDINAL,
        "relation_id": relation.oid,
        "relation_version": relation.version,
        "op": "R",
    }
    writer = ChangelogWriter(kept.changelog)
    writer.append_between(pa.Table.from_pylist([standing], ROW_SCHEMA))
    look(kept, watch)
    skip(kept, relation.oid, lsn)
    look(kept, watch)
    assert kept.states() == {A: "errored", B: "streaming"}


def test_a_table_that_the_watch_has_not_looked_at_keeps_its_place(kept, watch, monkeypatch):
    monkeypatch.setattr(table_watch, "_RECORDS_S", 600.0)
    kept.set_states(B, TableState.SNAPSHOTTING)
    look(kept, watch)
    # Tables of one snapshot have one position, and become active one after the other.
    taken_at = kept.record(A).position_lsn
    with kept.access.state_db("snapshot") as state_db:
        state_db.record_snapshot(kept.pipeline.name, kept.record(B).relation, taken_at, 0)
    kept.set_states(B, TableState.CATCHING_UP)
    execute(kept.dsn, "insert into a values (1)")
    kept.receive()
    look(kept, watch)
    watch.save()
    assert kept.record(A).position_lsn > taken_at
    assert kept.record(B).position_lsn == taken_at
