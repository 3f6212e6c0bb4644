"""The replication app starts a streaming query again whose Python process did not connect in time."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import SparkError
from airflow_provider_pgrepl.replication.app.lake_replication import LakeReplication
from airflow_provider_pgrepl.replication.postgres.lsn import LSN

TOO_LATE = "[STREAM_FAILED] terminated with exception: Python worker failed to connect back. SQLSTATE: XXKST"


class Query:
    """A query that has ended, with an exception or without one."""

    isActive = False  # noqa: N815 - Spark's name

    def __init__(self, text: str | None) -> None:
        self._exception = None if text is None else Exception(text)

    def exception(self) -> Exception | None:
        return self._exception


class Stop:
    is_set = False

    def wait(self, _seconds: float) -> bool:
        return self.is_set


def replication(*ends: str | None, seen: int = 0) -> Any:
    """Return a run whose queries end as in `ends`. `seen`: the LSN that its receiver has made durable."""
    queries = iter(map(Query, ends))
    run: Any = LakeReplication.__new__(LakeReplication)
    run._applier = SimpleNamespace(error=None, started=[])
    run._applier.start = lambda **options: run._applier.started.append(options) or next(queries)
    run._receiver = SimpleNamespace(
        failed=threading.Event(),
        progress=SimpleNamespace(seen_lsn=LSN(seen)),
        asked=0,
    )

    def request_keepalive() -> None:
        run._receiver.asked += 1
        if run._receiver.asked == 3:
            run._receiver.progress.seen_lsn = LSN(100)

    run._receiver.request_keepalive = request_keepalive
    run._stop = Stop()
    return run


@pytest.mark.parametrize("late", [0, 1, 2])
def test_query_is_started_again_when_its_python_process_was_late(late):
    run = replication(*[TOO_LATE] * late, None)
    run._follow(available_now=True)
    assert run._applier.started == [{"available_now": True}] * (late + 1)


def test_third_late_start_is_raised_as_missing_workers():
    run = replication(*[TOO_LATE] * 9)
    with pytest.raises(SparkError, match="query failed: Spark could not start its Python workers"):
        run._follow()
    assert len(run._applier.started) == 3


def test_query_that_failed_otherwise_is_not_started_again():
    run = replication("a value of a row", None)
    with pytest.raises(SparkError, match="the streaming query failed: Spark failed"):
        run._follow()
    assert len(run._applier.started) == 1


def test_error_of_the_applier_is_raised_instead_of_starting_again():
    run = replication(TOO_LATE, None)
    run._applier.error = KeyError("of the applier")
    with pytest.raises(KeyError, match="of the applier"):
        run._follow()


def test_target_is_awaited_until_it_is_durable():
    run = replication()
    assert run._has_received(LSN(100))
    assert run._receiver.asked == 3


def test_target_is_not_awaited_when_the_receiver_failed_or_the_app_is_to_stop():
    failed, stopped = replication(), replication()
    failed._receiver.failed.set()
    stopped._stop.is_set = True
    assert not failed._has_received(LSN(100))
    assert not stopped._has_received(LSN(100))
    assert (failed._receiver.asked, stopped._receiver.asked) == (0, 0)
