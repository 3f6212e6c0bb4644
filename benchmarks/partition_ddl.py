"""The cost of an application's DDL with the event trigger, by the number of partitions of the table."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from statistics import mean

from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.source.event_trigger import trigger
from benchmarks.figure import Figure
from benchmarks.source import Source, running_source

_PARTITIONS = (200, 2000)
_TIMES = 20
_WITHIN_MS = 40.0
"""The limit in ms for the trigger in one statement at 2,000 partitions, on docs/benchmarks.md's machine."""
_STATEMENTS = {
    "CREATE … PARTITION OF": "create table x_{0} partition of m for values from (1{0:05}) to (1{0:05} + 1)",
    "DETACH": "alter table m detach partition x_{0}",
    "ATTACH": "alter table m attach partition x_{0} for values from (1{0:05}) to (1{0:05} + 1)",
    "DROP of a partition": "drop table x_{0}",
    "ADD COLUMN of a published table": "alter table t add c_{0} int",
    "ADD COLUMN of another table": "alter table u add c_{0} int",
}


def run(_: Path, scale: float) -> Figure:
    """Measure the CPU time of the session with and without the trigger. Transactions are rolled back."""
    found = {count: _measure(max(1, int(count * scale))) for count in _PARTITIONS}
    most = found[_PARTITIONS[-1]]
    added = {name: with_ms - without_ms for name, (without_ms, with_ms) in most.items()}
    return Figure(
        f"DDL of a published table of {_PARTITIONS[-1]:,} partitions: what the event trigger adds",
        f"≤ {max(added.values()):.0f} ms a statement",
        "",
        "",
        f"≤ {_WITHIN_MS:g} ms",
        max(added.values()) <= _WITHIN_MS,
        {
            f"{count:,} partitions, {name}: ms without, with": [round(one, 1) for one in times]
            for count, by_name in found.items()
            for name, times in by_name.items()
        },
    )


def _measure(partitions: int) -> dict[str, tuple[float, float]]:
    with running_source() as source:
        source.execute(
            "create table m (id bigint primary key, a int, b text, c timestamptz, d numeric, e uuid)"
            " partition by range (id);"
            "create table t (id int primary key); create table u (id int primary key)"
        )
        for first in range(0, partitions, 500):
            parts = range(first, min(first + 500, partitions))
            source.execute(
                "; ".join(
                    f"create table m_{i} partition of m for values from ({i}) to ({i + 1})" for i in parts
                )
            )
        source.execute("create publication p for table m, t with (publish_via_partition_root)")
        without = _times(source)
        pipeline = Pipeline(
            name="ddl", lake="/lake", tables=("public.m", "public.t"), publication="p", event_trigger=True
        )
        with closing(connect(source.dsn, "benchmark")) as connection:
            trigger.install(connection, pipeline)
        return {name: (without[name], with_ms) for name, with_ms in _times(source).items()}


def _times(source: Source) -> dict[str, float]:
    """Return the milliseconds of each statement. A first round, which creates the plans, is not counted."""
    for _ in range(2):
        source.execute("begin")
        found = {
            name: mean(_cpu_ms(source, statement.format(number)) for number in range(_TIMES))
            for name, statement in _STATEMENTS.items()
        }
        source.execute("rollback")
    return found


def _cpu_ms(source: Source, statement: str) -> float:
    clock = Path(f"/proc/{source.connection.info.backend_pid}/schedstat")
    before = int(clock.read_text().split()[0])
    source.execute(statement)
    return (int(clock.read_text().split()[0]) - before) / 1e6
