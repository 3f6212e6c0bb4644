"""The demo's comparison must see each kind of difference, or its verdict is worth nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from demo.comparison import compare
from demo.errors import DemoError
from demo.lake import Lake

SOURCE = [(1, "a   ", None), (2, "b   ", 20), (3, "c   ", 30)]


class LakeOf(Lake):
    """A lake that holds these rows."""

    def __init__(self, rows: list[tuple[object, ...]]) -> None:
        self._held = rows

    def rows(self, table: str, columns: str, order: str) -> Iterator[tuple[object, ...]]:
        assert (columns, order) == ("id, code, n", "id")
        return iter(self._held)


@pytest.fixture
def table(pg) -> str:
    with pg.cursor() as cursor:
        cursor.execute("create table item (id int primary key, gone int, code char(4), n int)")
        cursor.execute("alter table item drop column gone")
        cursor.executemany("insert into item values (%s, %s, %s)", SOURCE)
    return "public.item"


def test_equal_rows_are_equal(dsn, table):
    result = compare(dsn, LakeOf(SOURCE), table)
    assert (result.rows, result.differences) == (3, 0)


@pytest.mark.parametrize(
    ("held", "differences"),
    [
        ([(1, "a   ", None), (2, "b   ", 21), (3, "c   ", 30)], 1),
        ([(1, "a", None), (2, "b   ", 20), (3, "c   ", 30)], 1),
        ([(1, "a   ", 0), (2, "b   ", 20), (3, "c   ", 30)], 1),
        (SOURCE[:2], 1),
        ([*SOURCE, (4, "d   ", 40)], 1),
        ([SOURCE[0], *SOURCE], 3),
        ([], 3),
    ],
    ids=["value", "padding", "null", "missing", "too many", "doubled", "empty"],
)
def test_every_difference_is_counted(dsn, table, held, differences):
    assert compare(dsn, LakeOf(held), table).differences == differences


def test_a_lake_without_a_point_is_said_to_be_so(tmp_path):
    from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline

    lake = Lake(Pipeline(name="p", tables=("public.item",), lake=str(tmp_path)))
    assert lake.check_balance() is None
    with pytest.raises(DemoError, match="no consistent point"):
        list(lake.rows("public.item", "id", "id"))
