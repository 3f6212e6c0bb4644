"""Random traffic, DDL and faults for hours; then `verify` must find every table equal to its source.

    python -m tests.soak --hours 8                 the report is printed
    python -m tests.soak --hours 8 --report FILE   and written to a file, in Markdown
    python -m tests.soak --lake s3 --events nats   the lake is in an object store; a publisher and a
                                                   consumer maintain copies in another database

The servers, Toxiproxy and the apps run as processes of their own. In each round, sessions write to three
tables whose sums never change, and random transactions change rows and shapes of others. Meanwhile one fault
happens. Errored tables are resnapshotted afterwards, as an operator would. Exits with 1 if anything is lost.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import psycopg2.errors

from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.drift_check.check import check_drift
from airflow_provider_pgrepl.replication.app.process import (
    RETRY_MAY_HELP,
    STATE_DSN_VARIABLE,
    TARGET_VARIABLE,
)
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoints
from airflow_provider_pgrepl.replication.lake.read import ArrowView
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableRecord, TableState
from demo.nats import NatsServer
from demo.nats import program as nats_program
from demo.postgres import Server
from demo.server_process import ServerProcess
from demo.versitygw import PROGRAM as GATEWAY
from demo.versitygw import Gateway, environment_of
from tests.support.copied import rows, start_consumer
from tests.support.random_ddl import Following, ShiftingTables
from tests.support.replicated import Replicated, execute, wait_until
from tests.support.s3 import BUCKET, new_lake
from tests.support.supervised import Supervised
from tests.support.toxiproxy import FAULTS, PROGRAM, Link, running_toxiproxy
from tests.support.traffic import INSERT_ONLY, SETUP, SUMS, TABLES, WHOLE, traffic

_ROUNDS_PER_VERIFY = 10
_TRANSACTIONS = 40
_STEPS = 6
_POINTS_PER_ROUND = 5
_TRIES = 5
_CRASH = "crash of the server"
_COPY = "soak_copy"
_TARGETS = {table: f"copied.{table.partition('.')[2]}" for table in TABLES}
"""The consumer's tables, in the database _COPY, by those of the source."""
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
    copies: int = 0
    largest_mib: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    exits: dict[str, Counter[int]] = field(default_factory=dict)
    errored: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Surroundings:
    """The servers that the apps connect to, each through a link that can suffer faults.

    `lake`: its URI. `others`: the object store and the broker, if there are any, by their names.
    """

    folder: Path
    lake: str
    server: Server
    links: dict[str, Link]
    others: dict[str, ServerProcess]


class App(Supervised):
    """An app, whose processes can be stopped for a while and measured."""

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


class Consumer(App):
    """The consumer of the publisher's events, which maintains copies of tables in a database."""

    def __init__(self, pipeline: Replicated, file: Path, copy_dsn: str) -> None:
        self._file, self._copy_dsn = file, copy_dsn
        super().__init__(pipeline, "consume")

    def _started(self) -> subprocess.Popen[bytes]:
        return start_consumer(self._file, self._copy_dsn, self._pipeline.log)


class Soak:
    """A pipeline with its surroundings, and what happens to them."""

    def __init__(self, around: Surroundings, chance: random.Random, counts: Counts) -> None:
        self._around, self._chance, self.counts = around, chance, counts
        self._dsn = around.server.dsn()
        self._copy_dsn = around.server.dsn(_COPY)
        execute(self._dsn, *SETUP)
        self._shifting = ShiftingTables.make(self._dsn, chance)
        self._tables = (*TABLES, *self._shifting.names)
        self._pipeline = Replicated(
            around.links["source"].of(self._dsn),
            around.folder,
            self._tables,
            name="soak",
            lake=around.lake,
            insert_only=INSERT_ONLY,
            merge=chance.choice(("rewrite", "merge_on_read")),
        )
        if "broker" in around.others:
            event_tables = {"target": "nats", "database": "soak", "tables": TABLES}
            self._pipeline.configure(publishers={"events": event_tables})
        self._apps = dict[str, App]()
        self._checked = set[tuple[int, int]]()

    def run(self, until: float) -> None:
        """Go on until a time of `time.monotonic`, and verify at the end. Raises SoakError."""
        self._run("snapshot")
        with contextlib.ExitStack() as stack:
            self._app = self._start(stack, "app", lambda: App(self._pipeline))
            if "broker" in self._around.others:
                publish = ("publish", "--publisher", "events")
                self._start(stack, "publisher", lambda: App(self._pipeline, *publish))
                self._start(stack, "consumer", self._new_consumer)
            while time.monotonic() < until:
                self._take_round()
            for check in ("values", "text"):
                self._verify("--check", check)

    def _start(self, stack: contextlib.ExitStack, name: str, start: Callable[[], App]) -> App:
        app = self._apps[name] = start()
        stack.callback(app.end)
        self.counts.exits[name] = app.exits
        return app

    def _new_consumer(self) -> Consumer:
        execute(self._dsn, f"create database {_COPY}")
        execute(self._copy_dsn, "create schema copied")
        file = self._around.folder / "consumer.json"
        targets = {f"soak.{table}": target for table, target in _TARGETS.items()}
        file.write_text(json.dumps({"name": "copy", "tables": targets}))
        return Consumer(self._pipeline, file, self._copy_dsn)

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
        self._continue_apps()
        self._wait_for_new_point(name)
        resident = sum(app.resident_mib() for app in self._apps.values())
        self.counts.largest_mib = max(self.counts.largest_mib, resident)
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
            for name, link in self._around.links.items()
            for fault in FAULTS
        ]

    def _others(self) -> list[Fault]:
        def faults_of(name: str, app: App) -> list[Fault]:
            return [
                (f"kill of the {name}", lambda: app.restart(signal.SIGKILL)),
                (f"stop of the {name}", lambda: app.restart(signal.SIGTERM)),
                (f"pause of the {name}", lambda: app.sleep(self._chance.uniform(1, 20))),
            ]

        def crash(kill: Callable[[], None], start: Callable[[], None]) -> None:
            kill()
            time.sleep(self._chance.uniform(0, 5))
            start()

        apps = [fault for name, app in self._apps.items() for fault in faults_of(name, app)]
        others = [
            (f"crash of the {name}", partial(crash, one.kill, one.start))
            for name, one in self._around.others.items()
        ]
        server = self._around.server
        return [*apps, *others, (_CRASH, partial(crash, partial(server.stop, immediate=True), server.start))]

    def _resnapshot_errored(self) -> None:
        """Resnapshot errored tables. Raises SoakError for one whose changes can all be followed."""
        errored = {name: one for name, one in self._states().items() if one.state is TableState.ERRORED}
        shifting = {table.sql: table for table in self._shifting.tables}
        for name, record in errored.items():
            table = shifting.get(name)
            if table is None or table.following is Following.SURELY:
                raise SoakError(f"{name} is errored: {record.reason}; {'' if table is None else table.said}")
            print(f"{name} stopped: {record.error}: {record.reason}", flush=True)
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
                self._compare_copies()
                return
        raise SoakError(f"tables are errored again after {_TRIES} snapshots: {self._states()}")

    def _compare_copies(self) -> None:
        """Wait until the consumer's tables have the source's rows, which nothing changes meanwhile."""
        if "consumer" not in self._apps:
            return

        def are_equal() -> bool:
            self._continue_apps()
            # The consumer makes a table when it has loaded it.
            with contextlib.suppress(psycopg2.errors.UndefinedTable):
                return all(
                    rows(self._copy_dsn, target) == rows(self._dsn, table)
                    for table, target in _TARGETS.items()
                )
            return False

        wait_until(are_equal, what="the copies to equal the source")
        self.counts.copies += 1

    def _continue_apps(self) -> None:
        """Start apps again that have ended with the exit code for it."""
        for app in self._apps.values():
            app.is_continuing()

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

    # A row for the network of each link, and one for kills, stops, pauses and crashes each.
    faults = dict[str, Counter[str]]()
    for fault, count in counts.faults.items():
        kind, _, place = fault.partition(" of ")
        is_network = kind in FAULTS
        row = f"faults of the network: {place}" if is_network else f"{kind} of"
        faults.setdefault(row, Counter())[kind if is_network else place] += count
    rows = {
        "result": outcome,
        "time": f"{hours:.1f} h, seed {seed}",
        "transactions": f"{counts.transactions:,} in {counts.rounds:,} rounds, each with one fault",
        **{row: listed(faults[row]) for row in sorted(faults)},
        **{f"ends of the {name} by exit code": listed(exits) for name, exits in counts.exits.items()},
        "tables that stopped, and were resnapshotted": listed(counts.errored),
        "points whose sums were checked": f"{counts.points:,}",
        "runs of `verify` that found every table equal": f"{counts.verified:,}",
        "comparisons that found the consumer's copies equal": f"{counts.copies:,}",
        "largest resident memory of the apps' processes": f"{counts.largest_mib:,} MiB",
    }
    return "\n".join(("| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items()), ""))


def main() -> int:
    """Run for the hours that the command line names, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--report", type=Path, help="a file for the report")
    parser.add_argument("--lake", choices=("disk", "s3"), default="disk")
    parser.add_argument("--events", choices=("none", "nats"), default="none")
    arguments = parser.parse_args()
    if not PROGRAM.exists():
        parser.error("Toxiproxy is missing: sh setup/toxiproxy.sh")
    if arguments.lake == "s3" and not GATEWAY.exists():
        parser.error("versitygw is missing: sh setup/versitygw.sh")
    if arguments.events == "nats" and nats_program() is None:
        parser.error("NATS is missing: sh setup/nats.sh")
    # So that servers and apps, which have sessions of their own, are ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder = Path(tempfile.mkdtemp(prefix="pgrepl-soak-"))
    folder.chmod(0o755)
    print(f"seed {arguments.seed}, folder {folder}", flush=True)
    began, counts, outcome = time.monotonic(), Counts(), "ended before its time"
    try:
        with surroundings(folder, arguments.lake, arguments.events) as around:
            until = began + arguments.hours * 3600
            Soak(around, random.Random(arguments.seed), counts).run(until)
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


@contextlib.contextmanager
def surroundings(folder: Path, lake: str, events: str) -> Iterator[Surroundings]:
    """Start the servers and their links, and set the environment of the apps that use them.

    `lake`: `disk` or `s3`. `events`: `none` or `nats`.
    """
    with contextlib.ExitStack() as stack:
        server = Server(folder / "postgresql", settings={"wal_sender_timeout": "20s"})
        stack.callback(lambda: server.stop(immediate=True))
        server.create()
        server.start()
        proxy = stack.enter_context(running_toxiproxy())
        links = {name: proxy.link(name, server.port) for name in ("source", "state")}
        os.environ[STATE_DSN_VARIABLE] = links["state"].of(server.dsn())
        others, uri = dict[str, ServerProcess](), str(folder / "lake")
        if lake == "s3":
            gateway = others["store"] = Gateway(folder / "store")
            stack.callback(gateway.stop)
            gateway.start()
            gateway.make_bucket(BUCKET)
            links["store"], uri = proxy.link("store", gateway.port), new_lake()
            os.environ.update(environment_of(links["store"].port))
        if events == "nats":
            broker = others["broker"] = NatsServer(folder / "broker")
            stack.callback(broker.stop)
            broker.start()
            links["broker"] = proxy.link("broker", broker.port)
            os.environ[TARGET_VARIABLE] = f"nats://127.0.0.1:{links['broker'].port}"
        yield Surroundings(folder, uri, server, links, others)


if __name__ == "__main__":
    sys.exit(main())
