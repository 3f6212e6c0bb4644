"""The steps of the demo: prepare, start, snapshot, replicate, watch, compare, stay up, end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from demo import preconditions, processes
from demo.airflow import Airflow, connection
from demo.comparison import compare
from demo.errors import DemoError
from demo.folder import Folder
from demo.lake import Lake
from demo.options import Options
from demo.postgres import Server
from demo.replication import PUBLISH_DAG, REPLICATE_DAG, Replication
from demo.s3_lake import CONN_ID, S3Lake
from demo.status import Status
from demo.traffic import DATABASE, KEYLESS_TABLES, REPLICATOR, TABLES, Traffic

if TYPE_CHECKING:
    from demo.events import Events

STATUS_EVERY_S = 3.0
WAIT_S = 600.0


class Show:
    """A run of the demo. `equal`: the result of the comparison, or None before it."""

    def __init__(self, options: Options, folder: Folder) -> None:
        self.equal: bool | None = None
        self._options = options
        self._folder = folder
        self._began = time.monotonic()
        self._events: Events | None = None

    def run(self) -> None:
        """Run the demo to its end. Raises DemoError. All started processes are ended in either case."""
        self._prepare()
        try:
            self._start()
            self._replication.snapshot()
            self._begin()
            self._watch()
            self._conclude()
            if not self._options.exit_when_done:
                self._stay_up()
        finally:
            self._end()

    def _prepare(self) -> None:
        folder, options = self._folder, self._options
        folder.claim()
        processes.adopt_orphans(folder.root)
        if left := processes.end_leftovers(folder.root):
            self._say(f"ended {left} processes that an earlier demo left behind")
        preconditions.check(options, folder.root)
        folder.clear()
        os.environ["TMPDIR"] = str(folder.temporary)
        # Reserve the server's port before the broker chooses free ports.
        self._server = Server(folder.postgres, port=options.pg_port)
        publishers: dict[str, Any] = {}
        if options.events:
            self._events = _events_of(options.events, folder)
            publishers = self._events.publishers
        self._state_db = S3Lake(folder) if options.lake else None
        pipeline = Pipeline(
            name="bench",
            tables=TABLES,
            insert_only=KEYLESS_TABLES,
            lake=self._state_db.uri if self._state_db else str(folder.lake),
            lake_conn_id=CONN_ID if self._state_db else None,
            publishers=publishers,
        )
        self._lake_root = pipeline.lake
        folder.pipeline.write_text(pipeline.to_json())
        self._lake = Lake(pipeline)
        self._status = Status(self._server.dsn(DATABASE, REPLICATOR), pipeline, self._lake)
        self._traffic = Traffic(
            self._server, folder.logs / "pgbench.log", rate=options.rate, clients=options.clients
        )
        self._airflow = Airflow(folder, options.airflow_port, self._variables())
        self._replication = Replication(self._airflow, self._say)

    def _variables(self) -> dict[str, str]:
        return {
            "PGREPL_PIPELINE_FILE": str(self._folder.pipeline),
            "PGREPL_JARS": os.environ["PGREPL_JARS"],
            "AIRFLOW_CONN_PGREPL_DEFAULT": connection(
                "pgrepl", host="127.0.0.1", port=self._server.port, login=REPLICATOR, schema=DATABASE
            ),
            **(self._events.variables if self._events else {}),
            **(self._state_db.variables if self._state_db else {}),
        }

    def _start(self) -> None:
        self._say(f"PostgreSQL 18 on port {self._server.port}, wal_level=logical")
        try:
            self._server.create()
            self._server.start()
        except (RuntimeError, OSError) as error:
            raise DemoError(f"PostgreSQL did not start: {error}") from None
        if self._state_db is not None:
            self._say(self._state_db.start())
        if self._events is not None:
            self._say(self._events.start())
        self._say(f"Airflow starts; it will be at {self._airflow.url}")
        self._airflow.start()
        scale, rate = self._options.scale, self._options.rate
        self._say(f"pgbench -i -s {scale}: {scale * 100_000:,} accounts")
        self._traffic.initialise(scale)
        self._traffic.start()
        self._say(f"traffic: {rate} TPC-B transactions a second, each over four tables")

    def _begin(self) -> None:
        self._replication.begin(REPLICATE_DAG)
        if self._events is not None:
            self._replication.begin(PUBLISH_DAG)

    def _watch(self) -> None:
        """Replicate under traffic for `duration_s` seconds. Check the newest point every 3 s."""
        self._wait_for("a first consistent point", lambda: self._lake.check_balance() is not None)
        until = time.monotonic() + self._options.duration_s
        while time.monotonic() < until:
            self._look()
            time.sleep(STATUS_EVERY_S)

    def _wait_for(self, what: str, is_so: Callable[[], bool]) -> float:
        """Wait until `is_so` returns True, and print status lines. Return the seconds that it took.

        Raises DemoError after 600 s.
        """
        began = last_line = time.monotonic()
        while not is_so():
            if time.monotonic() - began > WAIT_S:
                raise DemoError(f"Waited {WAIT_S:.0f} s for {what}. Look at {self._airflow.url}")
            if time.monotonic() - last_line > STATUS_EVERY_S:
                last_line = time.monotonic()
                self._look()
            time.sleep(0.2)
        return time.monotonic() - began

    def _look(self) -> None:
        """Check all processes and the newest consistent point, and print a status line. Raises DemoError."""
        self._airflow.check_alive()
        self._traffic.check_alive()
        self._replication.check()
        self._say(self._line())

    def _line(self) -> str:
        line = self._status.line()
        return line if self._events is None else f"{line} | {self._events.line()}"

    def _conclude(self) -> None:
        self._traffic.stop()
        self._say("traffic stopped; waiting until the lake has caught up")
        last_lsn = self._status.mark_end()
        waited = self._wait_for(f"the lake to be at {last_lsn}", lambda: self._lake.has_reached(last_lsn))
        self._say(f"caught up after {waited:.1f} s; comparing every row of every table")
        differences = 0
        for table in TABLES:
            result = compare(self._server.dsn(DATABASE), self._lake, table)
            self._say(f"  {result}")
            differences += result.differences
        self.equal = differences + self._differing_events(last_lsn) == 0
        self._report()

    def _differing_events(self, last_lsn: LSN) -> int:
        """Return the number of rows rebuilt from events that differ from the source."""
        events, differences = self._events, 0
        if events is None:
            return 0
        self._wait_for(f"an event from after {last_lsn}", lambda: events.has_reached(last_lsn))
        for sentence, different in events.compare(self._server.dsn(DATABASE)):
            self._say(f"  {sentence}")
            differences += different
        return differences

    def _report(self) -> None:
        dsn = self._server.dsn(DATABASE)
        print(
            "\n"
            + ("EQUAL: every row of every table" if self.equal else "NOT EQUAL: see above")
            + f"\n\n  Airflow      {self._airflow.url}"
            + f"\n  PostgreSQL   {self._server.bin / 'psql'} '{dsn}'"
            + f"\n  lake         {self._lake_root}"
            + f"\n  logs         {self._folder.logs}\n",
            flush=True,
        )

    def _stay_up(self) -> None:
        self._say("replication goes on: change something and see it arrive; Ctrl-C ends everything")
        shown = None
        while True:
            self._airflow.check_alive()
            self._replication.check()
            balance = self._lake.check_balance()
            seen = balance and (balance.rows, balance.total)
            if seen != shown:
                self._say(self._line())
            shown = seen
            time.sleep(1.0)

    def _end(self) -> None:
        self._say("ending everything")
        self._traffic.stop()
        self._replication.end()
        if self._events is not None:
            self._events.stop()
        processes.end_descendants(spare=self._server.pid)
        if self._state_db is not None:
            self._state_db.stop()
        self._server.stop()
        processes.end_descendants()

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:5.0f} s] {text}", flush=True)


def _events_of(broker: str, folder: Folder) -> Events:
    """Return the events of a broker. Imports only the client of that broker."""
    if broker == "nats":
        from demo.nats_events import NatsEvents

        return NatsEvents(folder.broker)
    if broker == "kafka":
        from demo.kafka_events import KafkaEvents

        return KafkaEvents(folder.broker)
    from demo.rabbitmq_events import RabbitMQEvents

    return RabbitMQEvents(folder.broker)
