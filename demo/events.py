"""The demo with `EVENTS=…`: changes are also published as events, and a service rebuilds rows from them."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from contextlib import closing
from datetime import UTC, datetime
from typing import Any, ClassVar

import psycopg2

from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from demo.errors import DemoError

KEYS = {
    "public.pgbench_accounts": "aid",
    "public.pgbench_tellers": "tid",
    "public.pgbench_branches": "bid",
}
_WAIT_S = 10


class Service(threading.Thread, ABC):
    """A consumer service that reads only from the broker, and keeps the newest row of each key."""

    def __init__(self) -> None:
        super().__init__(name="demo-service", daemon=True)
        self.rows: dict[str, dict[Any, dict[str, Any]]] = {table: {} for table in KEYS}
        self.counts: Counter[str] = Counter()
        self.error = ""
        self.position = EventPosition.parse("0:0/0:0")
        self.delay_s = 0.0
        self.stop_asked = threading.Event()

    @abstractmethod
    def read(self) -> None:
        """Take events until `stop_asked` is set."""

    def run(self) -> None:
        try:
            self.read()
        except Exception as error:  # noqa: BLE001 - the main thread says it
            self.error = str(error) or type(error).__name__

    def stop(self) -> None:
        self.stop_asked.set()
        if self.is_alive():
            self.join(_WAIT_S)

    def take(self, table: str, row: dict[str, Any], id_: str, commit_ts: datetime) -> None:
        """Apply an event: keep its row, and record its position and delay."""
        self.position = max(self.position, EventPosition.parse(id_))
        self.counts[table] += 1
        self.delay_s = (datetime.now(UTC) - commit_ts).total_seconds()
        if table in KEYS:
            self.rows[table][row[KEYS[table]]] = row


class Events(ABC):
    """A broker and its consumer service. `publishers`: the setting for the pipeline file."""

    publishers: ClassVar[dict[str, Any]]
    service: Service | None = None

    @property
    @abstractmethod
    def variables(self) -> dict[str, str]:
        """The variable with the Airflow connection of the publisher."""

    @abstractmethod
    def start(self) -> str:
        """Start broker and service, and return a line that names them. Raises DemoError."""

    @abstractmethod
    def stop(self) -> None:
        """Stop service and broker."""

    def line(self) -> str:
        """Return the part of the status line on events. Raises DemoError if the service has failed."""
        service = self._running()
        return f"{service.counts.total():,} events, the last {service.delay_s:.1f} s after its commit"

    def has_reached(self, lsn: LSN) -> bool:
        """Return True if an event of a transaction after this LSN has arrived."""
        return self._running().position.commit_lsn > lsn

    def compare(self, dsn: str) -> list[tuple[str, int]]:
        """Return a sentence for each table, and how many of the service's rows differ from the source."""
        service, found = self._running(), []
        with closing(psycopg2.connect(dsn)) as source, source.cursor() as cursor:
            for table, key in KEYS.items():
                rows = service.rows[table]
                # The table's name is a constant of this module, so that it needs no quoting.
                cursor.execute(
                    f"select to_jsonb(t) from {table} t where {key} = any(%s)",
                    (list(rows),),
                )
                theirs = {row[key]: row for (row,) in cursor.fetchall()}
                different = sum(rows[one] != theirs.get(one) for one in rows)
                verdict = "equal" if not different else f"{different:,} DIFFERENT"
                found.append((f"{table}: {len(rows):,} rows rebuilt from events, {verdict}", different))
        return found

    def _running(self) -> Service:
        assert self.service is not None
        if self.service.error:
            raise DemoError(f"The service that reads events has failed: {self.service.error}")
        return self.service
