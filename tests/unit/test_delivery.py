"""events/publish/publisher.py: what is sent again is one whole rest."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_pgrepl.errors import TargetUnavailableError
from airflow_provider_pgrepl.replication.events.event import Event
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.publish.publisher import Delivery
from airflow_provider_pgrepl.replication.events.publish.record import PublisherProgress
from airflow_provider_pgrepl.replication.events.targets.base import PendingEvents
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from tests.support.examples import examples

PublishedCounts = tuple[int, int, int]
"""Generation, number, key."""


class OutOfOrder:
    """Takes any of the events of its first connections, and then is lost; the last one takes all."""

    address = "nowhere"
    stamp, is_connected, keeps_transactions = 0, True, False

    def __init__(self, taken: list[set[int]]) -> None:
        self._taken = [*taken]
        self._under_way: list[PendingEvents] = []
        self._expected = 2
        self.sent: list[PublishedCounts] = []

    def connect(self) -> None:
        # Batches whose events have all been settled before are not sent again.
        self._expected = max(1, len([one for one in self._under_way if one.settled < len(one.events)]))
        self._under_way = []

    def begin(self) -> None:
        """Two batches are expected now."""
        self._expected = 2

    def send(self, sending: PendingEvents) -> None:
        self._under_way.append(sending)
        if not self._taken:
            self._take(sending, {event.position.ordinal for event in sending.events})
        elif len(self._under_way) >= self._expected:
            self._be_lost()

    def commit(self) -> None:
        """Do nothing: the target has no transactions."""

    def _be_lost(self) -> None:
        taken = self._taken.pop(0)
        for sending in self._under_way:
            self._take(sending, taken)
            sending.fail(TargetUnavailableError("lost"))

    def _take(self, sending: PendingEvents, taken: set[int]) -> None:
        for index, event in enumerate(sending.events):
            if event.position.ordinal in taken:
                self.sent.append((event.generation, event.position.ordinal, int(event.body)))
                sending.settle(index)

    def close(self) -> None:
        """Do nothing: nothing is open."""


def event(number: int, key: int) -> Event:
    place = EventPosition(Epoch(1), LSN(1), number)
    return Event(place, str(place), 1, "t", "insert", datetime.now(UTC), str(key).encode())


@examples(500)
@given(
    keys=st.lists(st.integers(0, 2), min_size=1, max_size=8),
    cut=st.integers(0, 8),
    taken=st.lists(st.sets(st.integers(0, 7)), max_size=3),
)
def test_highest_generation_holds_last_event_for_each_key_after_redelivery(
    keys: list[int], cut: int, taken: list[set[int]]
) -> None:
    """A target that takes the events of several keys independently of each other."""
    target = OutOfOrder(taken)
    generations = count(1)
    delivery = Delivery(target, lambda _: False, PublisherProgress(), lambda: next(generations))
    settled: list[int] = []
    events = [event(number, key) for number, key in enumerate(keys)]
    delivery.connect()
    target.begin()
    for part in (events[:cut], events[cut:]):
        delivery.send(part, lambda number, _: settled.append(number))
    delivery.settle_down_to(0)
    assert sum(settled) == len(events)
    assert {number for _, number, _ in target.sent} == set(range(len(events)))
    for key in set(keys):
        last = (0, -1)
        for generation, number, of in target.sent:
            if of == key:
                last = max(last, (generation, number))
        assert last[1] == max(number for number, of in enumerate(keys) if of == key)


class Holding(OutOfOrder):
    """A target that acknowledges no event itself."""

    def __init__(self) -> None:
        super().__init__([])

    def _take(self, sending: PendingEvents, taken: set[int]) -> None:
        """Do nothing: the test settles the events."""


def test_batch_is_noted_only_when_all_of_its_events_are_acknowledged() -> None:
    """A noted batch goes into the publisher's record, and the next run does not send it again."""
    target, noted = Holding(), list[int]()
    delivery = Delivery(target, lambda _: False, PublisherProgress(), lambda: 1)
    delivery.connect()
    delivery.send([event(0, 0), event(1, 1)], lambda number, _: noted.append(number))
    delivery.finish(0.0)
    assert noted == []
    (sending,) = target._under_way
    sending.settle(1)
    delivery.finish(0.0)
    assert noted == []
    sending.settle(0)
    delivery.finish(0.0)
    assert noted == [2]
