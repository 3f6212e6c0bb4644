"""The source that is measured against: an embedded PostgreSQL with its default durability."""

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

# As docs/reference/connection.md has it: the apps refuse a superuser, and so no benchmark runs them as one.
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
    """A running server and one autocommit connection to its database."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.dsn = server.dsn()
        self.connection = psycopg2.connect(self.dsn)
        self.connection.autocommit = True

    def execute(self, statement: str, *values: object) -> None:
        with self.connection.cursor() as cursor:
            cursor.execute(statement, values or None)

    def fetch(self, statement: str, *values: object) -> tuple[Any, ...]:
        """The first row."""
        with self.connection.cursor() as cursor:
            cursor.execute(statement, values or None)
            row: tuple[Any, ...] = cursor.fetchone()
            return row

    def replicator_dsn(self) -> str:
        """Makes a role that may replicate the tables which are there now. Once for a server."""
        self.execute(_RIGHTS)
        return self.server.dsn(user="replicator")

    def end_lsn(self) -> LSN:
        """All that was committed until now lies at or before it."""
        with closing(connect(self.dsn, "benchmark")) as connection:
            return wal_lsn(connection)

    def settle(self) -> None:
        """Do now what the server would otherwise do while we measure."""
        self.execute("vacuum (analyze)")
        self.execute("checkpoint")

    def time_program(self, program: str, *arguments: str) -> float:
        """Seconds that one of PostgreSQL's own programs takes, its output thrown away."""
        started = time.perf_counter()
        subprocess.run(
            [str(self.server.bin / program), *arguments], check=True, stdout=subprocess.DEVNULL, cwd="/"
        )
        return time.perf_counter() - started


@contextmanager
def running_source() -> Iterator[Source]:
    """A fresh server, gone with its data afterwards."""
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
