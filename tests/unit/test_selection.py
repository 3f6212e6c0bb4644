"""tests/selection.py: which tests a worker of xdist runs together."""

from __future__ import annotations

import pytest


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
