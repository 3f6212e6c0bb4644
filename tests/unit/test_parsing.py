"""Tests read the package's source as syntax trees: what is collected meanwhile must not break them."""

import ast
import gc
import inspect
import traceback
from collections.abc import Iterator

import pytest

SOURCE = inspect.getsource(traceback)


class Fails:
    """Its finalizer formats a traceback, for which Python 3.11 parses the line that failed."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        try:
            {}["key"]["other"] + 1
        except KeyError:
            traceback.format_exc()


@pytest.fixture
def eager_collector() -> Iterator[None]:
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*thresholds)


@pytest.mark.usefixtures("eager_collector")
def test_collector_does_not_run_during_a_parse() -> None:
    for _ in range(20):
        Fails()
        ast.parse(SOURCE)
