"""source/deadlines.py: blocks that take too long, in one thread for all of them."""

from __future__ import annotations

import multiprocessing
import threading

import pytest

from airflow_provider_pgrepl.replication.source.deadlines import Deadlines

FAR_S = 600.0


@pytest.fixture
def deadlines() -> Deadlines:
    return Deadlines()


def ends(deadlines: Deadlines, limit_s: float) -> bool:
    """Return True if the end of a block is called while the block waits for it."""
    called = threading.Event()
    with deadlines.calling(called.set, limit_s):
        return called.wait(60)


def test_block_that_takes_too_long_is_ended_once(deadlines: Deadlines) -> None:
    calls, called = [], threading.Event()

    def end() -> None:
        calls.append(threading.current_thread().name)
        called.set()

    with deadlines.calling(end, 0.01):
        assert called.wait(60)
        assert ends(deadlines, 0.01)
    assert calls == ["pgrepl-deadlines"]


def test_block_that_ended_in_time_is_not_ended_later(deadlines: Deadlines) -> None:
    called = threading.Event()
    with deadlines.calling(called.set, 1.0):
        pass
    assert ends(deadlines, 1.2)
    assert not called.is_set()


def test_shorter_limit_ends_its_block_while_others_have_long_ones(deadlines: Deadlines) -> None:
    with deadlines.calling(pytest.fail, FAR_S):
        assert ends(deadlines, 0.01)
        assert ends(deadlines, 0.01)
    # The thread sleeps until the deadline of the long one.
    assert ends(deadlines, 0.01)


def test_many_blocks_have_one_thread(deadlines: Deadlines) -> None:
    # A set, because a thread of an earlier test may end meanwhile.
    before = set(threading.enumerate())
    for _ in range(100):
        with deadlines.calling(pytest.fail, FAR_S), deadlines.calling(pytest.fail, FAR_S):
            pass
    assert len(set(threading.enumerate()) - before) == 1


def test_forked_process_has_a_thread_of_its_own(deadlines: Deadlines) -> None:
    """Spark's Python workers are forked."""
    context = multiprocessing.get_context("fork")
    with deadlines.calling(pytest.fail, FAR_S):
        child = context.Process(target=lambda: None if ends(deadlines, 0.01) else pytest.fail("not ended"))
        child.start()
        child.join(60)
    assert child.exitcode == 0
