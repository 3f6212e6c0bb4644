"""Reading a pipeline's changes in Python, one by one and in order, for who has the lake and no broker.

async for change in stream("/lake/shop", ["public.orders"], after=last_id):
    print(change.op, change.table, change.data)
    last_id = change.id
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.errors import ChangelogError, ConfigError, GapError
from airflow_provider_pgrepl.replication.changelog.gaps import GAP
from airflow_provider_pgrepl.replication.changelog.layout import changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import (
    open_changelog,
    read_durable_lsn,
    read_epoch_number,
)
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex, relations_uri
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.choices import TableChoices
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.events.beginning import After, begin_after, check_kept
from airflow_provider_pgrepl.replication.events.change import Change
from airflow_provider_pgrepl.replication.events.ordered_rows import ordered_rows
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.typed_changes import TypedChanges
from airflow_provider_pgrepl.replication.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.names import TableName


async def stream(
    lake: str | Pipeline,
    tables: Collection[str] | None = None,
    *,
    after: After = None,
    follow: bool = True,
    poll_s: float = 0.5,
) -> AsyncIterator[Change]:
    """The changes of a pipeline's tables (all of them when none are named), each once, in commit order.

    `lake`: its lake root; or the pipeline, whose choices of types then hold. `after`: where to begin: the id
    of the last change that was read; an LSN (a number, or as `0/16B3748`), after the transaction that
    committed there; a moment with a time zone, with the first transaction that committed later by the
    source's clock; None, with the oldest change that is kept. With `follow` it waits for what comes, and
    looks every `poll_s` seconds; else it ends.

    Raises ChangelogError when changes after `after` are gone, or when a new epoch has begun: what happened
    between two epochs is in no changelog, only in the lake. Raises GapError before a transaction that was
    skipped. Raises ValueRangeError for a value that its type here cannot hold, ConfigError,
    LakeUnavailableError.
    """
    reader = ChangeReader(lake, tables, after=after)
    while True:
        batches = reader.read()
        while (batch := await asyncio.to_thread(next, batches, None)) is not None:
            for change in batch:
                yield change
        if not follow:
            return
        await asyncio.sleep(poll_s)


class ChangeReader:
    """The same without asyncio: each `read` gives what has come since, and `position` says after what.

    Whoever writes `position` down as text, and gives it as `after`, goes on there.
    """

    def __init__(
        self, lake: str | Pipeline, tables: Collection[str] | None = None, *, after: After = None
    ) -> None:
        self._root = lake if isinstance(lake, str) else lake.lake_root
        self._index = RelationIndex(relations_uri(self._root))
        choices_of = (lambda _: TableChoices()) if isinstance(lake, str) else lake.choices
        self._changes = TypedChanges(self._find, choices_of, self._wanted(tables))
        self.position = begin_after(open_changelog(changelog_uri(self._root)), after)

    def read(self) -> Iterator[list[Change]]:
        """What there is after the position, a file of the changelog at a time; the position goes with it.

        Raises what `stream` does.
        """
        changelog = open_changelog(changelog_uri(self._root))
        newest = read_epoch_number(changelog)
        check_kept(changelog, self.position)
        for rows in ordered_rows(changelog, self.position):
            gap = pc.min(rows.filter(pc.equal(rows["op"], GAP))["commit_lsn"]).as_py()
            before = rows if gap is None else rows.filter(pc.less(rows["commit_lsn"], gap))
            if before.num_rows:
                changes = self._changes.of(before)
                self.position = _end(before)
                yield changes
            if gap is not None:
                raise GapError(
                    f"the transaction at {LSN(gap)}, which the server could not send, was skipped: no one"
                    " has its changes",
                    "read the tables from the lake once they are resnapshotted, then go on with"
                    f" after={str(LSN(gap))!r}",
                )
        if newest == self.position.epoch:
            # All that is durable has been read, so that a long wait cannot outlive what is kept.
            durable = EventPosition.after_transaction(newest, LSN(max(0, read_durable_lsn(changelog) - 1)))
            self.position = max(self.position, durable)
        else:
            raise ChangelogError(
                f"epoch {self.position.epoch} is over, the changelog is in epoch {newest}: what happened"
                " between them is in no changelog",
                "read the tables from the lake at a consistent point of the new epoch, then go on with after="
                " the LSN of that point",
            )

    def _find(self, version: int) -> RelationRecord | None:
        found = self._index.find_version(version)
        if found is None:
            # It may have come since the index was read.
            self._index = RelationIndex(relations_uri(self._root))
            found = self._index.find_version(version)
        return found

    def _wanted(self, tables: Collection[str] | None) -> frozenset[TableName] | None:
        if tables is None:
            return None
        try:
            wanted = frozenset(map(TableName.parse, tables))
        except ValueError as error:
            raise ConfigError(f"tables: {error}", "name a table as schema.name") from None
        known = {record.name for record in self._index.all() if record.standing is None}
        if unknown := sorted(map(str, wanted - known)):
            raise ConfigError(
                f"tables: the changelog has never had {', '.join(unknown)}",
                f"it has had {', '.join(sorted(map(str, known))) or 'none'}; a table is known from its first"
                " change or snapshot on",
            )
        return wanted


def _end(rows: pa.Table) -> EventPosition:
    """After the last of the rows."""
    last = rows.slice(rows.num_rows - 1).select(["epoch", "commit_lsn", "ordinal"]).to_pylist()[0]
    return EventPosition(Epoch(last["epoch"]), LSN(last["commit_lsn"]), last["ordinal"])
