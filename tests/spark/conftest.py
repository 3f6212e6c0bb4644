"""One Spark session for all tests of this ring."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from airflow_provider_pgrepl.replication.lake.session import JARS_VARIABLE, build_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """`local[2]` with Delta; `make jars` fetches what it needs."""
    os.environ.setdefault(JARS_VARIABLE, str(Path(__file__).parents[2] / ".jars"))
    session = build_session("pgrepl-tests", master="local[2]")
    yield session
    session.stop()
