"""A process that flushes nothing: a flush takes milliseconds, and a commit of a table needs several."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def unflushed() -> Iterator[None]:
    """Have no flush reach the disk; tests of what is flushed when have an `os.fsync` of their own."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda _: None)
        yield
