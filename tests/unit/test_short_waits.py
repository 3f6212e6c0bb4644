"""short_waits.py: how long each attempt at a lock may wait."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from airflow_provider_pgrepl.errors import SnapshotError
from airflow_provider_pgrepl.replication.source import short_waits


@pytest.mark.parametrize(("timeout_s", "last_s"), [(10.0, short_waits.AUTOVACUUM_WAIT_S), (0.2, 0.2)])
def test_last_attempt_waits_until_the_server_cancels_an_autovacuum(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float, last_s: float
) -> None:
    now, waits = [0.0], []

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def attempt(wait_s: float) -> None:
        waits.append(wait_s)
        sleep(wait_s)
        raise SnapshotError("held", "wait")

    monkeypatch.setattr(short_waits, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    with pytest.raises(SnapshotError):
        short_waits.with_short_waits(attempt, timeout_s)
    assert waits[-1] == last_s
    assert all(wait_s <= short_waits.SHORT_WAIT_S for wait_s in waits[:-1])
