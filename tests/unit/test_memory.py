"""Memory that is released when a process has nothing to do."""

from __future__ import annotations

from airflow_provider_pgrepl.replication.app.event_replication import PublisherThread
from airflow_provider_pgrepl.replication.runtime.memory import IdleRelease
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline


def test_memory_is_released_5_s_after_the_last_activity_and_every_10_minutes() -> None:
    now, released = 0.0, list[float]()
    idle = IdleRelease(lambda: released.append(now), lambda: now)
    for second in range(1230):
        now = float(second)
        # Received until the third second, and sent until the twentieth.
        idle.look((min(second, 3), min(second, 20)))
    assert released == [25.0, 625.0, 1225.0]


def test_a_publisher_that_has_not_begun_has_settled_nothing() -> None:
    pipeline = Pipeline(name="shop", lake="/lake", tables=("public.*",))
    assert PublisherThread(pipeline, "events", lambda _: None).settled == 0
