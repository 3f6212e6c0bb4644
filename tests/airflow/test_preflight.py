"""Checks that an operator makes by itself, before a JVM is started for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg2.extensions
import pytest
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from airflow_provider_pgrepl.operators.replication import PgReplicationOperator
from airflow_provider_pgrepl.operators.resnapshot import PgAddTablesOperator, PgResnapshotOperator
from airflow_provider_pgrepl.operators.snapshot import PgSnapshotOperator
from airflow_provider_pgrepl.replication.changelog.layout import changelog_uri
from airflow_provider_pgrepl.replication.changelog.writer import create_changelog
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from tests.support.changelogs import epoch_record
from tests.support.recorded import Recorded

pytestmark = pytest.mark.usefixtures("airflow_db")

SHOP = {"name": "shop", "tables": ["public.orders"], "trust_table_owners": True}


class Source:
    """A server with a table, to which Airflow's connection leads, and a spark-submit that says it was run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, dsn: str, pg: Any, folder: Path) -> None:
        self.dsn, self.pg = dsn, pg
        self._monkeypatch = monkeypatch
        self.lake = str(folder / "lake")
        self._record = folder / "submitted"
        self._script = folder / "spark-submit"
        self._script.write_text(f'#!/bin/sh\necho yes >"{self._record}"\n', encoding="utf-8")
        self._script.chmod(0o755)
        pg.cursor().execute("create table orders (id int primary key)")
        self.log_in_as(psycopg2.extensions.parse_dsn(dsn)["user"])

    def log_in_as(self, role: str, **changed: Any) -> None:
        parts = psycopg2.extensions.parse_dsn(self.dsn)
        fields = {"conn_type": "pgrepl", "host": parts["host"], "port": int(parts["port"]), "login": role}
        named = {"schema": parts["dbname"], "password": "open sesame", **changed}
        self._monkeypatch.setenv("AIRFLOW_CONN_PGREPL_DEFAULT", json.dumps({**fields, **named}))

    def run(self, operator: type[Any], **arguments: Any) -> None:
        given = {
            "pipeline": {**SHOP, "lake": self.lake},
            "spark_binary": str(self._script),
            "poll_interval_s": 0.1,
            **arguments,
        }
        operator(task_id="t", **given).execute({})

    @property
    def was_submitted(self) -> bool:
        return self._record.exists()


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch, dsn: str, pg: Any, tmp_path: Path) -> Source:
    return Source(monkeypatch, dsn, pg, tmp_path)


@pytest.fixture
def reader(pg: Any) -> Iterator[str]:
    """A role that may replicate, and read nothing."""
    with pg.cursor() as cursor:
        cursor.execute("drop role if exists preflight_reader; create role preflight_reader login replication")
        cursor.execute("select current_database()")
        cursor.execute(f'grant create on database "{cursor.fetchone()[0]}" to preflight_reader')
    yield "preflight_reader"
    pg.cursor().execute("drop owned by preflight_reader; drop role preflight_reader")


def record_with_lake(source: Source) -> None:
    """Record the pipeline, and create its changelog in the lake."""
    Recorded(source.dsn, "public.orders")
    create_changelog(changelog_uri(source.lake), replace(epoch_record(), pipeline="shop"))


def test_snapshot_operator_submits_application_when_preflight_passes(source: Source) -> None:
    source.run(PgSnapshotOperator)
    assert source.was_submitted


def test_a_missing_table_is_named(source: Source) -> None:
    shop = {**SHOP, "lake": source.lake, "tables": ["public.orders", "public.nope"]}
    with pytest.raises(AirflowFailException, match=r"public\.nope: does not exist"):
        source.run(PgSnapshotOperator, pipeline=shop)
    assert not source.was_submitted


def test_unusable_lake_fails_task_before_spark_starts_and_leaves_nothing_behind(
    source: Source, pg: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    source.lake = str(tmp_path / "file" / "lake")
    with pytest.raises(AirflowException, match="cannot write under"):
        source.run(PgSnapshotOperator)
    assert not source.was_submitted
    with pg.cursor() as cursor:
        cursor.execute("select count(*) from pg_publication")
        assert cursor.fetchone() == (0,)
        cursor.execute("select count(*) from pg_namespace where nspname = '_pgrepl'")
        assert cursor.fetchone() == (0,)


@pytest.mark.thorough("test_a_missing_table_is_named; integration/test_preflight: missing rights")
def test_a_missing_right_is_named(source: Source, reader: str) -> None:
    source.log_in_as(reader)
    with pytest.raises(AirflowFailException, match=r"lacks SELECT on public\.orders"):
        source.run(PgSnapshotOperator)
    assert not source.was_submitted


@pytest.mark.parametrize("operator", [PgSnapshotOperator, PgReplicationOperator])
def test_rejected_login_fails_task_without_retry(source: Source, operator: type[Any]) -> None:
    source.log_in_as("nobody_of_this_name")
    with pytest.raises(AirflowFailException, match=r"LoginError: .*nobody_of_this_name"):
        source.run(operator)
    assert not source.was_submitted


def test_a_replication_without_the_right_to_replicate_is_not_started(source: Source, pg: Any) -> None:
    pg.cursor().execute("drop role if exists preflight_plain; create role preflight_plain login")
    source.log_in_as("preflight_plain")
    with pytest.raises(AirflowFailException, match="REPLICATION"):
        source.run(PgReplicationOperator)
    pg.cursor().execute("drop role preflight_plain")
    assert not source.was_submitted


def test_tables_that_are_not_the_pipelines_are_named(source: Source) -> None:
    record_with_lake(source)
    with pytest.raises(AirflowFailException, match=r"not among the tables of the pipeline: public\.nope"):
        source.run(PgResnapshotOperator, tables="public.nope")
    with pytest.raises(AirflowFailException, match=r"public\.nope: does not exist"):
        source.run(PgAddTablesOperator, tables="public.nope")
    with pytest.raises(AirflowFailException, match="tables: "):
        source.run(PgResnapshotOperator, tables="public.")
    assert not source.was_submitted
    source.run(PgResnapshotOperator, tables="public.orders")
    assert source.was_submitted


def test_a_pipeline_that_has_begun_is_not_refused_for_one_tables_trouble(source: Source, pg: Any) -> None:
    record_with_lake(source)
    pg.cursor().execute("drop table orders")
    source.run(PgSnapshotOperator)
    assert source.was_submitted


def test_lake_that_is_not_there_is_said_before_anything_is_started(source: Source, tmp_path: Path) -> None:
    away = {**SHOP, "lake": str(tmp_path / "away")}
    for operator in (PgReplicationOperator, PgSnapshotOperator):
        if operator is PgReplicationOperator:
            with pytest.raises(AirflowFailException, match="there is no changelog in "):
                source.run(operator, pipeline=away)
            Recorded(source.dsn, "public.orders")
        with pytest.raises(AirflowFailException, match="tables of pipeline shop have been copied, but"):
            source.run(operator, pipeline=away)
    assert not source.was_submitted
    source.run(PgSnapshotOperator, pipeline=away, new_epoch=True)
    assert source.was_submitted


def test_changelog_that_cannot_be_opened_is_left_to_the_application(source: Source, tmp_path: Path) -> None:
    """It sets aside what a crash has left there."""
    log = tmp_path / "lake" / "_pgrepl" / "changelog" / "_delta_log"
    log.mkdir(parents=True)
    (log / f"{0:020}.json").write_bytes(b"\0" * 100)
    Recorded(source.dsn, "public.orders")
    source.run(PgSnapshotOperator, pipeline={**SHOP, "lake": str(tmp_path / "lake")})
    assert source.was_submitted


def test_lock_of_another_application_is_named_before_a_replication_and_waited_for_before_a_copy(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("airflow_provider_pgrepl.operators.spark_app._JUST_ENDED_S", 0.0)
    record_with_lake(source)
    with StateDatabase(source.dsn, "other") as other:
        other.lock("shop", "replicate")
        with pytest.raises(AirflowException, match=r"at it already \(replicate\).*\n?.* kill \d+") as caught:
            source.run(PgReplicationOperator)
        assert not isinstance(caught.value, AirflowFailException)
        assert not source.was_submitted
        other.lock("shop", "snapshot")
        waiting: list[str] = []

        def end_of_wait(_: Any, __: int, text: str) -> None:
            waiting.append(text)
            assert not source.was_submitted
            other.unlock("shop", "snapshot")

        monkeypatch.setattr(PgSnapshotOperator, "_say", end_of_wait)
        source.run(PgSnapshotOperator)
    assert waiting[0].startswith("Waiting: pipeline shop: another process is at it already (snapshot)")
    assert source.was_submitted


def test_the_preflight_can_be_left_out(source: Source) -> None:
    source.log_in_as("nobody_of_this_name")
    source.run(PgSnapshotOperator, preflight=False)
    assert source.was_submitted
