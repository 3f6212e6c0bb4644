"""The publisher: sends events from the changelog to a target until it is stopped or has caught up."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

from airflow_provider_pgrepl.errors import (
    ChangelogError,
    FencedError,
    PgReplError,
    TargetError,
    TargetUnavailableError,
)
from airflow_provider_pgrepl.replication.changelog.layout import changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import open_changelog, read_durable_lsn
from airflow_provider_pgrepl.replication.events.business import TRANSACTIONS
from airflow_provider_pgrepl.replication.events.changes import ChangeConverter, OptionsOf
from airflow_provider_pgrepl.replication.events.event import Event, above_all
from airflow_provider_pgrepl.replication.events.position import EventPosition, begin_after, check_kept
from airflow_provider_pgrepl.replication.events.reader import OrderedReader, ReadError
from airflow_provider_pgrepl.replication.events.relations import KnownRelations, TableSelection
from airflow_provider_pgrepl.replication.events.targets.base import PendingEvents, Refusal, Target
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.publisher import PublisherSettings

from .record import PublisherLog, PublisherProgress, PublisherRecord, PublisherState, missed

log = logging.getLogger(__name__)

_LOOK_S = 0.25
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0

Wait = Callable[[float], bool]
"""Waits at most a number of seconds. Returns True if the publisher must stop."""
Then = Callable[[int, list[Refusal]], None]
"""Called with the number of events that a target has settled, and with those that it refused."""
ConverterFactory = Callable[[KnownRelations, OptionsOf, TableSelection], ChangeConverter[Any]]
"""Returns the converter from changes to events, given the relations, options and tables that are read."""
_POLL_S = 0.25
_SAVE_S, _SAVE_IDLE_S = 1.0, 60.0
_UNDER_WAY = 2
"""The number of concurrent batches: while the target takes one, the next is read and encoded."""
_FINISH_S = 10.0


class StopRequested(Exception):  # noqa: N818 - nothing went wrong
    """The publisher must stop. Events that were sent may not have arrived."""


class TransactionLost(Exception):  # noqa: N818 - nothing went wrong that cannot be done again
    """All changes since the last commit must be read and sent again."""


@dataclass
class _Batch:
    """Events that were sent and are not settled.

    `settled` and `refusals` are those of earlier attempts to send them.
    """

    sending: PendingEvents
    then: Then
    settled: int = 0
    refusals: list[Refusal] = field(default_factory=list)


class Delivery:
    """The batches that were sent and are not settled.

    If the connection to the target is lost, all events from the first unacknowledged one on are sent again,
    in order, as a new generation.

    `begin_generation` is called after each connect, before anything is sent. It raises FencedError, or
    returns a number above all earlier ones. Methods raise StopRequested, TargetError if the target refuses
    permanently, and the errors of `begin_generation` and of a batch's `then`.

    With a target that keeps transactions nothing is sent again from here, because not all events of a
    transaction are kept. TransactionLost is raised instead, after the target is connected again.
    """

    def __init__(
        self, target: Target, wait: Wait, progress: PublisherProgress, begin_generation: Callable[[], int]
    ) -> None:
        self._target, self._wait, self._progress = target, wait, progress
        self._begin_generation = begin_generation
        self._generation = 0
        self._batches: deque[_Batch] = deque()
        self._pause_s = 0.0

    def connect(self) -> None:
        """Connect to the target, and retry with growing pauses while it is unavailable."""
        log.info("connecting to %s", self._target.address)
        while True:
            if self._pause_s and self._wait(self._pause_s):
                raise StopRequested
            self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            try:
                self._target.connect()
            except TargetUnavailableError as error:
                self._progress.is_connected = False
                log.warning("%s; tried again in %g s", error.message, self._pause_s)
            else:
                self._progress.is_connected = True
                log.info("connected to %s", self._target.address)
                self._generation = self._begin_generation()
                return

    def keep_connected(self) -> None:
        """Connect again if the connection is lost and no batch is unsettled."""
        if not self._batches and not self._target.is_connected:
            log.warning("%s: the connection was lost", self._target.address)
            self._progress.reconnects += 1
            self._pause_s = _FIRST_PAUSE_S
            self.connect()

    def send(self, events: Sequence[Event], then: Then, *, ends_transaction: bool = True) -> None:
        """Start to send events.

        `then` is called from `settle_down_to` or `finish`, after the target has settled all of them.
        """
        self._batches.append(_Batch(self._start(events, ends_transaction), then))

    def settle_down_to(self, count: int) -> None:
        """Wait for the oldest batches until at most `count` are unsettled.

        Commits the transaction first if `count` is 0. Does not wait for a batch whose transaction is not
        committed yet.
        """
        if count == 0:
            self._target.commit()
        while len(self._batches) > count:
            if self._batches[0].sending.is_held:
                return
            while not self._batches[0].sending.wait(_LOOK_S):
                if self._wait(0.0):
                    raise StopRequested
            self._settle_oldest()

    def finish(self, seconds: float) -> None:
        """Wait at most `seconds` for unsettled batches, so that they need not be sent again.

        Commits first, if the last batch ends its transaction.
        """
        if self._batches and self._batches[-1].sending.ends_transaction:
            self._target.commit()
        deadline = time.monotonic() + seconds
        while self._batches and not self._batches[0].sending.is_held:
            sending = self._batches[0].sending
            if not sending.wait(max(0.0, deadline - time.monotonic())) or sending.error is not None:
                return
            self._settle_oldest()

    def take_back(self) -> NoReturn:
        """Take back the open transaction, so that consumers see nothing of it.

        For a target that keeps transactions. Raises TransactionLost after the target is connected again.
        """
        # The target is available: nothing has to be waited for.
        self._pause_s = 0.0
        self._begin_again()

    def close(self) -> None:
        """Close the connection to the target."""
        self._target.close()

    def _start(self, events: Sequence[Event], ends_transaction: bool = True) -> PendingEvents:
        for event in events:
            event.generation = self._generation
        sending = PendingEvents(events, ends_transaction=ends_transaction)
        self._target.send(sending)
        return sending

    def _settle_oldest(self) -> None:
        batch = self._batches[0]
        if batch.sending.error is not None:
            self._send_again(batch.sending.error)
            return
        self._batches.popleft()
        if batch.sending.count:
            self._pause_s = 0.0
        batch.then(batch.settled + batch.sending.count, [*batch.refusals, *batch.sending.refusals])

    def _send_again(self, error: PgReplError) -> None:
        if not isinstance(error, TargetUnavailableError):
            raise error
        log.warning("%s; what is not acknowledged is sent again", error.message)
        self._progress.reconnects += 1
        if self._target.keeps_transactions:
            self._begin_again()
        # Send all events after the first unsettled one again, including settled ones: a consumer receives the
        # earlier events in a new generation and would otherwise take them for newer than the later ones.
        rests: list[Sequence[Event]] = []
        for batch in self._batches:
            settled = 0 if any(rests) else batch.sending.settled
            if settled:
                batch.settled += settled
                batch.refusals += batch.sending.refusals
                self._pause_s = 0.0
            rests.append(batch.sending.events[settled:])
        self.connect()
        for batch, rest in zip(self._batches, rests, strict=True):
            self._progress.resent += len(rest)
            batch.sending = self._start(rest)

    def _begin_again(self) -> NoReturn:
        self._progress.resent += sum(batch.sending.count for batch in self._batches)
        self._batches.clear()
        self.connect()
        raise TransactionLost


class Publisher:
    """One run of a publisher.

    Delivery is at least once: events that may not have arrived are sent again with the same ids. A table
    whose event cannot be made, or is refused, stops alone. The next run first publishes that table from where
    it stopped, and then all tables.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        settings: PublisherSettings,
        publisher_log: PublisherLog,
        record: PublisherRecord,
        target: Target,
        wait: Wait,
        make: ConverterFactory,
    ) -> None:
        """`record`: the record in `publisher_log`. `make`: returns the converter from changes to events."""
        self._pipeline, self._settings = pipeline, settings
        self._selection = TableSelection.parse(settings.tables, settings.messages)
        self._wait, self._target = wait, target
        self._state = PublisherState(publisher_log, record, lambda: target.stamp)
        self._stopped, self.progress = self._state.stopped, self._state.progress
        if record.generation:
            changelog = open_changelog(changelog_uri(pipeline.lake_root))
            target.stamp = above_all(record.stamp, read_durable_lsn(changelog))
        self._delivery = Delivery(target, wait, self.progress, self._state.begin_generation)
        self._reader: OrderedReader[Event] | None = None
        self._make = make
        self._left_out: set[int] = set()
        self._expected: ReadError | None = None

    @property
    def record(self) -> PublisherRecord:
        """Return the current record."""
        return self._state.record

    def run(self, until: LSN | None = None) -> bool:
        """Publish until `wait` requests a stop, or everything at or before the LSN `until` is published.

        Returns True in the latter case. Raises TargetError if the target refuses permanently, FencedError,
        and the errors of an OrderedReader.
        """
        try:
            reached = self._run(until)
            self._delivery.finish(_FINISH_S)
            self._state.save()
        except FencedError:
            raise
        except ChangelogError as error:
            gone = missed(error, self.record, self._settings.name)
            self._state.note_failure(gone)
            raise gone from error
        except PgReplError as error:
            self._state.note_failure(error)
            raise
        finally:
            self._delivery.close()
        return reached

    def _run(self, until: LSN | None) -> bool:
        for table in self._stopped.leave_out(self._selection):
            log.warning("%s, which had stopped, is not of this publisher any more", table.table)
        log.info("publishing to %s, after %s", self._settings.destination_of, self._state.position)
        try:
            self._delivery.connect()
            while self._stopped.tables:
                with suppress(TransactionLost):
                    self._catch_up()
                    break
            while True:
                with suppress(TransactionLost):
                    return self._follow(until)
        except StopRequested:
            return False

    # --- reading ---

    def _catch_up(self) -> None:
        """Publish the changes that stopped tables have missed, up to the position of the other tables."""
        end, waiting = self._state.position, self._kept()
        if waiting:
            # Events right before a table stopped may have been unacknowledged when the last run ended.
            begin = min([end, *waiting.values()])
            self._reader = reader = self._read_after(begin)
            for oid in waiting:
                self._stopped.learn_names(oid, reader.names_of(oid))
            self._left_out = set(self._stopped.tables) - set(waiting)
            reader.take_only(self._stopped.group(waiting))
            reader.leave_out(self._stopped.group(self._left_out))
            while reader.position < end and set(waiting) - self._stopped.now:
                events = self._next(reader, end)
                if events is None:
                    break
                before = [event for event in events if event.position <= end]
                position = min(reader.position, end)
                self._send(before, partial(self._stopped.has_caught_up_to, position, set(waiting)))
                self._delivery.settle_down_to(_UNDER_WAY - 1)
                self._state.save_when_due()
                if self._wait(0.0):
                    raise StopRequested
            self._delivery.settle_down_to(0)
            for table in self._stopped.go_on_with(waiting):
                log.info("%s, which had stopped, is published again", table.table)
        self._state.save()

    def _kept(self) -> dict[int, EventPosition]:
        """Return the positions of the stopped tables whose later changes are all in the changelog, by oid.

        A table with missing changes continues from the oldest retained change with `skip_and_record`;
        otherwise it is marked as lost.
        """
        changelog = open_changelog(changelog_uri(self._pipeline.lake_root))
        found = {}
        # A table that has stopped again in this run waits for the next one.
        waiting = {oid: one for oid, one in self._stopped.tables.items() if oid not in self._stopped.now}
        for oid, table in waiting.items():
            found[oid] = min(table.after, self._state.position)
            try:
                check_kept(changelog, found[oid])
            except ChangelogError as error:
                if self._settings.on_error == "skip_and_record":
                    self._state.add_skipped([(str(found[oid]), table.table, error.message)])
                    found[oid] = begin_after(changelog, None)
                else:
                    del found[oid]
                    self._stopped.lose(oid, error)
        return found

    def _follow(self, until: LSN | None) -> bool:
        self._reader = reader = self._read_after(self._state.position)
        self._left_out = set(self._stopped.tables)
        reader.leave_out(self._stopped.group(self._left_out))
        while True:
            events = self._next(reader)
            self.progress.durable_lsn = reader.durable_lsn
            if events is not None:
                self._send(events, partial(self._state.advance, reader.position))
            self._delivery.settle_down_to(0 if events is None else _UNDER_WAY - 1)
            if events is None:
                self._state.advance(reader.position)
                if until is not None and self._state.position.commit_lsn >= until:
                    return True
                self._delivery.keep_connected()
            self._state.save_when_due()
            if self._wait(_POLL_S if events is None else 0.0):
                return False

    def _read_after(self, position: EventPosition) -> OrderedReader[Event]:
        reader = OrderedReader(
            self._pipeline,
            self._selection,
            after=position,
            make=self._make,
            whole=self._settings.whole,
            unchanged=self._settings.unchanged,
        )
        if self._expected is not None:
            reader.expect(self._expected)
        return reader

    def _next(self, reader: OrderedReader[Event], end: EventPosition | None = None) -> list[Event] | None:
        """Return the next events. None if there are no more, or if the next fault is after `end`.

        The list is empty after a fault that stops or skips a table.
        """
        try:
            return reader.read_next()
        except PgReplError:
            if reader.fault is None:
                raise
        fault = reader.fault
        if end is not None and fault.position > end:
            return None
        if not fault.is_of_all and not fault.relations:
            log.warning("%s: its messages, if it had any; tables are not concerned", fault.error.message)
            reader.pass_fault()
        elif self._settings.on_error == "skip_and_record":
            self._skip(fault, reader)
        else:
            self._stop_tables(fault, reader)
        return []

    def _skip(self, fault: ReadError, reader: OrderedReader[Event]) -> None:
        """Continue after the fault, and record it once all earlier events are settled.

        An open transaction goes on: its end, and not the fault, commits it.
        """
        tables = ", ".join(" or ".join(reader.names_of(oid)) for oid in sorted(fault.relations))
        skipped = str(fault.position), TRANSACTIONS if fault.is_of_all else tables, fault.error.message
        self._send([], partial(self._state.add_skipped, [skipped]))
        reader.pass_fault()

    def _stop_tables(self, fault: ReadError, reader: OrderedReader[Event]) -> None:
        """Stop the tables of the fault, after all earlier events are settled.

        If a part of the fault's transaction was sent that must not be seen alone, the part is taken back, and
        the tables stop before the transaction, when it is read again.
        """
        if self._target.keeps_transactions and not reader.ends_transaction:
            log.warning("%s: its transaction is sent again without the table", fault.error.message)
            self._expected = fault
            self._delivery.take_back()
        self._delivery.settle_down_to(0)
        if fault.is_of_all:
            raise fault.error
        for oid in fault.relations:
            self._stop(oid, reader.position, fault.error)
        self._expected = None

    # --- sending ---

    def _send(self, events: Sequence[Event], then: Callable[[], None]) -> None:
        assert self._reader is not None
        ends_transaction = self._reader.ends_transaction
        self._delivery.send(events, partial(self._take_note, then), ends_transaction=ends_transaction)

    def _take_note(self, then: Callable[[], None], settled: int, refusals: list[Refusal]) -> None:
        self._take_note_of(refusals)
        published = settled - len(refusals)
        if settled:
            self._state.add_published(published)
        then()

    # --- what goes wrong with a table ---

    def _take_note_of(self, refusals: Collection[Refusal]) -> None:
        skipped = []
        for refusal in refusals:
            event = refusal.event
            if refusal.is_unrouted and self._settings.unrouted == "drop":
                self.progress.dropped += 1
            elif self._settings.on_error == "skip_and_record":
                skipped.append((event.id, event.table, refusal.reason))
            elif self._settings.transform_transaction:
                raise TargetError(
                    f"publisher {self._settings.name}: the target rejected event {event.id}:"
                    f" {refusal.reason}",
                    "fix the cause and start the publisher again: nothing was lost. With on_error"
                    " skip_and_record it continues, and consumers never get this event",
                )
            else:
                self._stop(event.relation_id, _before(event), refusal)
        if skipped:
            self._state.add_skipped(skipped)

    def _stop(self, oid: int, after: EventPosition, why: PgReplError | Refusal) -> None:
        """Stop one table for the rest of this run."""
        # The target may refuse all events of a table in a batch.
        if self._stopped.is_stopped_before(oid, after):
            return
        assert self._reader is not None
        stopped = self._stopped.stop(oid, self._reader.names_of(oid), after, why)
        log.error("%s is not published any more: %s: %s", stopped.table, stopped.error, stopped.reason)
        self._state.need_saving()
        self._left_out.add(oid)
        self._reader.leave_out(self._stopped.group(self._left_out))


def _before(event: Event) -> EventPosition:
    return replace(event.position, ordinal=event.position.ordinal - 1)
