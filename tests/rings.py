"""Rings for two workers on two cores: what starts a JVM takes turns on one, all else goes anywhere.

For `make test` (`pytest -p tests.rings -n 2 --dist loadgroup`); a plain `pytest tests/unit` is one process.
"""

from __future__ import annotations

import pytest

# A group stays on one worker: one Spark session, one Airflow database, no two JVMs fighting for two cores.
GROUPS = {"spark": "jvm", "fault": "jvm", "end_to_end": "jvm", "airflow": "airflow"}


# First, because xdist reads the groups in this same hook.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        ring = next((part for part in item.path.parts if part in GROUPS), None)
        if ring is not None:
            item.add_marker(pytest.mark.xdist_group(GROUPS[ring]))
