"""Fixtures of the tests that need a server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_provider_pgrepl.replication.app.process import TARGET_VARIABLE
from demo.rabbitmq import Broker
from demo.versitygw import Gateway, environment_of
from tests.support.faulty_store import FaultyStore, faulty_store
from tests.support.published import Published, begin_publishing
from tests.support.unflushed import unflushed

__all__ = ["unflushed"]


@pytest.fixture
def run(pg):
    """Runs statements in the test's database and returns the rows of the last one; None when it has none."""

    def execute(*statements):
        with pg.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            return cursor.fetchall() if cursor.description else None

    return execute


@pytest.fixture
def faulty(gateway: Gateway, s3_lake: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStore]:
    """The way to the store, which can fail; the environment leads there."""
    with faulty_store(gateway.port) as store:
        for name, value in environment_of(store.port).items():
            monkeypatch.setenv(name, value)
        yield store


@pytest.fixture
def published(dsn: str, tmp_path: Path, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Published:
    """A pipeline with a publisher to the module's broker."""
    monkeypatch.setenv("PGREPL_DSN", dsn)
    monkeypatch.setenv(TARGET_VARIABLE, broker.uri)
    return begin_publishing(dsn, tmp_path, broker)
