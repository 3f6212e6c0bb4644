"""The source of the benchmarks: a PostgreSQL server with its default durability."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg2

from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.source.server import wal_lsn
from demo.postgres import Server

# The role of docs/reference/connection.md: the apps reject a superuser, so no benchmark connects as one.
_RIGHTS = """
create role shop_owner;
create role replicator login replication;
grant shop_owner to replicator;
grant create on database postgres to replicator;
grant create, usage on schema public to shop_owner;
do $$ declare name text; begin
    for name in select format('%I.%I', schemaname, tablename) from pg_tables where schemaname = 'public' loop
        execute 'alter table ' || name || ' owner to shop_owner';
    end loop;
end $$;
"""
_SETTINGS = {"shared_buffers": "512MB", "max_wal_size": "8GB"}


class Source:
    """A running server, with one autocommit connection to its database."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.dsn = server.dsn()
        self.connection = psycopg2.connect(self.dsn)
        self.connection.autocommit = True

    def execute(self, statement: str, *values: object) -> None:
        with self.connection.cursor() as cursor:
            cursor.execute(statement, values or None)

    def fetch(self, statement: str, *values: object) -> tuple[Any, ...]:
        """Return the first row of a query."""
        with self.connection.cursor() as cursor:
            cursor.execute(statement, values or None)
            row: tuple[Any, ...] = cursor.fetchone()
            return row

    def replicator_dsn(self) -> str:
        """Create a role that may replicate the existing tables and return its DSN. Call once per server."""
        self.execute(_RIGHTS)
        return self.server.dsn(user="replicator")

    def end_lsn(self) -> LSN:
        """Return an LSN at or after all transactions that were committed before the call."""
        with closing(connect(self.dsn, "benchmark")) as connection:
            return wal_lsn(connection)

    def settle(self) -> None:
        """Run vacuum and a checkpoint now, so that the server does not run them during the measurement."""
        self.execute("vacuum (analyze)")
        self.execute("checkpoint")

    def time_program(self, program: str, *arguments: str) -> float:
        """Return the seconds that a program of PostgreSQL takes. Its output is discarded."""
        started = time.perf_counter()
        subprocess.run(
            [str(self.server.bin / program), *arguments], check=True, stdout=subprocess.DEVNULL, cwd="/"
        )
        return time.perf_counter() - started


@contextmanager
def running_source() -> Iterator[Source]:
    """Yield a new server. At the end of the block, stop it and delete its data."""
    # PostgreSQL's own user must be able to enter every folder above its data.
    with tempfile.TemporaryDirectory(prefix="pgrepl-bench-pg-") as folder:
        Path(folder).chmod(0o755)
        server = Server(Path(folder) / "data", settings=_SETTINGS)
        server.create()
        server.start()
        try:
            source = Source(server)
            try:
                yield source
            finally:
                source.connection.close()
        finally:
            server.stop(immediate=True)
