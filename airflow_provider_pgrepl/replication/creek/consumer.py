"""The consumer, which applies creek's streams of one database to tables in PostgreSQL."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import ConfigError, MessageError, TargetError, TargetUnavailableError
from airflow_provider_pgrepl.replication.events.targets.base import words_of
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.runtime.process_io import read_text

from .client import CreekClient, Snapshot, StreamBounds
from .copy_database import (
    UP_TO_DATE,
    Applied,
    AppliedStreamPosition,
    ConsumerTableState,
    CopyDatabase,
    OutgrownError,
    TableFailedError,
)
from .messages import Row, UnreadableChange, WalChange
from .table_shape import TableShape
from .wire import Version, Wire

log = logging.getLogger(__name__)

_Found = TypeVar("_Found")

_ROWS = 2_000
_TRIES, _PAUSE_S = 20, 1.5
_SNAPSHOTS, _AT_ONCE = 5, 4
_SNAPSHOT_S = 900.0
"""The time, in seconds, in which a publisher must send a snapshot's first row. It includes earlier
requests."""
_LOOK_S = 0.25
_AGAIN = "%s; it is taken whole again"
_TAKE_ALL = "take all tables whole: --resnapshot all"
_NAME = re.compile(r"[a-z0-9][a-z0-9_]{0,39}")
_KNOWN = ("name", "tables", "namespace", "wire")
_EXAMPLE = 'as {"name": "copy", "tables": {"shop.public.orders": "public.orders"}}'


class _TimeToEnd(Exception):  # noqa: N818 - nothing went wrong
    """The consumer was asked to stop before a table was loaded."""


@dataclass(frozen=True)
class _Asked:
    """A snapshot, with the columns of `shape`, that was requested from a publisher. `sequence`: the message
    up to which the table's changes are applied."""

    snapshot: asyncio.Future[Snapshot]
    shape: TableShape
    sequence: int
    tries_left: int


class Consumer:
    """A consumer of a database's changes. `tables`: the source tables, each with its target; `is_over`:
    returns True if the consumer must stop.

    A table without a record, and each target in `anew`, is loaded from a snapshot. If PostgreSQL rejects a
    table's change, only that table stops; the next run begins with that change.
    """

    def __init__(
        self,
        creek: CreekClient,
        copy: CopyDatabase,
        tables: Mapping[TableName, TableName],
        is_over: Callable[[], bool],
        anew: Collection[TableName] = (),
    ) -> None:
        self._creek, self._copy, self._tables, self._is_over = creek, copy, tables, is_over
        self._anew = set(anew)
        self._failed: list[TableName] = []
        self._kept: dict[TableName, ConsumerTableState] = {}
        self._stream = AppliedStreamPosition()
        self._shapes: dict[str, TableShape] = {}
        self._taken_again: set[tuple[TableName, TableShape]] = set()
        self._asked: dict[TableName, _Asked] = {}
        self._has_to_go_back = False
        self._loading = asyncio.Lock()

    @property
    def failed(self) -> list[TableName]:
        """Return the targets that are no longer kept current."""
        stopped = [one.target for one in self._kept.values() if one.error and one.source not in self._asked]
        return [*self._failed, *stopped]

    async def run(self, *, until_caught_up: bool) -> bool:
        """Apply changes until asked to stop. With `until_caught_up`, stop at the last message that the stream
        had at the start. Returns True if that message was reached.

        Raises TargetError if the stream lacks the next messages, and what the client and the copy raise.
        """
        self._stream, known = await asyncio.to_thread(self._copy.read)
        self._kept = {
            source: table
            for source, table in known.items()
            if self._tables.get(source) == table.target and table.target not in self._anew
        }
        await asyncio.to_thread(self._copy.keep_only, self._kept.keys())
        bounds = await self._creek.stream_bounds()
        self._begin(bounds)
        try:
            await self._load_missing()
            while True:
                self._has_to_go_back = False
                reached = await self._follow(bounds.newest if until_caught_up else None)
                if not self._has_to_go_back:
                    return reached
        except _TimeToEnd:
            return False
        finally:
            for asked in self._asked.values():
                asked.snapshot.cancel()

    def _begin(self, bounds: StreamBounds) -> None:
        """Set the position in the stream. Raises TargetError if the stream lacks the next messages. If it
        lacks only those of a table that is behind, that table stops."""
        if not self._kept:
            self._stream = AppliedStreamPosition(bounds.made, bounds.last)
            return
        if why := _why_not_held(bounds, self._stream, self._stream.sequence):
            raise TargetError(f"the stream of changes does not hold what comes next: {why}", _TAKE_ALL)
        for source, table in self._kept.items():
            if not table.is_behind:
                continue
            if why := _why_not_held(bounds, self._stream, table.sequence):
                log.error("%s missed changes that the stream does not hold any more: %s", table.target, why)
                self._kept[source] = replace(table, error=table.error or why)
            else:
                # The table's position stays recorded until it has caught up with the others.
                self._kept[source] = replace(table, error="")

    async def _load_missing(self) -> None:
        """Load the tables that have no record, several at once, because each waits for its publisher. A table
        that cannot be loaded does not stop the others. If every table fails, raises the last error."""
        turns, refused = asyncio.Semaphore(_AT_ONCE), list[Exception]()

        async def take(source: TableName) -> None:
            async with turns:
                try:
                    self._kept[source] = await self._take_whole(source)
                except (TableFailedError, TargetUnavailableError, MessageError) as error:
                    self._failed.append(self._tables[source])
                    refused.append(error)
                    log.error("%s", error)

        try:
            async with asyncio.TaskGroup() as group:
                for source in sorted(self._tables.keys() - self._kept.keys()):
                    group.create_task(take(source))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        if refused and len(self._failed) == len(self._tables):
            raise refused[-1]

    async def _snapshot(self, source: TableName) -> Snapshot:
        log.info("asking for all rows of %s", source)
        return await self._unless_over(self._creek.snapshot(source.schema, source.name, _SNAPSHOT_S))

    async def _take_whole(self, source: TableName) -> ConsumerTableState:
        """Load a table from a snapshot, and from another one if the snapshot has no end because its publisher
        died."""
        for _ in range(_SNAPSHOTS):
            snapshot = await self._snapshot(source)
            try:
                # The connection to the copy has one transaction at a time.
                async with self._loading:
                    return await self._load(source, snapshot)
            except TargetUnavailableError as error:
                unavailable = error
                log.warning(_AGAIN, error.message)
        raise unavailable

    async def _load(
        self, source: TableName, snapshot: Snapshot, held_at: int | None = None
    ) -> ConsumerTableState:
        """Replace the rows of a table by a snapshot. `held_at`: the message up to which the table was applied
        while others continued. All messages after it are read again: the clocks of the publisher and of NATS,
        by which a snapshot's position is found, may differ."""
        header, target = snapshot.header, self._tables[source]
        # The snapshot may be older than the messages that were read: it is as of the publisher's recorded
        # progress.
        before = await self._unless_over(self._creek.sequence_before(header.at))
        place = min((one for one in (before, held_at) if one is not None), default=UP_TO_DATE)
        if place >= self._stream.sequence:
            place = UP_TO_DATE
        log.info("%s is taken whole, about %d rows, as of %s", target, header.approx_rows, header.lsn)
        shape = TableShape.parse(header.schema)
        with self._copy.loading(source, target, shape, self._stream) as loading:
            while rows := await self._unless_over(_some(snapshot)):
                await asyncio.to_thread(loading.add, rows)
            return loading.finish(header, self._stream, place)

    async def _unless_over(self, work: Coroutine[Any, Any, _Found]) -> _Found:
        """Wait without a time limit for what others send. Raises _TimeToEnd if the consumer must stop."""
        waiting = asyncio.ensure_future(work)
        try:
            while not waiting.done():
                if self._is_over():
                    raise _TimeToEnd
                await asyncio.wait([waiting], timeout=_LOOK_S)
            return waiting.result()
        finally:
            waiting.cancel()

    async def _follow(self, goal: int | None) -> bool:
        behind = [table.sequence for table in self._kept.values() if table.is_behind and not table.error]
        begin = min([self._stream.sequence, *behind])
        words = {words_of(str(source)) for source in self._kept}
        async for changes, sequence in self._creek.changes_after(begin, words.__contains__):
            applied = await self._wanted(changes)
            if applied or sequence > self._stream.sequence or self._has_come_up(sequence):
                await self._apply(applied, sequence)
            await self._take_asked()
            if goal is not None and sequence >= goal and not self._has_to_go_back and not self._asked:
                return True
            if self._has_to_go_back or self._is_over():
                return False
        return False

    def _has_come_up(self, sequence: int) -> bool:
        """Return True if a table that was behind has caught up with the others."""
        return sequence >= self._stream.sequence and any(
            table.is_behind and not table.error for table in self._kept.values()
        )

    async def _wanted(self, changes: Sequence[WalChange | UnreadableChange]) -> list[Applied]:
        """Return the changes of tables that are kept current. If a change cannot be read, its table stops
        before the first of `changes`, and none of its changes is returned."""
        sources = {words_of(str(source)): source for source in self._kept}
        found: list[Applied] = []
        for change in changes:
            source = sources.get(change.words)
            if source is None or self._kept[source].error:
                continue
            if isinstance(change, WalChange):
                found.append((source, await self._shape(change), change))
            else:
                await self._fail(source, change.reason, changes[0].sequence - 1)
        return [one for one in found if not self._kept[one[0]].error]

    async def _fail(self, source: TableName, reason: str, sequence: int) -> None:
        """Stop applying changes to a table, and record the reason and the sequence of the last message
        applied."""
        log.error("the copy of %s is stopped: %s", self._tables[source], reason)
        await self._hold(source, reason, sequence)

    async def _hold(self, source: TableName, reason: str, sequence: int) -> None:
        failed = replace(self._kept[source], error=reason, sequence=sequence)
        await asyncio.to_thread(self._copy.write_failed, failed)
        self._kept[source] = failed

    async def _shape(self, change: WalChange) -> TableShape:
        if change.fingerprint not in self._shapes:
            text = await self._creek.schema_text(change.fingerprint, change.words)
            self._shapes[change.fingerprint] = TableShape.parse(text)
        return self._shapes[change.fingerprint]

    async def _apply(self, changes: list[Applied], sequence: int) -> None:
        stream = replace(self._stream, sequence=max(sequence, self._stream.sequence))
        while True:
            try:
                self._kept |= await asyncio.to_thread(self._copy.apply, self._kept, changes, sequence, stream)
            except OutgrownError as error:
                await self._ask_again(error, changes[0][2].sequence - 1)
                changes = [one for one in changes if one[0] != error.source]
            except TableFailedError as error:
                # Apply the changes of the other tables without this one.
                await self._fail(error.source, f"{error.message}; {error.hint}", changes[0][2].sequence - 1)
                changes = [one for one in changes if one[0] != error.source]
            else:
                self._stream = stream
                return

    async def _ask_again(self, outgrown: OutgrownError, sequence: int) -> None:
        """Request a snapshot of a table that got a column: no message has the column's values in older rows.

        The other tables continue until a publisher sends the snapshot. If the run ends before, the table
        keeps its position. If a snapshot was already requested for these columns, the table stops.
        """
        source = outgrown.source
        if (source, outgrown.shape) in self._taken_again:
            await self._fail(source, f"{outgrown.message}; {outgrown.hint}", sequence)
            return
        self._taken_again.add((source, outgrown.shape))
        log.info("%s", outgrown.message)
        await self._hold(source, outgrown.message, sequence)
        self._ask(source, outgrown.shape, sequence, _SNAPSHOTS)

    def _ask(self, source: TableName, shape: TableShape, sequence: int, tries: int) -> None:
        snapshot = asyncio.ensure_future(self._snapshot_with(source, shape))
        self._asked[source] = _Asked(snapshot, shape, sequence, tries - 1)

    async def _take_asked(self) -> None:
        """Load the snapshots that a publisher has begun to send."""
        for source, asked in list(self._asked.items()):
            if not asked.snapshot.done():
                continue
            del self._asked[source]
            try:
                table = await self._load(source, asked.snapshot.result(), asked.sequence)
            except _TimeToEnd:
                self._asked[source] = asked
                raise
            except TargetUnavailableError as error:
                if asked.tries_left:
                    log.warning(_AGAIN, error.message)
                    self._ask(source, asked.shape, asked.sequence, asked.tries_left)
                else:
                    await self._fail(source, f"{error.message}; {error.hint}", asked.sequence)
            except TargetError as error:
                await self._fail(source, f"{error.message}; {error.hint}", asked.sequence)
            else:
                # Read the messages since the snapshot again.
                self._kept[source] = table
                self._has_to_go_back |= table.is_behind

    async def _snapshot_with(self, source: TableName, shape: TableShape) -> Snapshot:
        """Return a snapshot that has the columns of `shape`, or the last of several attempts. A snapshot is
        as of the publisher's recorded progress, which is slightly behind the published changes."""
        for _ in range(_TRIES):
            snapshot = await self._snapshot(source)
            held = {column.name for column in TableShape.parse(snapshot.header.schema).columns}
            if all(column.name in held for column in shape.columns):
                return snapshot
            await asyncio.sleep(_PAUSE_S)
        return await self._snapshot(source)


async def _some(snapshot: Snapshot) -> list[Row]:
    """Return the next rows; none at the end."""
    rows: list[Row] = []
    async for row in snapshot:
        rows.append(row)
        if len(rows) >= _ROWS:
            break
    return rows


def _why_not_held(bounds: StreamBounds, kept: AppliedStreamPosition, sequence: int) -> str:
    """Return "" if the stream is the one that was read and has all messages after `sequence`; otherwise the
    reason."""
    if bounds.made != kept.made or sequence > bounds.last:
        return "the stream was recreated since it was read"
    if sequence < bounds.first - 1:
        return f"the stream now begins with message {bounds.first}, and message {sequence} was read last"
    return ""


@dataclass(frozen=True)
class ConsumerSettings:
    """The settings of a consumer. `tables`: the source tables and their targets, by the name that the
    publisher gives the database."""

    name: str
    tables: Mapping[str, Mapping[TableName, TableName]]
    namespace: str = "CREEK"
    wire: Version = "v2"

    @classmethod
    def read(cls, file: str | Path) -> ConsumerSettings:
        """Read the settings from a JSON file. Raises ConfigError, which names the field."""
        text = read_text("consumer file", file)
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"the consumer file {file} is not JSON: {error}", _EXAMPLE) from None
        return cls.of(given)

    @classmethod
    def of(cls, given: Any) -> ConsumerSettings:
        """Check the settings. Raises ConfigError, which names the field."""
        if not isinstance(given, dict):
            raise ConfigError("the consumer file must be a JSON object", _EXAMPLE)
        if unknown := sorted(set(given) - set(_KNOWN)):
            raise ConfigError(
                f"unknown key {', '.join(map(repr, unknown))}", errors.known_keys(unknown, _KNOWN)
            )
        name, namespace, wire = given.get("name"), given.get("namespace", "CREEK"), given.get("wire", "v2")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError("name: must be of a-z, 0-9 and _, at most 40 of them, and not begin with _")
        if wire not in get_args(Version):
            raise ConfigError(f"wire: {wire!r} must be one of {', '.join(map(repr, get_args(Version)))}")
        if not isinstance(namespace, str) or not namespace:
            raise ConfigError(f"namespace: {namespace!r} must be a string that is not empty")
        tables = given.get("tables")
        if not isinstance(tables, dict) or not tables:
            raise ConfigError("tables: must be an object that names a table at least", _EXAMPLE)
        return cls(name, _parsed(tables), namespace, wire)

    def stream(self, database: str) -> Wire:
        """Return the wire of a database."""
        return Wire(self.namespace, database, self.wire)


def _parsed(tables: Mapping[str, Any]) -> dict[str, dict[TableName, TableName]]:
    found: dict[str, dict[TableName, TableName]] = {}
    taken: set[TableName] = set()
    for source, target in tables.items():
        database, dot, rest = source.partition(".")
        try:
            into, of = TableName.parse(target), TableName.parse(rest)
        except (ValueError, TypeError, AttributeError):
            raise ConfigError(
                f"tables: {source!r}: {target!r} names no tables",
                "name the source as database.schema.table, and the target as schema.table",
            ) from None
        if not database or not dot or into in taken:
            raise ConfigError(
                f"tables: {source!r}: {target!r} names no database, or a target that another has",
                "each source has a target of its own",
            )
        taken.add(into)
        found.setdefault(database, {})[of] = into
    return found
