"""Consumer: tables are asked for some at once, and loaded one at a time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import FencedError, TargetUnavailableError
from airflow_provider_pgrepl.replication.creek.consumer import Consumer
from airflow_provider_pgrepl.replication.creek.copy_database import ConsumerTableState
from airflow_provider_pgrepl.replication.postgres.names import TableName

NAMES = [TableName("public", name) for name in "abcdefgh"]


class Taking(Consumer):
    """A consumer whose publisher answers once four requests wait."""

    def __init__(self, fails: dict[str, Exception] | None = None) -> None:
        super().__init__(None, None, {name: name for name in NAMES}, lambda: False)
        self.fails = fails or {}
        self.asked = self.most = self.loading = 0
        self.four = asyncio.Barrier(4)

    async def _snapshot(self, source: TableName) -> Any:
        self.asked += 1
        self.most = max(self.most, self.asked)
        await asyncio.wait_for(self.four.wait(), 30)
        self.asked -= 1
        if source.name in self.fails:
            raise self.fails[source.name]
        return source

    async def _load(self, source: TableName, snapshot: Any) -> ConsumerTableState:
        self.loading += 1
        assert self.loading == 1, "the connection has one transaction"
        await asyncio.sleep(0)
        self.loading -= 1
        return snapshot


def test_four_tables_are_asked_for_at_once_and_one_is_loaded_at_a_time():
    async def take() -> Taking:
        taking = Taking({"b": TargetUnavailableError("no publisher answered")})
        await taking._load_missing()
        return taking

    taking = asyncio.run(take())
    assert taking.most == 4
    assert taking._failed == [TableName("public", "b")]
    assert sorted(taking._kept) == [name for name in NAMES if name.name != "b"]


def test_fenced_error_at_one_table_fails_the_whole_load():
    async def take() -> None:
        await Taking({"a": FencedError("another consumer")})._load_missing()

    with pytest.raises(FencedError):
        asyncio.run(take())
