"""Statements of the application, and what they wait for."""

from __future__ import annotations

import threading

import psycopg2
import psycopg2.extensions

HANGS_S = 120


class Application(threading.Thread):
    """One statement of the application, run in a thread without a timeout."""

    def __init__(self, dsn: str, sql: str) -> None:
        super().__init__(daemon=True)
        self.connection = psycopg2.connect(dsn + " application_name=migration")
        self.connection.autocommit = True
        self.pid = self.connection.info.backend_pid
        self.error: BaseException | None = None
        self._sql = sql
        self.start()

    def run(self) -> None:
        try:
            self.connection.cursor().execute(self._sql)
        except psycopg2.Error as error:
            self.error = error

    def assert_done(self) -> None:
        self.join(HANGS_S)
        assert not self.is_alive(), f"still waiting: {self._sql}"
        assert self.error is None
        self.connection.close()


def waits(pg: psycopg2.extensions.connection, pid: int) -> bool:
    with pg.cursor() as cursor:
        cursor.execute("select 1 from pg_locks where pid = %s and not granted", (pid,))
        return bool(cursor.fetchall())
