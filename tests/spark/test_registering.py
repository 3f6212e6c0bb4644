"""Lake tables in Hive's metastore, through Spark's own catalog: what is registered stays true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.replication.storage import open_delta
from tests.support.landed import Landed
from tests.support.replicated import execute
from tests.support.spark_program import said_by

PROGRAM = Path(__file__).with_name("registering.py")
TABLE = "public.orders"


@pytest.fixture
def landed(dsn: str, tmp_path: Path) -> Landed:
    # The column that tells a table's place in Spark's words is called so, too.
    execute(dsn, 'create table orders (id bigint primary key, state text, "Location" text)')
    found = Landed(dsn, tmp_path, (TABLE,), name="shop")
    found.begin()
    change(found, "insert into orders values (1, 'new'), (2, 'new')")
    return found


def change(landed: Landed, *statements: str) -> None:
    execute(landed.dsn, *statements)
    landed.receive()
    assert [result.error for result in landed.apply()] == [None]


def registered(landed: Landed, folder: Path) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    [said] = said_by(PROGRAM, str(landed.file), str(folder), folder=folder)
    return dict(said)


def test_a_registered_table_shows_what_comes_and_how_it_evolves(landed, tmp_path):
    """Registering commits nothing to the lake: its writer would take that for a stranger's."""
    folder = tmp_path / "catalog"
    before = open_delta(landed.lake_path(TABLE)).version()
    first = registered(landed, folder)
    assert (first["name"], first["rows"]) == ("shop.public_orders", [[1, "new"], [2, "new"]])
    assert open_delta(landed.lake_path(TABLE)).version() == before
    change(landed, "alter table orders add column total int", "update orders set state = 'paid' where id = 2")
    second = registered(landed, folder)
    assert second["rows"] == [[1, "new"], [2, "paid"]]
    assert set(second["columns"]) - set(first["columns"]) == {"total"}


def test_a_name_that_something_else_has_is_refused(landed, dsn, tmp_path):
    folder = tmp_path / "catalog"
    registered(landed, folder)
    (tmp_path / "other").mkdir()
    other = Landed(dsn, tmp_path / "other", (TABLE,), name="other_shop", target_database="shop")
    other.begin()
    change(other, "insert into orders values (3, 'new')")
    said = registered(other, folder)
    assert said["error"] == "LakeError"
    assert "shop.public_orders stands for another place" in said["said"]
