"""`EVENTS=…`: the changes as events beside the lake, and a service that rebuilds rows from them."""

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
    """Someone else's service: it knows the broker alone, and keeps each row that an event spoke of."""

    def __init__(self) -> None:
        super().__init__(name="demo-service", daemon=True)
        self.rows: dict[str, dict[Any, dict[str, Any]]] = {table: {} for table in KEYS}
        self.counts: Counter[str] = Counter()
        self.error = ""
        self.position = EventPosition.parse("0:0/0:0")
        self.delay_s = 0.0
        self.stop_asked = threading.Event()

    def stop(self) -> None:
        self.stop_asked.set()
        if self.is_alive():
            self.join(_WAIT_S)

    def take(self, table: str, row: dict[str, Any], id_: str, commit_ts: datetime) -> None:
        """Keep the row of an event that is to be applied."""
        self.position = max(self.position, EventPosition.parse(id_))
        self.counts[table] += 1
        self.delay_s = (datetime.now(UTC) - commit_ts).total_seconds()
        if table in KEYS:
            self.rows[table][row[KEYS[table]]] = row


class Events(ABC):
    """A broker, the service, and what the demo says of them. `publishers`: of the pipeline file."""

    publishers: ClassVar[dict[str, Any]]
    service: Service | None = None

    @property
    @abstractmethod
    def variables(self) -> dict[str, str]:
        """The Airflow connection of the publisher."""

    @abstractmethod
    def start(self) -> str:
        """Start broker and service; what was started. Raises DemoError."""

    @abstractmethod
    def stop(self) -> None:
        """End both."""

    def line(self) -> str:
        """For the status line. Raises DemoError when the service has ended."""
        service = self._running()
        return f"{service.counts.total():,} events, the last {service.delay_s:.1f} s after its commit"

    def has_reached(self, lsn: LSN) -> bool:
        """Whether an event of a transaction after that LSN has arrived."""
        return self._running().position.commit_lsn > lsn

    def compare(self, dsn: str) -> list[tuple[str, int]]:
        """For each table a sentence, and how many of the service's rows are not as the source has them."""
        service, found = self._running(), []
        with closing(psycopg2.connect(dsn)) as source, source.cursor() as cursor:
            for table, key in KEYS.items():
                rows = service.rows[table]
                # The table's name is one of ours.
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
            raise DemoError(f"The service that reads events lost its broker: {self.service.error}")
        return self.service
