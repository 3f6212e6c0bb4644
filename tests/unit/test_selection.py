"""tests/selection.py: which tests a worker of xdist runs together."""

from __future__ import annotations

import pytest

from tests.selection import is_thorough, majors_of


@pytest.fixture(scope="module")
def shared() -> None:
    """A fixture that the tests of this file share."""


def test_tests_that_share_a_fixture_of_their_module_run_on_one_worker(
    shared: None, request: pytest.FixtureRequest
) -> None:
    mark = request.node.get_closest_marker("xdist_group")
    assert mark is not None
    assert mark.args[0].startswith("test_selection.py-")
    if hasattr(request.config, "workerinput"):
        assert request.node.nodeid.endswith(f"@{mark.args[0]}"), "xdist has not read the group"


MAJORS = ("14", "15", "16", "17", "18")


@pytest.mark.parametrize(
    ("since", "majors"),
    [
        ([None], "14 15 16 17 18"),
        ([(15,)], "14 15 18"),
        ([(18,)], "14 17 18"),
        ([(15, 18)], "14 15 17 18"),
        ([(15,), (17,)], "14 15 16 17 18"),
        ([(15,), None], "14 15 16 17 18"),
    ],
)
def test_test_runs_on_both_sides_of_each_major_with_another_behavior(
    since: list[tuple[int, ...] | None], majors: str
) -> None:
    differs = pytest.mark.differs_by_major
    marks = [differs("", **({} if one is None else {"since": one})).mark for one in since]
    assert " ".join(majors_of(marks, MAJORS)) == majors
    assert majors_of(marks, ("14", "18")) == ["14", "18"]


@pytest.mark.parametrize("letter", ["a", "b"])
@pytest.mark.thorough("the parameter a", "b")
def test_mark_with_parameters_holds_for_these_alone(letter: str, request: pytest.FixtureRequest) -> None:
    assert is_thorough(request.node) is (letter == "b")
