"""The consuming app: keeps copies of tables of other databases, from what their publishers send to NATS."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
from contextlib import closing
from typing import TYPE_CHECKING

from airflow_provider_pgrepl.errors import ConfigError, ToolError
from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.process import StopSignal
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.trace import log_unexpected

if TYPE_CHECKING:
    from airflow_provider_pgrepl.replication.creek.consumer import Consumer, ConsumerSettings

log = logging.getLogger(__name__)

CONSUMER_DSN_VARIABLE = "PGREPL_CONSUMER_DSN"
_ALL = "all"


def run(arguments: argparse.Namespace) -> int:
    """Run until stopped or caught up, and return the exit code.

    Raises ConfigError, ToolError, TargetError, FencedError.
    """
    try:
        from airflow_provider_pgrepl.replication.creek.consumer import ConsumerSettings
    except ImportError:
        raise ToolError(
            "the client of NATS (nats-py) is missing", "pip install 'airflow-provider-pgrepl[nats]'"
        ) from None
    logging.getLogger("airflow_provider_pgrepl").setLevel(logging.INFO)
    logging.getLogger("nats").setLevel(logging.CRITICAL)
    settings = ConsumerSettings.read(arguments.file)
    to_resnapshot = _tables_to_resnapshot(settings, arguments.resnapshot)
    dsn = _variable(CONSUMER_DSN_VARIABLE, "DB_URI", "the connection string of the database with the copies")
    uri = _variable(process.TARGET_VARIABLE, "NATS_URI", "the URI of NATS, as nats://user:password@host:4222")
    with StopSignal() as stop:
        results = asyncio.run(
            _consume(settings, dsn, uri, stop, to_resnapshot, is_limited=bool(arguments.until))
        )
    failed = [one for consumer, _ in results for one in consumer.failed]
    for name in failed:
        log.error("the copy of %s is stopped", name)
    if arguments.until and not all(reached for _, reached in results):
        return process.RETRY_MAY_HELP
    return process.WILL_NOT_HELP if failed else process.DONE


async def _consume(
    settings: ConsumerSettings,
    dsn: str,
    uri: str,
    stop: StopSignal,
    to_resnapshot: set[TableName],
    *,
    is_limited: bool,
) -> list[tuple[Consumer, bool]]:
    """Consume each database in an asyncio task. If one fails, cancel all and raise its error.

    The app exits then, and whatever started it restarts it.
    """
    from airflow_provider_pgrepl.replication.creek.client import CreekClient
    from airflow_provider_pgrepl.replication.creek.consumer import Consumer
    from airflow_provider_pgrepl.replication.creek.copy_database import CopyDatabase

    async def consume(database: str) -> tuple[Consumer, bool]:
        with closing(CopyDatabase(dsn, settings.name, database)) as copy:
            async with CreekClient(uri, database, settings.namespace, settings.wire) as creek:
                consumer = Consumer(
                    creek, copy, settings.tables[database], lambda: stop.is_set, to_resnapshot
                )
                return consumer, await consumer.run(until_caught_up=is_limited)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(consume(database)) for database in settings.tables]
    except ExceptionGroup as errors:
        for error in errors.exceptions[1:]:
            log_unexpected(log, "consuming another database", error)
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _tables_to_resnapshot(settings: ConsumerSettings, given: list[str]) -> set[TableName]:
    """Return the target tables that are to be resnapshotted. Raises ConfigError."""
    known = {target for tables in settings.tables.values() for target in tables.values()}
    if given == [_ALL]:
        return known
    try:
        found = {TableName.parse(text) for text in given}
    except ValueError as error:
        raise ConfigError(f"--resnapshot: {error}") from None
    if unknown := sorted(map(str, found - known)):
        raise ConfigError(
            f"--resnapshot: {', '.join(unknown)}: the consumer's file does not name these target tables",
            f"name target tables of the consumer's file, or {_ALL}",
        )
    return found


def _variable(name: str, creeks: str, what: str) -> str:
    """Return an environment variable, or else creek's variable for the same.

    Raises ConfigError if none is set.
    """
    found = os.environ.get(name, "").strip() or os.environ.get(creeks, "").strip()
    if not found:
        raise ConfigError(f"{name} is not set", f"set it to {what}; it is never an argument")
    return found
