"""Consumer: one database's tables, from creek's streams into PostgreSQL, until it is stopped or caught up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import replace

from airflow_provider_pgrepl.errors import TargetError, TargetUnavailableError
from airflow_provider_pgrepl.replication.events.creek.client import CreekClient
from airflow_provider_pgrepl.replication.events.creek.consuming.copy_database import (
    Applied,
    CopyDatabase,
    TableFailedError,
)
from airflow_provider_pgrepl.replication.events.creek.consuming.kept_table import KeptStream, KeptTable
from airflow_provider_pgrepl.replication.events.creek.consuming.shape import TableShape
from airflow_provider_pgrepl.replication.events.creek.messages import Row, WalChange
from airflow_provider_pgrepl.replication.events.creek.stored import StreamBounds
from airflow_provider_pgrepl.replication.events.creek.subjects import words_of
from airflow_provider_pgrepl.replication.names import TableName

log = logging.getLogger(__name__)

_ROWS = 2_000


class Consumer:
    """`tables`: of the database, each with the table in which it is kept; `is_over`: whether to end.

    A table of which nothing is kept yet, and each target in `anew`, is taken whole by a snapshot. One
    whose change PostgreSQL does not take stops alone; the next run begins with that change.
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
        self._kept: dict[TableName, KeptTable] = {}
        self._stream = KeptStream()
        self._shapes: dict[str, TableShape] = {}

    @property
    def failed(self) -> list[TableName]:
        """Targets that are not kept current."""
        return [*self._failed, *(table.target for table in self._kept.values() if table.error)]

    async def run(self, *, until_caught_up: bool) -> bool:
        """Whether it has caught up with what the stream held at the start.

        Raises TargetError where the stream does not hold what comes next, and what client and copy raise.
        """
        self._stream, known = await asyncio.to_thread(self._copy.read)
        self._kept = {
            source: table
            for source, table in known.items()
            if self._tables.get(source) == table.target and table.target not in self._anew
        }
        bounds = await self._creek.stream_bounds()
        begin = min(
            [self._stream.sequence, *(table.sequence for table in self._kept.values() if table.error)]
        )
        if self._kept:
            _check_holds(bounds, self._stream, begin)
        else:
            # Nothing is kept: what is in the stream is in the snapshots.
            begin = bounds.last
        self._stream = replace(self._stream, made=bounds.made, sequence=max(self._stream.sequence, begin))
        self._kept = {source: replace(table, error="") for source, table in self._kept.items()}
        await self._load_missing()
        return await self._follow(begin, bounds.last if until_caught_up else None)

    async def _load_missing(self) -> None:
        """One table that cannot be taken keeps no other waiting; none at all is an error of all."""
        for source in self._tables.keys() - self._kept.keys():
            try:
                self._kept[source] = await self._load(source)
            except (TableFailedError, TargetUnavailableError) as error:
                self._failed.append(self._tables[source])
                if len(self._failed) == len(self._tables):
                    raise
                log.error("%s", error)

    async def _load(self, source: TableName) -> KeptTable:
        snapshot = await self._creek.snapshot(source.schema, source.name)
        header, target = snapshot.header, self._tables[source]
        log.info("%s is taken whole, about %d rows, as of %s", target, header.approx_rows, header.lsn)
        loading = self._copy.loading(source, target, TableShape.parse(header.schema))
        with loading:
            rows: list[Row] = []
            async for row in snapshot:
                rows.append(row)
                if len(rows) >= _ROWS:
                    await asyncio.to_thread(loading.add, rows)
                    rows = []
            await asyncio.to_thread(loading.add, rows)
            return loading.finish(header, self._stream)

    async def _follow(self, begin: int, goal: int | None) -> bool:
        async for changes, sequence in self._creek.changes_after(begin):
            applied = [one async for one in self._wanted(changes)]
            if applied or sequence > self._stream.sequence:
                await self._apply(applied, sequence)
            if goal is not None and sequence >= goal:
                return True
            if self._is_over():
                return False
        return False

    async def _wanted(self, changes: Sequence[WalChange]) -> AsyncIterator[Applied]:
        for change in changes:
            source = TableName(change.schema, change.table)
            if source in self._kept and not self._kept[source].error:
                yield source, await self._shape(change), change

    async def _shape(self, change: WalChange) -> TableShape:
        if change.fingerprint not in self._shapes:
            words = words_of(str(TableName(change.schema, change.table)))
            text = await self._creek.schema_text(change.fingerprint, words)
            self._shapes[change.fingerprint] = TableShape.parse(text)
        return self._shapes[change.fingerprint]

    async def _apply(self, changes: list[Applied], sequence: int) -> None:
        stream = replace(self._stream, sequence=max(sequence, self._stream.sequence))
        while True:
            try:
                self._kept |= await asyncio.to_thread(self._copy.apply, self._kept, changes, stream)
            except TableFailedError as error:
                # Without it the others are applied.
                log.error("%s", error)
                begin = next(change.sequence for source, _, change in changes if source == error.source) - 1
                failed = replace(self._kept[error.source], error=error.message, sequence=begin)
                await asyncio.to_thread(self._copy.write_failed, failed)
                self._kept[error.source] = failed
                changes = [one for one in changes if one[0] != error.source]
            else:
                self._stream = stream
                return


def _check_holds(bounds: StreamBounds, kept: KeptStream, begin: int) -> None:
    """Raises TargetError where the stream is not the one that was read, or has dropped what comes next."""
    if bounds.made != kept.made or begin > bounds.last:
        why = "it was made anew since it was read"
    elif begin < bounds.first - 1:
        why = f"it begins with message {bounds.first} now, and {begin} was the last that was read"
    else:
        return
    raise TargetError(
        f"the stream of changes does not hold what comes next: {why}",
        "take all tables whole: --resnapshot all",
    )
