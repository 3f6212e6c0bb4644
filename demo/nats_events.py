"""The demo with `EVENTS=nats`: events in creek's wire format, in JetStream."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import ClassVar

from airflow_provider_pgrepl.errors import TargetUnavailableError
from airflow_provider_pgrepl.replication.creek.client import CreekClient
from demo.airflow import connection
from demo.errors import DemoError
from demo.events import Events, Service
from demo.nats import NatsServer
from demo.traffic import TABLES

_DATABASE = "demo"
_PAUSE_S = 0.5


class NatsService(Service):
    """A service that ignores changes whose LSN is not above the last of their table.

    The how-to for consumers recommends this.
    """

    def __init__(self, uri: str) -> None:
        super().__init__()
        self._uri = uri

    def read(self) -> None:
        asyncio.run(self._read())

    async def _read(self) -> None:
        async with CreekClient(self._uri, _DATABASE) as creek:
            reading = [asyncio.create_task(self._follow(creek, table)) for table in TABLES]
            while not self.stop_asked.is_set():
                await asyncio.wait(reading, timeout=_PAUSE_S, return_when=asyncio.FIRST_COMPLETED)
                for ended in (task for task in reading if task.done()):
                    ended.result()
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)

    async def _follow(self, creek: CreekClient, table: str) -> None:
        last = 0
        while not await _has_streams(creek, table):
            await asyncio.sleep(_PAUSE_S)
        async for change in creek.stream_wal(*table.split(".")):
            if change.lsn > last and change.after is not None:
                last = change.lsn
                self.take(table, change.after, change.id, change.tx_at)


async def _has_streams(creek: CreekClient, table: str) -> bool:
    """Return True if the publisher has created the streams of the table."""
    try:
        await creek.list_snapshots(*table.split("."))
    except TargetUnavailableError:
        return False
    return True


class NatsEvents(Events):
    """A NATS server with JetStream, and a service that reads creek's wire format."""

    publishers: ClassVar = {"events": {"target": "nats", "database": _DATABASE}}

    def __init__(self, folder: Path) -> None:
        self._server = NatsServer(folder)

    @property
    def variables(self) -> dict[str, str]:
        return {"AIRFLOW_CONN_PGREPL_NATS": connection("nats", host="127.0.0.1", port=self._server.port)}

    def start(self) -> str:
        try:
            self._server.start()
        except RuntimeError as error:
            raise DemoError(str(error)) from None
        self.service = NatsService(self._server.uri)
        self.service.start()
        return f"NATS on port {self._server.port}; a service reads the streams CREEK_*_{_DATABASE}"

    def stop(self) -> None:
        if self.service is not None:
            self.service.stop()
        self._server.stop()
