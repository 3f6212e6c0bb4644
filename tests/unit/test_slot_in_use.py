"""source/slot.py: how often the slot is used, and its end."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import SourceConnectionError
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.source import slot
from airflow_provider_pgrepl.replication.source.slot import Slot, SlotInUse

DAY_S = 86400.0
SLOT = Slot("s", "pgoutput", "d", False, None, LSN(16), LSN(8), "reserved", None)


class Source:
    """A connection, its server's timeout, and its clock."""

    server_version = 180000

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s, self.now_s, self.used_at = timeout_s, 0.0, list[float]()
        self.is_lost = False

    def close(self) -> None:
        pass

    def connect(self, *_: object) -> Source:
        if self.is_lost:
            raise SourceConnectionError("lost")
        return self


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Source:
    source = Source(DAY_S)
    monkeypatch.setattr(slot, "connect", source.connect)
    monkeypatch.setattr(slot, "rows", lambda *_: [(source.timeout_s,)])
    monkeypatch.setattr(slot, "read_slot", lambda *_: SLOT)
    monkeypatch.setattr(slot, "advance_slot", lambda *_: source.used_at.append(source.now_s))
    monkeypatch.setattr("time.monotonic", lambda: source.now_s)
    return source


class Pauses(threading.Event):
    """Pauses that pass at once, until a time of the source's clock; from `lost_at` its connections fail."""

    def __init__(self, source: Source, end_s: float, lost_at: float) -> None:
        super().__init__()
        self._source, self._end_s, self._lost_at = source, end_s, lost_at

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self._source.now_s += timeout
        self._source.is_lost = self._lost_at <= self._source.now_s < self._lost_at + 1000
        return self._source.now_s > self._end_s


@pytest.mark.parametrize(
    ("timeout_s", "end_s", "used_at"),
    [(DAY_S, 2 * DAY_S, [0, 43200, 86400, 129600, 172800]), (4, 10, [0, 2, 4, 6, 8, 10]), (0, DAY_S, [])],
)
def test_slot_is_used_twice_within_the_timeout(
    source: Source, timeout_s: float, end_s: float, used_at: list[float]
) -> None:
    source.timeout_s = timeout_s
    run(source, Pauses(source, end_s, DAY_S * 9))
    assert source.used_at == used_at


def test_use_that_fails_is_repeated_well_within_the_timeout(source: Source) -> None:
    run(source, Pauses(source, DAY_S, DAY_S / 2))
    assert source.used_at[0] == 0
    assert DAY_S / 2 < source.used_at[1] < DAY_S / 2 + 2000


def run(source: Source, pauses: Pauses) -> None:
    used: Any = SlotInUse("", "s")
    used._stopping = pauses
    used._run()


def test_the_end_waits_for_a_use_that_is_under_way(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    entered, left = threading.Event(), threading.Event()
    in_use: Any = SlotInUse("", "s")

    def connect(*_: object) -> None:
        entered.set()
        in_use._stopping.wait()
        left.wait(0.05)
        raise SourceConnectionError("ended")

    monkeypatch.setattr(slot, "connect", connect)
    with in_use:
        entered.wait()
    assert not in_use._thread.is_alive()
