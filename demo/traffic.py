"""The tables of the demo and their traffic: TPC-B transactions of pgbench over all four tables."""

from __future__ import annotations

import subprocess
from pathlib import Path

from demo import processes
from demo.errors import DemoError
from demo.postgres import Server

DATABASE = "bench"
OWNER = "bench"
REPLICATOR = "replicator"
"""The role that replicates. It is a member of the owner's role, because only an owner may publish a table."""
TABLES = (
    "public.pgbench_branches",
    "public.pgbench_tellers",
    "public.pgbench_accounts",
    "public.pgbench_history",
)
KEYLESS_TABLES = ("public.pgbench_history",)

_FOREVER_S = 30 * 24 * 3600


class Traffic:
    """The pgbench process for a server."""

    def __init__(self, server: Server, log: Path, *, rate: int, clients: int) -> None:
        self._server = server
        self._log = log
        self._rate = rate
        self._clients = clients
        self._process: subprocess.Popen[bytes] | None = None

    def initialise(self, scale: int) -> None:
        """Create the roles, and with `pgbench -i` the filled tables. All balances are zero."""
        for statement in (
            f"CREATE ROLE {OWNER} LOGIN",
            f"CREATE ROLE {REPLICATOR} LOGIN REPLICATION IN ROLE {OWNER}",
            f"CREATE DATABASE {DATABASE} OWNER {OWNER}",
            f"GRANT CREATE ON DATABASE {DATABASE} TO {REPLICATOR}",
        ):
            self._run("psql", "postgres", "postgres", "-q", "-v", "ON_ERROR_STOP=1", "-c", statement)
        self._run("pgbench", OWNER, DATABASE, "-i", "-q", "-s", str(scale))

    def start(self) -> None:
        # -n: do not vacuum at the start, and do not truncate the history.
        options = ["-n", "-c", str(self._clients), "-R", str(self._rate), "-T", str(_FOREVER_S)]
        self._process = processes.start(self._command("pgbench", OWNER, DATABASE, *options), log=self._log)

    def check_alive(self) -> None:
        """Raise DemoError if pgbench has ended unexpectedly."""
        if self._process is not None and (code := self._process.poll()) is not None:
            raise DemoError(
                f"pgbench ended (exit code {code}); {self._log} ends with\n{processes.tail(self._log)}"
            )

    def stop(self) -> None:
        """Stop pgbench. The server rolls back unfinished transactions."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=30)
            self._process = None

    def _run(self, program: str, *arguments: str) -> None:
        if processes.start(self._command(program, *arguments), log=self._log).wait() != 0:
            raise DemoError(f"{program} failed; {self._log} ends with\n{processes.tail(self._log)}")

    def _command(self, program: str, user: str, database: str, *arguments: str) -> list[str]:
        where = ["-h", "127.0.0.1", "-p", str(self._server.port), "-U", user]
        return [str(self._server.bin / program), *where, *arguments, database]
