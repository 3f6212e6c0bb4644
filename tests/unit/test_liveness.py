"""A silent stream: a keepalive is requested, the walsender may go on decoding, or it counts as lost."""

from __future__ import annotations

import pytest

from airflow_provider_pgrepl.errors import SourceConnectionError
from airflow_provider_pgrepl.replication.source import stream as liveness_module
from airflow_provider_pgrepl.replication.source.stream import Liveness


class Clock:
    """A stand-in for the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(liveness_module, "time", found)
    return found


class Sender:
    """A stand-in for the server's answer about the walsender: whether that is at work."""

    def __init__(self, *, at_work: bool) -> None:
        self.at_work = at_work
        self.asked = 0

    def __call__(self) -> bool:
        self.asked += 1
        return self.at_work


def test_a_silent_stream_is_asked_for_a_word_once_and_then_taken_for_lost(clock: Clock) -> None:
    liveness = Liveness(Sender(at_work=False), limit_s=0.4)
    assert not liveness.must_ask()
    clock.now += 0.21
    assert liveness.must_ask()
    assert not liveness.must_ask()
    clock.now += 0.21
    with pytest.raises(SourceConnectionError, match="sent nothing for"):
        liveness.must_ask()


def test_a_sender_that_decodes_is_left_to_it(clock: Clock) -> None:
    sender = Sender(at_work=True)
    liveness = Liveness(sender, limit_s=0.2)
    for _ in range(3):
        clock.now += 0.21
        liveness.must_ask()
    assert sender.asked >= 2
