"""The watch that judges tables without lake tables, on a changelog that was really received."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_provider_pgrepl.replication.app import table_watch
from airflow_provider_pgrepl.replication.app.table_watch import TableWatch
from airflow_provider_pgrepl.replication.changelog.gaps import Gap
from airflow_provider_pgrepl.replication.changelog.reader import open_changelog, read_epoch
from airflow_provider_pgrepl.replication.lake.applying.applier_progress import ApplierProgress
from airflow_provider_pgrepl.replication.receiving.skipping import record_gap
from airflow_provider_pgrepl.replication.state.table_state import TableState
from airflow_provider_pgrepl.replication.wire.columns import TransactionBegin
from tests.support.kept import A, B, Kept, kept_tables
from tests.support.replicated import execute


@pytest.fixture
def kept(dsn: str, tmp_path: Path) -> Kept:
    return kept_tables(dsn, tmp_path)


@pytest.fixture
def watch(kept: Kept) -> Iterator[TableWatch]:
    with kept.access.store("watch") as store:
        yield TableWatch(kept.pipeline, store, read_epoch(kept.changelog), ApplierProgress())


def look(kept: Kept, watch: TableWatch) -> None:
    watch.look(int(open_changelog(kept.changelog).version()))


def test_a_skipped_transaction_stops_the_tables_that_it_may_have_changed(kept, watch):
    # As after a skip that died before it had marked them.
    begun = TransactionBegin(kept.durable_lsn, 700, 1_700_000_000_000_000)
    relation = kept.record(A).relation
    record_gap(kept.pipeline, Gap(begun, frozenset([relation.oid]), "it cannot be sent"), None)
    look(kept, watch)
    assert kept.states() == {A: "errored", B: "streaming"}
    assert (kept.record(A).error, kept.record(A).lsn) == ("GapError", begun.commit_lsn)


def test_a_table_that_the_watch_has_not_looked_at_keeps_its_place(kept, watch, monkeypatch):
    monkeypatch.setattr(table_watch, "_RECORDS_S", 600.0)
    kept.set_states(B, TableState.SNAPSHOTTING)
    look(kept, watch)
    # Tables of one snapshot have one position, and become active one after the other.
    taken_at = kept.record(A).position_lsn
    with kept.access.store("snapshot") as store:
        store.record_snapshot(kept.pipeline.name, kept.record(B).relation, taken_at, 0)
    kept.set_states(B, TableState.CATCHING_UP)
    execute(kept.dsn, "insert into a values (1)")
    kept.receive()
    look(kept, watch)
    watch.save()
    assert kept.record(A).position_lsn > taken_at
    assert kept.record(B).position_lsn == taken_at
