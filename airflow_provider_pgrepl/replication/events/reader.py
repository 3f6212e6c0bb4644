"""OrderedReader: a pipeline's changes from any place on, as far as they are durable."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
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
    TransformError,
    ValueRangeError,
)
from airflow_provider_pgrepl.replication.changelog.gaps import GAP, NO_RELATION
from airflow_provider_pgrepl.replication.changelog.layout import changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import (
    open_changelog,
    read_durable_lsn,
    read_epoch_number,
)
from airflow_provider_pgrepl.replication.changelog.tail import ChangelogTail
from airflow_provider_pgrepl.replication.events.beginning import After, begin_after, check_kept
from airflow_provider_pgrepl.replication.events.by_relation import ByRelation, ChoicesOf, Made
from airflow_provider_pgrepl.replication.events.changelog_rows import Stretch, ordered_rows
from airflow_provider_pgrepl.replication.events.earlier_rows import rows_before
from airflow_provider_pgrepl.replication.events.fault import (
    Fault,
    changelog_errors,
    gap_error,
    too_many_changes,
)
from airflow_provider_pgrepl.replication.events.followed_changelog import FollowedChangelog
from airflow_provider_pgrepl.replication.events.lake_values import LakeValues
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.relations import KnownRelations, known_selection
from airflow_provider_pgrepl.replication.events.table_selection import TableGroup, TableSelection
from airflow_provider_pgrepl.replication.events.unchanged_toast import UnchangedValues
from airflow_provider_pgrepl.replication.events.whole_transactions import (
    TooManyChangesError,
    whole_transactions,
)
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.publisher_settings import Unchanged
from airflow_provider_pgrepl.replication.settings.tables import TableChoices

_OF_A_TABLE = (ValueRangeError, DriftError, TransformError)
MESSAGES = "logical messages"
"""What their stream is called where a table would be."""


class OrderedReader(Generic[Made]):
    """What is made of a pipeline's changes, by `make`, in their order.

    `tables` may be a TableSelection, of which no table needs to be known yet. `whole`: transactions are given
    to `make` as a whole; so many changes of one at most. `unchanged`: of values that were not sent.

    `position`: after all that was given and looked through; its text, given as `after`, goes on there.
    `ends_transaction`: whether nothing of its transaction comes after it. `fault`: of the last error.
    """

    def __init__(
        self,
        lake: str | Path | Pipeline,
        tables: Collection[str] | TableSelection | None = None,
        *,
        after: After = None,
        make: Callable[[KnownRelations, ChoicesOf, TableSelection], ByRelation[Made]],
        whole: int | None = None,
        unchanged: Unchanged = "mark",
    ) -> None:
        root = lake.lake_root if isinstance(lake, Pipeline) else str(lake)
        self._followed = FollowedChangelog(changelog_uri(root))
        choices_of = lake.choices if isinstance(lake, Pipeline) else lambda _: TableChoices()
        with changelog_errors():
            changelog = open_changelog(changelog_uri(root))
            relations, before = KnownRelations(root), partial(rows_before, self._followed.uri)
            selection = tables if isinstance(tables, TableSelection) else known_selection(tables, relations)
            self._changes = make(relations, choices_of, selection)
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
        self._stretches: Iterator[Stretch] = iter(())
        self.ends_transaction = True
        self._next_fault: Fault | None = None
        self.fault: Fault | None = None
        self.durable_lsn = LSN(0)

    def read(self) -> Iterator[list[Made]]:
        """What there is after the position, some changes at a time."""
        while (changes := self.read_next()) is not None:
            yield changes

    def read_next(self) -> list[Made] | None:
        """The next changes, which may be none of the tables that are wanted; None: there is no more now."""
        if self._next_fault is not None:
            self.fault, self._next_fault = self._next_fault, None
            self._begin_again()
            raise self.fault.error
        self.fault = None
        try:
            with changelog_errors():
                return self._read_kept()
        except BaseException:
            # What was being read is not read to its end: the next time begins after the position again.
            self._begin_again()
            raise

    def _read_kept(self) -> list[Made] | None:
        try:
            return self._read_next()
        except ChangelogFileGoneError:
            # An hour was joined or dropped since its files were listed. What is listed now is there, or lost.
            self._begin_again()
            return self._read_next()

    def leave_out(self, tables: TableGroup) -> None:
        """Tables whose changes are not wanted from here on, beside no others: each call says all of them."""
        self._changes.wanted = self._changes.wanted.leaving_out(tables)
        self._next_fault = None
        self._begin_again()

    def take_only(self, tables: TableGroup) -> None:
        """Of what is wanted, only these tables' changes are from here on."""
        self._changes.wanted = self._changes.wanted.taking_only(tables)
        self._begin_again()

    def names_of(self, oid: int) -> list[str]:
        """All that a table is, or was, called."""
        if oid == NO_RELATION:
            return [MESSAGES]
        return sorted(map(str, self._changes.relations.names(oid))) or [f"the table with oid {oid}"]

    def pass_fault(self) -> None:
        """Go on without the change, or the skipped transaction, that the last error was about."""
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

    def _next_stretch(self) -> Stretch | None:
        try:
            return next(self._stretches, None)
        except TooManyChangesError as error:
            place = EventPosition.after_transaction(self.position.epoch, error.commit_lsn)
            assert self._whole is not None
            self.fault = Fault(too_many_changes(place, self._whole), place, frozenset(), is_of_all=True)
        raise self.fault.error

    def _take(self, rows: pa.Table, ends_transaction: bool) -> list[Made]:
        gap = self._gap(rows)
        before = rows if gap is None else rows.filter(pc.less(rows["commit_lsn"], gap.position.commit_lsn))
        try:
            changes = self._changes.of(before)
        except _OF_A_TABLE:
            before, changes = self._before_the_fault(before)
        self._next_fault = self._next_fault or gap
        if count := before.num_rows:
            lsns = rows["commit_lsn"]
            is_all = count == rows.num_rows
            self.ends_transaction = ends_transaction if is_all else lsns[count - 1] != lsns[count]
            self.position = self._last_position(before)
        return changes

    def _gap(self, rows: pa.Table) -> Fault | None:
        """The first skipped transaction that may have changed a table that is wanted."""
        gaps = rows.filter(pc.equal(rows["op"], GAP)).select(["commit_lsn", "relation_id"]).to_pylist()
        wanted, has_messages = self._changes.is_of_wanted, self._changes.wanted.has_messages
        # Of all there is, or of the logical messages, nobody knows whether it had any.
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
        return Fault(gap_error(place), place, known, self._whole is not None)

    def _before_the_fault(self, rows: pa.Table) -> tuple[pa.Table, list[Made]]:
        """Those before the first whose value cannot be held, which is raised next."""
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
            self._next_fault = Fault(stated, place, concerned, self._whole is not None)
        else:
            # A transform that fails now and then: reading goes on before what it failed with.
            self._begin_again()
        before = rows.slice(0, start)
        return before, self._changes.of(before)

    def _starts(self, rows: pa.Table) -> list[int]:
        """Where what is made as one begins, and the end."""
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
        """All that is durable has been read: a long wait shall not outlive what is kept."""
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
