"""The schema `_pgrepl` is dropped under a pipeline that has begun: said before anything acts on it."""

from __future__ import annotations

import re

import pytest

from airflow_provider_pgrepl.errors import ConfigError, StateError
from airflow_provider_pgrepl.replication.app import replicate, snapshot
from airflow_provider_pgrepl.replication.app.snapshot import add_tables, begin_new_epoch, take_tables
from airflow_provider_pgrepl.replication.app.snapshot_tables import SnapshotResult
from airflow_provider_pgrepl.replication.app.source_ownership import SourceOwnership
from airflow_provider_pgrepl.replication.app.status.status import read_status
from airflow_provider_pgrepl.replication.app.status.text import to_text
from airflow_provider_pgrepl.replication.changelog.reader import open_changelog, read_epoch
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.source.server import read_server
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from tests.support.kept import A, B, Kept, kept_tables
from tests.support.replicated import execute

T = "public.t"
DROP = "drop schema _pgrepl cascade"
FORGET = "delete from _pgrepl.pipelines"


@pytest.fixture
def kept(dsn, tmp_path, monkeypatch) -> Kept:
    execute(dsn, "create table t (id int primary key)", "insert into t values (1)")
    kept = Kept(dsn, tmp_path, (T,), trust_table_owners=True)
    kept.take(T)
    monkeypatch.setenv("PGREPL_DSN", dsn)
    monkeypatch.delenv("PGREPL_STATE_DSN", raising=False)
    return kept


@pytest.mark.parametrize("loss", [DROP, FORGET])
@pytest.mark.thorough("the same test, of a schema that is dropped", "delete from _pgrepl.pipelines")
def test_replication_does_not_begin_to_receive(kept: Kept, caplog, loss: str) -> None:
    execute(kept.dsn, loss)
    version = open_changelog(kept.changelog).version()
    assert replicate.main(["--pipeline", str(kept.file)]) == 78
    assert "the state database knows nothing of the pipeline" in caplog.text
    assert "--new-epoch" not in caplog.text
    assert open_changelog(kept.changelog).version() == version, "no receiver has been there"
    assert has_schema(kept) == (loss is FORGET), "none is made"


@pytest.mark.parametrize("loss", [DROP, FORGET])
def test_a_snapshot_leads_out_of_it(kept: Kept, loss: str) -> None:
    execute(kept.dsn, loss)
    for take in (take_tables, add_tables):
        with pytest.raises(StateError, match="knows nothing") as caught:
            take(kept.access)
        assert "PGREPL_STATE_DSN" in caught.value.hint
        assert "--new-epoch" not in caught.value.hint
    assert has_schema(kept) == (loss is FORGET)


@pytest.mark.parametrize("loss", [DROP, FORGET])
@pytest.mark.thorough("the same test, of a schema that is dropped", "delete from _pgrepl.pipelines")
def test_status_says_so(kept: Kept, loss: str) -> None:
    execute(kept.dsn, loss)
    shown = " ".join(to_text(read_status(kept.pipeline)).split())
    assert "the state database knows nothing of the pipeline" in shown
    assert "--new-epoch" not in shown


def test_a_new_epoch_knows_slot_and_publication_from_the_lake(kept: Kept) -> None:
    execute(kept.dsn, DROP)
    with pytest.raises(ConfigError, match=r"would abandon.*knows nothing"):
        begin_new_epoch(kept.access)
    epoch = read_epoch(kept.changelog)
    with StateDatabase(kept.dsn, "test") as state_db, kept.source() as source:
        state_db.migrate()
        SourceOwnership(kept.dsn, source, kept.pipeline, state_db).claim(read_server(source), epoch)
        record = state_db.read_pipeline(kept.pipeline.name)
    assert record is not None
    assert (record.slot_owned, record.publication_owned) == (True, True)


@pytest.mark.parametrize("policy", ["ignore", "error"])
def test_no_table_is_new_to_a_new_epoch_when_none_is_recorded(dsn, tmp_path, monkeypatch, policy) -> None:
    kept = kept_tables(dsn, tmp_path, new_tables=policy)
    execute(dsn, DROP)
    with pytest.raises(ConfigError, match="would abandon") as caught:
        begin_new_epoch(kept.access)
    begun: list[str] = []

    def begin(_: object, relations: list[Relation], *__: object, **___: object) -> SnapshotResult:
        begun.extend(str(relation.table) for relation in relations)
        return SnapshotResult()

    monkeypatch.setattr(snapshot, "begin_epoch", begin)
    begin_new_epoch(kept.access, re.findall(r"--give-up (\S+),", caught.value.hint))
    assert begun == [A, B]


def has_schema(kept: Kept) -> bool:
    with kept.source() as source, source.cursor() as cursor:
        cursor.execute("select 1 from pg_namespace where nspname = '_pgrepl'")
        return cursor.fetchone() is not None
