"""ChangeReader: a pipeline's changes from any place on, as far as they are durable."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from airflow_provider_pgrepl.errors import (
    ChangelogError,
    ConfigError,
    GapError,
    LakeUnavailableError,
    PgReplError,
    ValueRangeError,
)
from airflow_provider_pgrepl.replication.changelog.gaps import GAP, NO_RELATION
from airflow_provider_pgrepl.replication.changelog.layout import changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import (
    open_changelog,
    read_durable_lsn,
    read_epoch_number,
)
from airflow_provider_pgrepl.replication.choices import TableChoices
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.events.beginning import After, begin_after, check_kept
from airflow_provider_pgrepl.replication.events.change import Change
from airflow_provider_pgrepl.replication.events.known_relations import KnownRelations
from airflow_provider_pgrepl.replication.events.ordered_rows import ordered_rows
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.typed_changes import TypedChanges
from airflow_provider_pgrepl.replication.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.names import TableName


class ChangeReader:
    """What `stream` gives, without asyncio. Arguments and errors are those of `stream`.

    `position`: after all that was given and looked through. Whoever writes it down as text, and gives it as
    `after`, goes on there.
    """

    def __init__(
        self, lake: str | Path | Pipeline, tables: Collection[str] | None = None, *, after: After = None
    ) -> None:
        root = lake.lake_root if isinstance(lake, Pipeline) else str(lake)
        self._uri = changelog_uri(root)
        choices_of = lake.choices if isinstance(lake, Pipeline) else lambda _: TableChoices()
        with _unreadable():
            relations = KnownRelations(root)
            self._changes = TypedChanges(relations, choices_of, _wanted(tables, relations))
            self.position = begin_after(open_changelog(self._uri), after)
        self._changelog: DeltaTable | None = None
        self._rows: Iterator[pa.Table] = iter(())
        self._failed: PgReplError | None = None

    def read(self) -> Iterator[list[Change]]:
        """What there is after the position, some changes at a time."""
        while (changes := self.read_next()) is not None:
            yield changes

    def read_next(self) -> list[Change] | None:
        """The next changes, which may be none of the tables that are wanted; None: there is no more now."""
        if self._failed is not None:
            failed, self._failed = self._failed, None
            self._changelog = None
            raise failed
        try:
            with _unreadable():
                if self._changelog is None:
                    self._changelog = open_changelog(self._uri)
                    check_kept(self._changelog, self.position)
                    self._rows = ordered_rows(self._changelog, self.position)
                rows = next(self._rows, None)
                if rows is not None:
                    return self._take(rows)
                self._end(self._changelog)
        except BaseException:
            # What was being read is not read to its end: the next time begins after the position again.
            self._changelog = None
            raise
        return None

    def _take(self, rows: pa.Table) -> list[Change]:
        gap = self._gap(rows)
        before = rows if gap is None else rows.filter(pc.less(rows["commit_lsn"], int(gap)))
        try:
            changes = self._changes.of(before)
        except ValueRangeError:
            before, changes = self._before_the_fault(before)
        if gap is not None and self._failed is None:
            self._failed = _gap_error(EventPosition.after_transaction(self.position.epoch, gap))
        if before.num_rows:
            self.position = _last_position(before)
        return changes

    def _gap(self, rows: pa.Table) -> LSN | None:
        """The first skipped transaction that may have changed a table that is wanted."""
        gaps = rows.filter(pc.equal(rows["op"], GAP)).select(["commit_lsn", "relation_id"]).to_pylist()
        lsns = [
            row["commit_lsn"]
            for row in gaps
            if self._changes.wanted is None
            or (row["relation_id"] != NO_RELATION and self._changes.is_of_wanted(row["relation_id"]))
        ]
        return LSN(min(lsns)) if lsns else None

    def _before_the_fault(self, rows: pa.Table) -> tuple[pa.Table, list[Change]]:
        """Those before the first whose value cannot be held, which is raised next."""
        good, bad = 0, rows.num_rows
        while bad - good > 1:
            middle = (good + bad) // 2
            try:
                self._changes.of(rows.slice(0, middle))
            except ValueRangeError:
                bad = middle
            else:
                good = middle
        try:
            self._changes.of(rows.slice(good, 1))
        except ValueRangeError as error:
            place = _last_position(rows.slice(good, 1))
            self._failed = ValueRangeError(
                f"{error.message}, in the change {place}",
                "give the pipeline instead of its lake root, with the column in text_columns; or go on"
                f" without this change: after={str(place)!r}",
            )
        before = rows.slice(0, good)
        return before, self._changes.of(before)

    def _end(self, changelog: DeltaTable) -> None:
        """All that is durable has been read: a long wait shall not outlive what is kept."""
        self._changelog = None
        newest = read_epoch_number(changelog)
        if newest > self.position.epoch:
            raise ChangelogError(
                f"epoch {self.position.epoch} is over, the changelog is in epoch {newest}: what happened"
                " between them is in no changelog",
                "read the tables from the lake at a consistent point of the new epoch, then go on with after="
                " that point",
            )
        durable = LSN(max(0, read_durable_lsn(changelog) - 1))
        self.position = max(self.position, EventPosition.after_transaction(newest, durable))


def _gap_error(gap: EventPosition) -> GapError:
    return GapError(
        f"the transaction at {gap.commit_lsn}, which the server could not send, was skipped: no one has its"
        " changes",
        f"read the tables from the lake once they are resnapshotted, then go on with after={str(gap)!r}",
    )


def _wanted(tables: Collection[str] | None, relations: KnownRelations) -> frozenset[TableName] | None:
    if tables is None:
        return None
    try:
        wanted = frozenset(map(TableName.parse, tables))
    except ValueError as error:
        raise ConfigError(f"tables: {error}", "name a table as schema.name") from None
    if not wanted:
        raise ConfigError("tables: none is named", "name some, or give None for all")
    known = relations.names()
    if unknown := sorted(map(str, wanted - known)):
        raise ConfigError(
            f"tables: the changelog has never had {', '.join(unknown)}",
            f"it has had {', '.join(sorted(map(str, known))) or 'none'}; a table is known from its first"
            " change or snapshot on",
        )
    return wanted


def _last_position(rows: pa.Table) -> EventPosition:
    last = rows.slice(rows.num_rows - 1).select(["epoch", "commit_lsn", "ordinal"]).to_pylist()[0]
    return EventPosition(Epoch(last["epoch"]), LSN(last["commit_lsn"]), last["ordinal"])


@contextmanager
def _unreadable() -> Iterator[None]:
    """Whatever a storage, Delta, Parquet or DataFusion raises, without its text: that may hold values."""
    failed = ""
    try:
        yield
    except PgReplError:
        raise
    except Exception as error:  # noqa: BLE001 - DataFusion raises plain ones
        failed = type(error).__name__
    if failed:
        raise LakeUnavailableError(
            f"the changelog cannot be read: {failed}",
            "check the lake's storage; reading goes on where it stopped",
        )
