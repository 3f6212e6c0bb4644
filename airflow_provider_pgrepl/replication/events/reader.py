"""Ordered reading of a pipeline's durable changes, from any position."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.errors import (
    ChangelogError,
    ChangelogFileGoneError,
    DriftError,
    GapError,
    LakeUnavailableError,
    PgReplError,
    TransformError,
    ValueRangeError,
)
from airflow_provider_pgrepl.replication.changelog.gaps import GAP, NO_RELATION
from airflow_provider_pgrepl.replication.changelog.layout import changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import (
    ChangelogFile,
    ChangelogTail,
    live_files,
    open_changelog,
    read_durable_lsn,
    read_epoch_number,
)
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.publisher_sections import Unchanged
from airflow_provider_pgrepl.replication.settings.tables import TableOptions
from airflow_provider_pgrepl.trace import log_unexpected, traced

from .changelog_rows import FollowedChangelog, RowBatch, ordered_rows
from .changes import Change, ChangeConverter, Made, OptionsOf, TypedChanges
from .position import After, EventPosition, begin_after, check_kept
from .relations import KnownRelations, TableGroup, TableSelection, known_selection
from .unchanged_toast import LakeValues, UnchangedValues

log = logging.getLogger(__name__)
_OF_A_TABLE = (ValueRangeError, DriftError, TransformError)
MESSAGES = "logical messages"
"""The name of the stream of logical messages, used in place of a table name."""


class TooManyChangesError(Exception):
    """A transaction has too many changes to be read as a whole. `commit_lsn`: its commit LSN."""

    def __init__(self, commit_lsn: LSN) -> None:
        super().__init__(str(commit_lsn))
        self.commit_lsn = commit_lsn


def whole_transactions(
    stretches: Iterator[RowBatch], needed: Callable[[pa.Table], pa.Table], most: int
) -> Iterator[RowBatch]:
    """Regroup rows so that each group has whole transactions, and keep the rows that `needed` returns.

    Raises TooManyChangesError for a transaction with more than `most` of them, after yielding everything
    before it.
    """
    held: list[pa.Table] = []
    for rows, ends_transaction in stretches:
        found = pa.concat_tables([*held, needed(rows)])
        held = []
        if not ends_transaction:
            last = rows["commit_lsn"][-1]
            held = [found.filter(pc.equal(found["commit_lsn"], last))]
            found = found.filter(pc.not_equal(found["commit_lsn"], last))
        yield from _within(found, most)
        if held and held[0].num_rows > most:
            raise TooManyChangesError(LSN(last.as_py()))


def _within(rows: pa.Table, most: int) -> Iterator[RowBatch]:
    """Yield the rows.

    Raises TooManyChangesError for the first transaction that is too large, after the rows before it.
    """
    if rows.num_rows > most:
        counts = pc.value_counts(rows["commit_lsn"])
        large = [one["values"] for one in counts.to_pylist() if one["counts"] > most]
        if large:
            first = min(large)
            yield RowBatch(rows.filter(pc.less(rows["commit_lsn"], first)), True)
            raise TooManyChangesError(LSN(first))
    yield RowBatch(rows, True)


def rows_before(uri: str, rows: pa.Table, value_bytes: int) -> Iterator[pa.Table]:
    """Yield the changelog rows before the first of `rows`, in commit order.

    They are read from the last files that together hold at least `value_bytes` bytes of uncompressed values.
    Raises ChangelogError if a file is dropped while it is read, LakeUnavailableError.
    """
    first = rows.slice(0, 1).select(["epoch", "commit_lsn", "ordinal"]).to_pylist()[0]
    epoch, lsn = Epoch(first["epoch"]), LSN(first["commit_lsn"])
    files = [file for file in live_files(open_changelog(uri), epoch, LSN(0)) if file.min_lsn <= lsn]
    begin, some = _last_of(files, value_bytes)
    for stretch in ordered_rows(uri, some, EventPosition.after_transaction(epoch, begin)):
        found = stretch.rows
        at_it = pc.and_(pc.equal(found["commit_lsn"], lsn), pc.less(found["ordinal"], first["ordinal"]))
        before = found.filter(pc.or_(pc.less(found["commit_lsn"], lsn), at_it))
        if before.num_rows == 0:
            return
        yield before


def _last_of(files: list[ChangelogFile], value_bytes: int) -> tuple[LSN, list[ChangelogFile]]:
    """Return the last files that hold at least `value_bytes` bytes of values.

    The LSN is the position after which these files hold all changes.
    """
    found, left = [], sorted(files, key=lambda file: file.max_lsn)
    while left and value_bytes > 0:
        file = left.pop()
        value_bytes -= file.value_bytes
        found.append(file)
    return (left[-1].max_lsn if left else LSN(0)), found


@dataclass(frozen=True)
class ReadError:
    """The error that stopped reading before the change, or the transaction, at `position`.

    `relations`: the oids of its tables. `is_of_all`: True if it stops all tables, because transactions are
    read as a whole.
    """

    error: PgReplError
    position: EventPosition
    relations: frozenset[int]
    is_of_all: bool = False


def gap_error(gap: EventPosition) -> GapError:
    """Return the error for a skipped transaction."""
    return GapError(
        f"the transaction at {gap.commit_lsn}, which the server could not send, was skipped: no one has its"
        " changes",
        "read the tables from the lake once they are resnapshotted",
    )


def for_readers(fault: ReadError) -> PgReplError:
    """Return the error of a fault for readers in Python. Its hint names the position to continue from."""
    error, place = fault.error, fault.position
    mend = "give the pipeline instead of its lake root, with the column in text_columns"
    hint = mend if isinstance(error, ValueRangeError) else error.hint
    what = "transaction" if place.is_after_transaction else "change"
    return type(error)(error.message, f"{hint}; to go on without this {what}: after={str(place)!r}")


def too_many_changes(place: EventPosition, most: int) -> TransformError:
    """Return the error for a transaction that is too large to be passed as a whole."""
    return TransformError(
        f"the transaction at {place.commit_lsn} has more than {most:,} changes, and a function is given all"
        " of a transaction at once",
        "raise transaction_changes of the publisher, for which it needs the memory",
    )


@contextmanager
def changelog_errors() -> Iterator[None]:
    """Convert the exceptions of storage, Delta, Parquet and DataFusion to LakeUnavailableError.

    The error has only the name of the exception's class: its text may hold values of rows.
    """
    failed: LakeUnavailableError | None = None
    try:
        yield
    except PgReplError:
        raise
    except Exception as error:  # noqa: BLE001 - DataFusion raises plain ones
        doing = "the changelog cannot be read"
        log_unexpected(log, doing, error)
        failed = traced(
            LakeUnavailableError(
                f"{doing}: {type(error).__name__}",
                "check the lake's storage; reading goes on where it stopped",
            ),
            error,
        )
    if failed is not None:
        raise failed


class OrderedReader(Generic[Made]):
    """Reads a pipeline's changes in order, converted by the ByRelation that `make` returns.

    `tables`: if it is a TableSelection, its tables need not be known yet. `whole`: the highest number of
    changes of a transaction; transactions are then converted as a whole. `unchanged`: the handling of values
    that the server did not send.

    `position`: after all changes that were returned or ignored; reading continues there if its text is passed
    as `after`. `ends_transaction`: True if the position is at the end of a transaction. `fault`: the cause of
    the last error.
    """

    def __init__(
        self,
        lake: str | Path | Pipeline,
        tables: Collection[str] | TableSelection | None = None,
        *,
        after: After = None,
        make: Callable[[KnownRelations, OptionsOf, TableSelection], ChangeConverter[Made]],
        whole: int | None = None,
        unchanged: Unchanged = "mark",
    ) -> None:
        root = lake.lake_root if isinstance(lake, Pipeline) else str(lake)
        self._followed = FollowedChangelog(changelog_uri(root))
        options_of = lake.options if isinstance(lake, Pipeline) else lambda _: TableOptions()
        with changelog_errors():
            changelog = open_changelog(changelog_uri(root))
            relations, before = KnownRelations(root), partial(rows_before, self._followed.uri)
            selection = tables if isinstance(tables, TableSelection) else known_selection(tables, relations)
            self._changes = make(relations, options_of, selection)
            asks_lake = unchanged in ("look_up", "require")
            look_up = None
            if asks_lake and isinstance(lake, Pipeline) and lake.has_lake_tables:
                look_up = LakeValues(lake).find
            values = UnchangedValues(relations, self._changes.is_wanted, before, look_up)
            self._values = None if unchanged == "mark" else values
            self.position = begin_after(changelog, after)
        if whole is not None:
            self.position = self.position.before_transaction
        self._whole = whole
        self._changelog: ChangelogTail | None = None
        self._stretches: Iterator[RowBatch] = iter(())
        self.ends_transaction = True
        self._next_fault: ReadError | None = None
        self._expected: ReadError | None = None
        self.fault: ReadError | None = None
        self.durable_lsn = LSN(0)

    def read(self) -> Iterator[list[Made]]:
        """Yield batches of changes until none are left."""
        while (changes := self.read_next()) is not None:
            yield changes

    def read_next(self) -> list[Made] | None:
        """Return the next changes, or None if there are no more at present.

        The list is empty if none of the rows read are of a wanted table.
        """
        if self._next_fault is not None:
            self.fault, self._next_fault = self._next_fault, None
            if self.fault is self._expected:
                self._expected = None
            self._begin_again()
            raise self.fault.error
        self.fault = None
        try:
            with changelog_errors():
                return self._read_kept()
        except BaseException:
            # The interrupted iterator cannot continue: the next call starts again after the position.
            self._begin_again()
            raise

    def _read_kept(self) -> list[Made] | None:
        try:
            return self._read_next()
        except ChangelogFileGoneError:
            # An hour was compacted or dropped after its files were listed. A file that is missing from the
            # new list as well is lost.
            self._begin_again()
            return self._read_next()

    def leave_out(self, tables: TableGroup) -> None:
        """Exclude these tables from now on, and no others: each call replaces the set."""
        self._changes.wanted = self._changes.wanted.leaving_out(tables)
        self._next_fault = None
        self._begin_again()

    def take_only(self, tables: TableGroup) -> None:
        """Restrict reading to these tables of the selection from now on."""
        self._changes.wanted = self._changes.wanted.taking_only(tables)
        self._begin_again()

    def expect(self, fault: ReadError) -> None:
        """Raise the fault of an earlier reader before any change of its transaction is returned."""
        self._expected = fault

    def names_of(self, oid: int) -> list[str]:
        """Return all names that a table has had."""
        if oid == NO_RELATION:
            return [MESSAGES]
        return sorted(map(str, self._changes.relations.names(oid))) or [f"the table with oid {oid}"]

    def pass_fault(self) -> None:
        """Continue after the change, or the skipped transaction, that caused the last error."""
        assert self.fault is not None
        self.position = max(self.position, self.fault.position)

    def _begin_again(self) -> None:
        self._changelog = None
        self._followed.forget()
        if self._values is not None:
            self._values.forget()

    def _read_next(self) -> list[Made] | None:
        if self._changelog is None:
            changelog, is_new = self._followed.look(self.position)
            if not is_new:
                return None
            check_kept(changelog, self.position)
            self.durable_lsn = read_durable_lsn(changelog)
            files = changelog.files_above(LSN(max(0, self.position.commit_lsn - 1)))
            self._changelog = changelog
            self._stretches = ordered_rows(self._followed.uri, files, self.position)
            if self._values is not None:
                self._stretches = self._values.filled(self._stretches)
            if self._whole is not None:
                self._stretches = whole_transactions(self._stretches, self._changes.needed, self._whole)
        stretch = self._next_stretch()
        if stretch is not None:
            return self._take(*stretch)
        self._end(self._changelog)
        return None

    def _next_stretch(self) -> RowBatch | None:
        try:
            return next(self._stretches, None)
        except TooManyChangesError as error:
            place = EventPosition.after_transaction(self.position.epoch, error.commit_lsn)
            assert self._whole is not None
            self.fault = ReadError(too_many_changes(place, self._whole), place, frozenset(), is_of_all=True)
        raise self.fault.error

    def _take(self, rows: pa.Table, ends_transaction: bool) -> list[Made]:
        known = self._known_fault(rows)
        before = rows
        if known is not None:
            before = rows.filter(pc.less(rows["commit_lsn"], known.position.commit_lsn))
        try:
            changes = self._changes.of(before)
        except _OF_A_TABLE:
            before, changes = self._before_the_fault(before)
        self._next_fault = self._next_fault or known
        if count := before.num_rows:
            lsns = rows["commit_lsn"]
            is_all = count == rows.num_rows
            self.ends_transaction = ends_transaction if is_all else lsns[count - 1] != lsns[count]
            self.position = self._last_position(before)
        return changes

    def _known_fault(self, rows: pa.Table) -> ReadError | None:
        """Return the first fault that is raised before its transaction: a gap, or the expected one."""
        gap, expected = self._gap(rows), self._expected
        if expected is None or not pc.any(pc.equal(rows["commit_lsn"], expected.position.commit_lsn)).as_py():
            return gap
        if gap is not None and gap.position.commit_lsn < expected.position.commit_lsn:
            return gap
        return expected

    def _gap(self, rows: pa.Table) -> ReadError | None:
        """Return the first skipped transaction that may have changed a wanted table."""
        gaps = rows.filter(pc.equal(rows["op"], GAP)).select(["commit_lsn", "relation_id"]).to_pylist()
        wanted, has_messages = self._changes.is_of_wanted, self._changes.wanted.has_messages
        # If all tables or logical messages are wanted, it is unknown whether the transaction had any of them.
        is_of_any = self._changes.wanted.is_of_all or has_messages
        found = [
            (row["commit_lsn"], row["relation_id"])
            for row in gaps
            if (is_of_any if row["relation_id"] == NO_RELATION else wanted(row["relation_id"]))
        ]
        if not found:
            return None
        lsn = LSN(min(found)[0])
        place = EventPosition.after_transaction(self.position.epoch, lsn)
        concerned = frozenset(oid for at, oid in found if at == lsn)
        known = concerned if has_messages else concerned - {NO_RELATION}
        return ReadError(gap_error(place), place, known, self._whole is not None)

    def _before_the_fault(self, rows: pa.Table) -> tuple[pa.Table, list[Made]]:
        """Return the rows before the first that cannot be converted, with their changes.

        The error of that row is raised next.
        """
        starts = self._starts(rows)
        good, bad = 0, len(starts) - 1
        while bad - good > 1:
            middle = (good + bad) // 2
            try:
                self._changes.of(rows.slice(0, starts[middle]))
            except _OF_A_TABLE:
                bad = middle
            else:
                good = middle
        start = starts[good]
        faulty = rows.slice(start, starts[good + 1] - start)
        try:
            self._changes.of(faulty)
        except _OF_A_TABLE as error:
            place = self._last_position(faulty)
            stated = type(error)(f"{error.message}, in the change {place}", error.hint)
            concerned = frozenset(faulty["relation_id"].to_pylist())
            self._next_fault = ReadError(stated, place, concerned, self._whole is not None)
        else:
            # The transform does not fail every time: reading continues before the row that failed.
            self._begin_again()
        before = rows.slice(0, start)
        return before, self._changes.of(before)

    def _starts(self, rows: pa.Table) -> list[int]:
        """Return the start index of each change, or with `whole` of each transaction, and the number of
        rows."""
        if self._whole is None:
            return list(range(rows.num_rows + 1))
        lsns = rows["commit_lsn"].to_numpy()
        return [*np.flatnonzero(np.diff(lsns, prepend=-1)).tolist(), rows.num_rows]

    def _last_position(self, rows: pa.Table) -> EventPosition:
        last = rows.slice(rows.num_rows - 1).select(["epoch", "commit_lsn", "ordinal"]).to_pylist()[0]
        epoch, lsn = Epoch(last["epoch"]), LSN(last["commit_lsn"])
        if self._whole is not None:
            return EventPosition.after_transaction(epoch, lsn)
        return EventPosition(epoch, lsn, last["ordinal"])

    def _end(self, changelog: ChangelogTail) -> None:
        """Advance the position to the durable LSN, after all durable changes were read.

        Otherwise the position of a reader that waits long could fall behind the retained changes. Raises
        ChangelogError if a new epoch has begun.
        """
        self._changelog = None
        newest = read_epoch_number(changelog)
        if newest > self.position.epoch:
            self._followed.forget()
            raise ChangelogError(
                f"epoch {self.position.epoch} is over, the changelog is in epoch {newest}: what happened"
                " between them is in no changelog",
                "read the tables from the lake at a consistent point of the new epoch, then go on with after="
                " that point",
            )
        durable = LSN(max(0, read_durable_lsn(changelog) - 1))
        self.position = max(self.position, EventPosition.after_transaction(newest, durable))
        self.ends_transaction = True


class ChangeReader(OrderedReader[Change]):
    """Reads the changes that `stream` returns, without asyncio.

    Arguments and errors are those of `stream`.
    """

    def __init__(
        self,
        lake: str | Path | Pipeline,
        tables: Collection[str] | TableSelection | None = None,
        *,
        after: After = None,
    ) -> None:
        super().__init__(lake, tables, after=after, make=TypedChanges)

    def read_next(self) -> list[Change] | None:
        """Return the next changes, or None if there are no more at present.

        An error that a change causes has a hint that names the position after it.
        """
        try:
            return super().read_next()
        except PgReplError:
            if self.fault is None:
                raise
        raise for_readers(self.fault)
