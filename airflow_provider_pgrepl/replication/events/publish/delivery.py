"""Delivery: events to a target in order, again and again until it has them."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from airflow_provider_pgrepl.errors import PgReplError, TargetUnavailableError
from airflow_provider_pgrepl.replication.events.event import Event
from airflow_provider_pgrepl.replication.events.publish.progress import PublisherProgress
from airflow_provider_pgrepl.replication.events.targets.base import Refusal, Sending, Target

log = logging.getLogger(__name__)

_LOOK_S = 0.25
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0

Wait = Callable[[float], bool]
"""Wait so many seconds at most; whether it is time to end."""
Then = Callable[[int, list[Refusal]], None]
"""Called with how many events a target has settled, and those that it refused."""


class TimeToEnd(Exception):  # noqa: N818 - nothing went wrong
    """It is time to end, and what is under way may not have arrived."""


class TransactionLost(Exception):  # noqa: N818 - nothing went wrong that cannot be done again
    """What was sent since the last commit has to be read again, and sent."""


@dataclass
class _Batch:
    """Events under way; `settled` and `refusals` are of sendings before the present one."""

    sending: Sending
    then: Then
    settled: int = 0
    refusals: list[Refusal] = field(default_factory=list)


class Delivery:
    """Batches under way. When the target is lost, all from the first event on that it has not acknowledged is
    sent again, in order, as a new generation.

    `begin_generation` is called whenever the target was connected, before anything is sent: it raises
    FencedError, or returns a number above all before it. Methods raise TimeToEnd, TargetError when the target
    refuses for good, and what `begin_generation` and a batch's `then` raise. With a target that keeps
    transactions nothing is sent again from here, where no transaction's events are all kept: TransactionLost
    is raised instead, once the target is there again.
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
        """Until the target is there, with longer and longer pauses as long as it takes nothing."""
        log.info("connecting to %s", self._target.address)
        while True:
            if self._pause_s and self._wait(self._pause_s):
                raise TimeToEnd
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
        """Connect again when nothing is under way and the target is known to be lost."""
        if not self._batches and not self._target.is_connected:
            log.warning("%s: the connection was lost", self._target.address)
            self._progress.reconnects += 1
            self._pause_s = _FIRST_PAUSE_S
            self.connect()

    def send(self, events: Sequence[Event], then: Then, *, ends_transaction: bool = True) -> None:
        """Begin to send; `then` is called by who settles, when the target has acknowledged or refused all."""
        self._batches.append(_Batch(self._start(events, ends_transaction), then))

    def settle_down_to(self, count: int) -> None:
        """Wait for the oldest batches until only so many are under way. Those of a transaction that has more
        to come are not waited for, unless it is for all."""
        if count == 0:
            self._target.commit()
        while len(self._batches) > count:
            if self._batches[0].sending.is_held:
                return
            while not self._batches[0].sending.wait(_LOOK_S):
                if self._wait(0.0):
                    raise TimeToEnd
            self._settle_oldest()

    def finish(self, seconds: float) -> None:
        """Wait a little for what is under way, so that it need not be sent again."""
        if self._batches and self._batches[-1].sending.ends_transaction:
            self._target.commit()
        deadline = time.monotonic() + seconds
        while self._batches and not self._batches[0].sending.is_held:
            sending = self._batches[0].sending
            if not sending.wait(max(0.0, deadline - time.monotonic())) or sending.error is not None:
                return
            self._settle_oldest()

    def close(self) -> None:
        """End the connection to the target."""
        self._target.close()

    def _start(self, events: Sequence[Event], ends_transaction: bool = True) -> Sending:
        for event in events:
            event.generation = self._generation
        sending = Sending(events, ends_transaction=ends_transaction)
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
            self._progress.resent += sum(batch.sending.count for batch in self._batches)
            self._batches.clear()
            self.connect()
            raise TransactionLost
        # All that stands after the first event that is not settled, settled or not: of those before it a
        # consumer hears in a new generation, and would take what they say for the last word.
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
