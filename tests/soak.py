"""Random traffic, DDL and faults for hours; then `verify` must find every table equal to its source.

    python -m tests.soak --hours 8                 the report is printed
    python -m tests.soak --hours 8 --report FILE   and written to a file, in Markdown

A server, Toxiproxy and the replication app run as processes of their own. In each round, sessions write to
three tables whose sums never change, and random transactions change rows and shapes of others. Meanwhile one
fault happens. Errored tables are resnapshotted afterwards, as an operator would. Exits with 1 if anything is
lost.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.drift_check.check import check_drift
from airflow_provider_pgrepl.replication.app.process import RETRY_MAY_HELP
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoints
from airflow_provider_pgrepl.replication.lake.read import ArrowView
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableRecord, TableState
from demo.postgres import Server
from tests.support.random_ddl import Following, ShiftingTables
from tests.support.replicated import Replicated, execute, wait_until
from tests.support.supervised import Supervised
from tests.support.toxiproxy import FAULTS, PROGRAM, Link, running_toxiproxy
from tests.support.traffic import INSERT_ONLY, SETUP, SUMS, TABLES, WHOLE, traffic

_ROUNDS_PER_VERIFY = 10
_TRANSACTIONS = 40
_STEPS = 6
_POINTS_PER_ROUND = 5
_TRIES = 5
_CRASH = "crash of the server"
Fault = tuple[str, Callable[[], None]]
"""A fault with its name. All but a crash of the server happen under traffic."""


class SoakError(Exception):
    """The lake is not what the source is, or an app ended with an error for which a retry is no use."""


@dataclass
class Counts:
    """The numbers of a run, for its report."""

    rounds: int = 0
    transactions: int = 0
    points: int = 0
    verified: int = 0
    largest_mib: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    exits: Counter[int] = field(default_factory=Counter)
    errored: Counter[str] = field(default_factory=Counter)


class App(Supervised):
    """The replication app, whose processes can be stopped for a while and measured."""

    def sleep(self, seconds: float) -> None:
        """Stop the app's processes, and let them continue after some seconds."""
        processes = self._processes()
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
            if number == signal.SIGSTOP:
                time.sleep(seconds)

    def resident_mib(self) -> int:
        """Return the resident memory of the app's processes."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return int(sum(process.memory_info().rss for process in self._processes())) >> 20
        return 0

    def _processes(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        return []


class Soak:
    """A pipeline, its source, and what happens to both."""

    def __init__(
        self, server: Server, links: dict[str, Link], folder: Path, chance: random.Random, counts: Counts
    ) -> None:
        self._server, self._links, self._chance = server, links, chance
        self._dsn = server.dsn()
        self.counts = counts
        execute(self._dsn, *SETUP)
        self._shifting = ShiftingTables.make(self._dsn, chance)
        self._tables = (*TABLES, *self._shifting.names)
        self._pipeline = Replicated(
            links["source"].of(self._dsn),
            folder,
            self._tables,
            name="soak",
            insert_only=INSERT_ONLY,
            merge=chance.choice(("rewrite", "merge_on_read")),
        )
        self._checked = set[tuple[int, int]]()

    def run(self, until: float) -> None:
        """Go on until a time of `time.monotonic`, and verify at the end. Raises SoakError."""
        self._run("snapshot")
        self._app = App(self._pipeline)
        self.counts.exits = self._app.exits
        try:
            while time.monotonic() < until:
                self._take_round()
            for check in ("values", "text"):
                self._verify("--check", check)
        finally:
            self._app.end()

    def _take_round(self) -> None:
        self.counts.rounds += 1
        name, fault = self._chance.choice(self._chance.choice((self._network, self._others))())
        with traffic(self._dsn, self.counts.rounds) as writing:
            writing.wait_for_more(_TRANSACTIONS // 2)
            self._shifting.take_steps(_STEPS)
            if name != _CRASH:
                fault()
            writing.wait_for_more(_TRANSACTIONS // 2)
        if name == _CRASH:
            fault()
        self.counts.transactions += writing.committed + _STEPS
        self.counts.faults[name] += 1
        self._wait_for_new_point(name)
        self.counts.largest_mib = max(self.counts.largest_mib, self._app.resident_mib())
        self._resnapshot_errored()
        self._check_sums()
        if self.counts.rounds % _ROUNDS_PER_VERIFY == 0:
            self._verify()

    def _wait_for_new_point(self, what: str) -> None:
        """Insert a row into each table that DDL changes, and wait for a consistent point after that."""
        before = self._app.newest_point()
        self._shifting.insert_new()
        self._app.wait_for_point_above(before, what)

    def _network(self) -> list[Fault]:
        def through(link: Link, fault: str) -> Callable[[], None]:
            def suffer() -> None:
                with link.suffering(fault):
                    time.sleep(self._chance.uniform(1, 15))

            return suffer

        return [
            (f"{fault} of {name}", through(link, fault))
            for name, link in self._links.items()
            for fault in FAULTS
        ]

    def _others(self) -> list[Fault]:
        return [
            ("kill of the app", lambda: self._restart(signal.SIGKILL)),
            ("stop of the app", lambda: self._restart(signal.SIGTERM)),
            ("pause of the app", lambda: self._app.sleep(self._chance.uniform(1, 20))),
            (_CRASH, self._crash),
        ]

    def _restart(self, number: int) -> None:
        self._app.end(number)
        self._app.start()

    def _crash(self) -> None:
        self._server.stop(immediate=True)
        time.sleep(self._chance.uniform(0, 5))
        self._server.start()

    def _resnapshot_errored(self) -> None:
        """Resnapshot errored tables. Raises SoakError for one whose changes can all be followed."""
        errored = {name: one for name, one in self._states().items() if one.state is TableState.ERRORED}
        shifting = {table.sql: table for table in self._shifting.tables}
        for name, record in errored.items():
            table = shifting.get(name)
            if table is None or table.following is Following.SURELY:
                raise SoakError(f"{name} is errored: {record.reason}; {'' if table is None else table.said}")
            self.counts.errored[record.error] += 1
            # A table that lost its key cannot be taken without.
            execute(self._dsn, f"alter table {name} replica identity full")
            self._run("snapshot", "--tables", name)
            table.forget_ddl()

    def _check_sums(self) -> None:
        """Check the sums at the newest points that have all three tables."""
        root = self._pipeline.pipeline.lake_root
        points = [one for one in ConsistentPoints(root).all() if set(TABLES) <= set(one.tables)]
        if not points:
            raise SoakError("no consistent point has all tables")
        for point in points[-_POINTS_PER_ROUND:]:
            (found,) = ArrowView(point, root).sql(SUMS).to_pylist()
            self._checked.add(point.order)
            if found != WHOLE:
                raise SoakError(f"transactions are torn at point {point.order}: {found}")
        self.counts.points = len(self._checked)

    def _verify(self, *arguments: str) -> None:
        """Verify all tables while the app runs. Raises SoakError unless all of them are equal.

        Before, each table gets a row, and the catalog is checked: DDL without a row is not seen otherwise.
        """
        self._wait_for_new_point("a row in each table")
        check_drift(Access(self._pipeline.pipeline, self._dsn, self._dsn))
        settled = (TableState.STREAMING, TableState.ERRORED)
        for _ in range(_TRIES):
            self._resnapshot_errored()
            wait_until(
                lambda: self._app.is_continuing() and self._all_are(*settled), what="all tables to stream"
            )
            if self._all_are(TableState.STREAMING):
                self._run("verify", *arguments)
                self.counts.verified += 1
                return
        raise SoakError(f"tables are errored again after {_TRIES} snapshots: {self._states()}")

    def _all_are(self, *states: TableState) -> bool:
        return all(record.state in states for record in self._states().values())

    def _run(self, app: str, *arguments: str) -> None:
        """Run an app to its end, again while its exit code says that this may help."""

        def is_done() -> bool:
            code = self._pipeline.run(app, *arguments)
            if code not in (0, RETRY_MAY_HELP):
                raise SoakError(
                    f"{app} {' '.join(arguments)} ended with {code}:\n{self._pipeline.log_tail()}"
                )
            return code == 0

        wait_until(is_done, what=f"{app} to succeed")

    def _states(self) -> dict[str, TableRecord]:
        with StateDatabase(self._dsn, "soak") as state_db:
            return {str(name): one for name, one in state_db.read_tables("soak").items()}


def report(counts: Counts, seed: int, hours: float, outcome: str) -> str:
    """Return the report in Markdown."""

    def listed(found: Counter[str] | Counter[int]) -> str:
        return ", ".join(f"{name}: {count:,}" for name, count in sorted(found.items())) or "none"

    network = Counter(
        {name: count for name, count in counts.faults.items() if name.partition(" of ")[0] in FAULTS}
    )
    rows = {
        "result": outcome,
        "time": f"{hours:.1f} h, seed {seed}",
        "transactions": f"{counts.transactions:,} in {counts.rounds:,} rounds, each with one fault",
        "faults of the network": listed(network),
        "other faults": listed(counts.faults - network),
        "ends of the app by exit code": listed(counts.exits),
        "tables that stopped, and were resnapshotted": listed(counts.errored),
        "points whose sums were checked": f"{counts.points:,}",
        "runs of `verify` that found every table equal": f"{counts.verified:,}",
        "largest resident memory of the app's processes": f"{counts.largest_mib:,} MiB",
    }
    return "\n".join(("| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items()), ""))


def main() -> int:
    """Run for the hours that the command line names, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--report", type=Path, help="a file for the report")
    arguments = parser.parse_args()
    if not PROGRAM.exists():
        parser.error("Toxiproxy is missing: sh setup/toxiproxy.sh")
    # So that servers and apps, which have sessions of their own, are ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder = Path(tempfile.mkdtemp(prefix="pgrepl-soak-"))
    folder.chmod(0o755)
    print(f"seed {arguments.seed}, folder {folder}", flush=True)
    began, counts, outcome = time.monotonic(), Counts(), "ended before its time"
    try:
        _run(folder, counts, random.Random(arguments.seed), began + arguments.hours * 3600)
        outcome = "equal"
    except Exception as error:
        outcome = f"FAILED: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        traceback.print_exc()
    finally:
        text = report(counts, arguments.seed, (time.monotonic() - began) / 3600, outcome)
        print(text)
        if arguments.report is not None:
            arguments.report.write_text(text)
    if outcome != "equal":
        print(f"the lake, the log and the server's data are in {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


def _run(folder: Path, counts: Counts, chance: random.Random, until: float) -> None:
    server = Server(folder / "postgresql", settings={"wal_sender_timeout": "20s"})
    try:
        server.create()
        server.start()
        with running_toxiproxy() as proxy:
            links = {"source": proxy.link("source", server.port)}
            Soak(server, links, folder, chance, counts).run(until)
    finally:
        server.stop(immediate=True)


if __name__ == "__main__":
    sys.exit(main())
