"""A streaming standby of a server, for tests."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg2

from demo.postgres import Server, as_owner
from tests.support.replicated import execute, wait_until

PHYSICAL_SLOT = "standby1"
_NAP_S = 0.2


@contextmanager
def standby_of(primary: Server, **settings: str) -> Iterator[Server]:
    """A hot standby that follows `primary`, of the same version, with these settings."""
    with tempfile.TemporaryDirectory(prefix="pgrepl-test-standby-") as folder:
        Path(folder).chmod(0o777)
        standby = Server(Path(folder) / "data", settings={"fsync": "off", **settings})
        copy = ["--no-sync", "--checkpoint=fast", "--write-recovery-conf", "--pgdata", str(standby.data)]
        subprocess.run(
            [str(standby.bin / "pg_basebackup"), "--dbname", primary.dsn(), *copy],
            check=True,
            capture_output=True,
            timeout=60,
            cwd="/",
            env={**os.environ, "HOME": folder},
            **as_owner(),
        )
        standby.start()
        try:
            yield standby
        finally:
            standby.stop(immediate=True)


@contextmanager
def silent(primary: Server) -> Iterator[None]:
    """Let the primary log its running transactions only when it is asked: an idle one logs none."""
    # A checkpoint logs them, and so does the background writer.
    execute(primary.dsn(), "alter system set checkpoint_timeout = '1d'", "select pg_reload_conf()")
    with closing(psycopg2.connect(primary.dsn())) as connection, connection.cursor() as cursor:
        cursor.execute("select pid from pg_stat_activity where backend_type = 'background writer'")
        [(pid,)] = cursor.fetchall()
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def failover_pair(major: int) -> Iterator[tuple[Server, Server]]:
    """A primary, and a standby that synchronizes its failover slots.

    The primary sends changes of a failover slot only when the standby has them. The standby is a copy of the
    stopped primary's files: the servers that `setup/majors.sh` fetches have no pg_basebackup.
    """
    with tempfile.TemporaryDirectory(prefix="pgrepl-test-pair-") as folder:
        Path(folder).chmod(0o777)
        primary = Server(
            Path(folder) / "primary",
            major=major,
            settings={"fsync": "off", "synchronized_standby_slots": PHYSICAL_SLOT},
        )
        primary.create()
        primary.start()
        execute(primary.dsn(), f"select pg_create_physical_replication_slot('{PHYSICAL_SLOT}', true)")
        primary.stop()
        standby = Server(
            Path(folder) / "standby",
            major=major,
            settings={
                "fsync": "off",
                "sync_replication_slots": "on",
                "hot_standby_feedback": "on",
                "primary_slot_name": PHYSICAL_SLOT,
                "primary_conninfo": f"{primary.dsn()} application_name={PHYSICAL_SLOT}",
                "wal_retrieve_retry_interval": "100ms",
            },
        )
        subprocess.run(["cp", "-a", primary.data, standby.data], check=True)
        shutil.rmtree(standby.data / "pg_replslot" / PHYSICAL_SLOT)
        (standby.data / "standby.signal").touch()
        primary.start()
        standby.start()
        try:
            yield primary, standby
        finally:
            for server in (standby, primary):
                server.stop(immediate=True)


def both_hosts(*servers: Server, database: str = "postgres") -> str:
    """Return a connection string of several servers, which leads to the one that can be written."""
    hosts, ports = ",".join("127.0.0.1" for _ in servers), ",".join(str(one.port) for one in servers)
    return f"host={hosts} port={ports} dbname={database} user=postgres target_session_attrs=read-write"


def wait_until_synced(standby: Server, slot: str, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Wait until the standby has a persistent copy of the slot, which its promotion keeps."""

    def is_synced() -> bool:
        meanwhile()
        time.sleep(_NAP_S)
        with psycopg2.connect(standby.dsn()) as connection, connection.cursor() as cursor:
            cursor.execute(
                "select synced and not temporary and invalidation_reason is null"
                " from pg_replication_slots where slot_name = %s",
                (slot,),
            )
            found = bool((cursor.fetchone() or (False,))[0])
            # This wakes the process that synchronizes slots, which sleeps for up to 30 s.
            cursor.execute("select pg_reload_conf()")
            return found

    wait_until(is_synced, 120, f"slot {slot} to be synchronized")


def promote(standby: Server) -> None:
    """Promote the standby, and wait until it can be written."""
    execute(standby.dsn(), "select pg_promote(true, 120)")
