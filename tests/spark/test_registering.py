"""Lake tables in Spark's own catalog, in memory and in Hive's metastore: what is registered stays true."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_pgrepl.replication.delta.table import open_delta
from tests.spark.registering import registered
from tests.support.landed import Landed
from tests.support.replicated import execute
from tests.support.spark_program import asking

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PROGRAM = Path(__file__).with_name("registering.py")
TABLE = "public.orders"

Register = Callable[[Landed], dict[str, Any]]


@pytest.fixture(scope="module")
def in_hives_metastore(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Register]:
    """Registers in one program with a metastore, each time by a session that has read nothing."""
    folder = tmp_path_factory.mktemp("metastore")
    with asking(PROGRAM, str(folder), folder=folder) as ask:

        def register(landed: Landed) -> dict[str, Any]:
            [said] = ask(str(landed.file))
            return dict(said)

        yield register


@pytest.fixture
def in_memory(spark: SparkSession, landed: Landed) -> Iterator[Register]:
    """Registers in the catalog of the tests' session; each time by a session that has read nothing."""

    def register(landed: Landed) -> dict[str, Any]:
        [said] = registered(spark.newSession(), landed.pipeline)
        return said

    yield register
    spark.sql(f"drop database if exists {landed.pipeline.name} cascade")


@pytest.fixture(
    params=[
        "in_memory",
        pytest.param(
            "in_hives_metastore",
            marks=pytest.mark.thorough("test_registering.py, in the memory of a session"),
        ),
    ]
)
def register(request: pytest.FixtureRequest) -> Register:
    found: Register = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def landed(dsn: str, tmp_path: Path) -> Landed:
    # The column that tells a table's place in Spark's words is called so, too.
    execute(dsn, 'create table orders (id bigint primary key, state text, "Location" text)')
    found = Landed(dsn, tmp_path, (TABLE,))
    found.begin()
    change(found, "insert into orders values (1, 'new'), (2, 'new')")
    return found


def change(landed: Landed, *statements: str) -> None:
    execute(landed.dsn, *statements)
    landed.receive()
    assert [result.error for result in landed.apply()] == [None]


def test_registered_table_shows_new_rows_and_columns(landed, register):
    """Registering commits nothing to the lake: its writer would take the commit for another writer's."""
    before = open_delta(landed.lake_path(TABLE)).version()
    first = register(landed)
    name = f"{landed.pipeline.name}.public_orders"
    assert (first["name"], first["rows"]) == (name, [[1, "new"], [2, "new"]])
    assert open_delta(landed.lake_path(TABLE)).version() == before
    change(landed, "alter table orders add column total int", "update orders set state = 'paid' where id = 2")
    second = register(landed)
    assert second["rows"] == [[1, "new"], [2, "paid"]]
    assert set(second["columns"]) - set(first["columns"]) == {"total"}


@pytest.mark.thorough("integration/test_unity_catalog: a conflicting entry is kept")
def test_name_of_another_table_is_refused(landed, register, dsn, tmp_path):
    register(landed)
    shop = landed.pipeline.name
    (tmp_path / "other").mkdir()
    other = Landed(dsn, tmp_path / "other", (TABLE,), name=f"{shop}_2", target_database=shop)
    other.begin()
    change(other, "insert into orders values (3, 'new')")
    said = register(other)
    assert said["error"] == "LakeError"
    assert f"{shop}.public_orders stands for another place" in said["said"]
