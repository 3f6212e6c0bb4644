"""The selection of a run's tests and PostgreSQL majors, and their distribution to xdist's workers.

| tier | command | tests |
|---|---|---|
| fast | `make test-fast` | unit, property and integration; no `slow` ones, no Spark, brokers and stores |
| test | `make test` | one test of each mechanism; those that differ by major on the oldest and the newest |
| rest | second part of `make test-all` | what `test` leaves out; more examples of Hypothesis |
| all | `make test-all`, and `pytest` by itself | both |
"""

from __future__ import annotations

import functools
import itertools
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

MAJORS = os.environ.get("PGREPL_TEST_PG_MAJORS", "18").split()
"""The majors of tests that are marked `differs_by_major`; all other tests run on the last of these."""
TIERS = ("fast", "test", "rest", "all")
FETCHED_BY_TEST_ALL = frozenset({"gateway", "other_store", "kafka", "kafka_broker", "registry", "debezium"})
"""Fixtures of servers that only `make test-all` fetches or builds."""
NOT_FAST = frozenset({"spark", "broker", "jetstream", "debian", "airflow_db"})
"""Fixtures that take seconds to start."""
STARTS_SPARK = ("spark", "end_to_end", "fault")
"""Rings whose tests mostly wait."""
_SECONDS = {"end_to_end": 120, "fault": 60, "spark": 12}
"""Seconds that a test of a ring takes in the mean."""
_SHORT_ORDER = {"property": 1, "unit": 2}
"""Rings of whose tests a whole file takes seconds; a file of the first takes longer."""
NEVER_FAST = (*STARTS_SPARK, "airflow")
SPARK_SESSIONS = 2
"""Workers that start a Spark session of their own: a JVM needs 40 s of CPU time until it is warm."""
AIRFLOWS = 2
"""Workers that import Airflow, and keep a process that has imported it: each needs 10 s of CPU time."""


def parametrize_majors(metafunc: pytest.Metafunc) -> None:
    """Run a test that is marked `differs_by_major` on each major from which servers differ."""
    marks = list(metafunc.definition.iter_markers("differs_by_major"))
    if not all(mark.args for mark in marks):
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: say in differs_by_major(…) what differs")
    if len(MAJORS) > 1 and marks:
        metafunc.fixturenames.append("major")
        metafunc.parametrize("major", majors_of(marks, MAJORS), indirect=True, scope="session")


def majors_of(marks: Sequence[pytest.Mark], majors: Sequence[str]) -> list[str]:
    """Return those of the majors on which a test with these marks `differs_by_major` runs.

    If each mark names by `since` the first majors with another behavior, these are the majors on both sides
    of each, the oldest and the newest. Otherwise these are all majors.
    """
    if not all("since" in mark.kwargs for mark in marks):
        return list(majors)
    firsts = [first for mark in marks for first in mark.kwargs["since"]]
    chosen = {majors[0], majors[-1]}
    for before, after in itertools.pairwise(majors):
        if any(int(before) < first <= int(after) for first in firsts):
            chosen |= {before, after}
    return [major for major in majors if major in chosen]


def mark_group(item: pytest.Item) -> None:
    """Mark what one worker is to run together. When tests are selected xdist has read the marks already."""
    if (group := _group(item)) != item.nodeid:
        item.add_marker(pytest.mark.xdist_group(group))


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of other tiers, and order the rest so that some wait while others compute."""
    if not any("::" in argument for argument in config.args) and not config.getoption("keyword"):
        _check_marks(items)
    tier = config.getoption("tier")
    kept = [item for item in items if _is_in(item, tier) and not _is_further_seed(item)]
    left_out = set(items) - set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    for item in kept:
        if any(item.iter_markers("real_kill")):
            item.add_marker(pytest.mark.flaky(reruns=1))
    waiting = [item for item in kept if ring(item) in STARTS_SPARK]
    computing = [item for item in kept if ring(item) not in STARTS_SPARK]
    items[:] = _alternating(_largest_first(waiting), _largest_first(computing))


def is_left_out(path: Path, tier: str) -> bool:
    """Return True for a ring of which the tier has no test: to import its files takes seconds."""
    return tier == "fast" and path.parent == Path(__file__).parent and path.name in NEVER_FAST


def _is_in(item: pytest.Item, tier: str) -> bool:
    thorough = is_thorough(item)
    if tier == "fast":
        return not thorough and _is_fast(item)
    if tier == "rest":
        return thorough or getattr(getattr(item, "function", None), "is_hypothesis_test", False)
    return tier == "all" or not thorough


def is_thorough(item: pytest.Item) -> bool:
    if any(_is_of(item, mark.args[1:]) for mark in item.iter_markers("thorough")):
        return True
    if _values(item).get("seed", 1) > 1:
        return True
    if "seed" in _values(item) and _major(item) != MAJORS[-1]:
        return True
    # Cheaper rings show what differs by major.
    shown_on = (MAJORS[-1],) if ring(item) in STARTS_SPARK else (MAJORS[0], MAJORS[-1])
    return _major(item) not in shown_on or not FETCHED_BY_TEST_ALL.isdisjoint(_fixtures(item))


def _is_of(item: pytest.Item, parameters: Sequence[str]) -> bool:
    """Return True if the item has one of the parameters, or if none is given."""
    return not parameters or _parameters(item) in parameters


def _parameters(item: pytest.Item) -> str:
    """Return the ID of a test's parameters, without that of its major."""
    if not (isinstance(item, pytest.Function) and hasattr(item, "callspec")):
        return ""
    major = f"{_major(item)}-" if "major" in _values(item) else ""
    return str(item.callspec.id).removeprefix(major)


def _check_marks(items: list[pytest.Item]) -> None:
    """Raise UsageError if a mark `thorough` names parameters that its test does not have."""
    found, named = set[str](), set[str]()
    for item in items:
        test = item.nodeid.partition("[")[0]
        found.add(f"{test}[{_parameters(item)}]")
        named |= {f"{test}[{one}]" for mark in item.iter_markers("thorough") for one in mark.args[1:]}
    if wrong := sorted(named - found):
        raise pytest.UsageError(f"marked as thorough, and not there: {', '.join(wrong)}")


def _is_fast(item: pytest.Item) -> bool:
    if ring(item) in NEVER_FAST or any(item.iter_markers("slow")):
        return False
    return NOT_FAST.isdisjoint(_fixtures(item))


def _is_further_seed(item: pytest.Item) -> bool:
    """Return True for any seed but the first on any major but the last."""
    return _major(item) != MAJORS[-1] and _values(item).get("seed", 1) > 1


def _fixtures(item: pytest.Item) -> set[str]:
    return set(getattr(item, "fixturenames", ()))


def _major(item: pytest.Item) -> str:
    return str(_values(item).get("major", MAJORS[-1]))


def _values(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


def ring(item: pytest.Item) -> str:
    """Return the folder of the test below `tests/`."""
    return _ring_of(item.path)


@functools.cache
def _ring_of(path: Path) -> str:
    return path.relative_to(Path(__file__).parent).parts[0]


def _group(item: pytest.Item) -> str:
    """Return the name of what one worker runs: a test, or tests that share something dear."""
    assert isinstance(item, pytest.Function)
    if "spark" in _fixtures(item):
        if ring(item) == "fault" and item.config.getoption("tier") == "rest":
            # They take longer than all others that need a session: in its group they would end alone.
            return "spark-faults"
        return f"spark-{zlib.crc32(item.path.name.encode()) % SPARK_SESSIONS}"
    if "broker" in _fixtures(item) and ring(item) in ("integration", "airflow"):
        return "rabbitmq"
    if "debian" in _fixtures(item):
        return "debian"
    if ring(item) == "airflow":
        return f"airflow-{zlib.crc32(item.path.name.encode()) % AIRFLOWS}"
    if ring(item) == "end_to_end":
        # Each has an Airflow: several at once wait for one another until they give up on a slow machine.
        return item.path.name
    definitions = item._fixtureinfo.name2fixturedefs.values()
    shares = any(found and found[-1].scope == "module" for found in definitions)
    return f"{item.path.name}-{_major(item)}" if shares or ring(item) not in STARTS_SPARK else item.nodeid


def _largest_first(items: list[pytest.Item]) -> list[list[pytest.Item]]:
    """Return the groups, those of short rings last, and those that take longest before others.

    A long one that began late would run on one worker when all others have ended.
    """

    def place(group: list[pytest.Item]) -> tuple[int, int]:
        of = ring(group[0])
        return _SHORT_ORDER.get(of, 0), -_SECONDS.get(of, 1) * len(group)

    return sorted(_by_group(items), key=place)


def _by_group(items: list[pytest.Item]) -> list[list[pytest.Item]]:
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(_group(item), []).append(item)
    return list(groups.values())


def _alternating(some: list[list[pytest.Item]], others: list[list[pytest.Item]]) -> list[pytest.Item]:
    """Return both in their order, spread evenly."""
    places = [((n + 0.5) / len(groups), group) for groups in (some, others) for n, group in enumerate(groups)]
    return [item for _, group in sorted(places, key=lambda place: place[0]) for item in group]
