"""The equality of rows in a lake table, type by type."""

from __future__ import annotations

import struct
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from airflow_provider_pgrepl.replication.lake.files.row_equality import row_codes

ODD_NAN = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000123))[0]
STRUCT = pa.struct([("x", pa.int64()), ("y", pa.list_(pa.string()))])


@pytest.mark.parametrize(
    ("kind", "different"),
    [
        (pa.int64(), [None, 0, 1, -1]),
        (pa.float64(), [None, float("nan"), 0.0, -0.0, 1.5, float("inf")]),
        (pa.float32(), [None, float("nan"), 0.0, -0.0]),
        (pa.bool_(), [None, True, False]),
        (pa.string(), [None, "", "a", "ä"]),
        (pa.binary(), [None, b"", b"\x00", b"\x00\x00"]),
        (pa.decimal128(38, 2), [None, Decimal("0.00"), Decimal("0.01")]),
        (pa.timestamp("us", "UTC"), [None, 0, 1]),
        (pa.list_(pa.int64()), [None, [], [None], [1], [1, None], [None, 1], [1, 1]]),
        (pa.list_(pa.float64()), [[float("nan")], [0.0], [-0.0]]),
        (pa.list_(pa.list_(pa.string())), [None, [], [[]], [None], [[], []], [["a, b"]], [["a", "b"]]]),
        (STRUCT, [None, {"x": None, "y": None}, {"x": 1, "y": []}, {"x": 1, "y": None}]),
        (pa.map_(pa.string(), pa.string()), [None, [], [("a", None)], [("a", "")], [("a", "b")]]),
        (pa.list_(STRUCT), [[None], [{"x": None, "y": None}], []]),
    ],
)
def test_equal_values_share_a_code_and_different_ones_do_not(kind: pa.DataType, different: list[Any]) -> None:
    values = pa.array([different[0], *different, *reversed(different)], kind)
    codes = row_codes([values.slice(1)], len(values) - 1)
    assert len(set(codes[: len(different)].tolist())) == len(different)
    assert codes[len(different) :].tolist() == codes[: len(different)][::-1].tolist()


def test_every_nan_is_the_same() -> None:
    values = pa.array(np.array([float("nan"), ODD_NAN, -float("nan")]))
    assert len(set(row_codes([values], 3).tolist())) == 1


def test_values_beneath_nulls_do_not_affect_row_codes() -> None:
    beneath = pa.StructArray.from_arrays([pa.array([1, 2])], ["x"], mask=pa.array([True, True]))
    assert len(set(row_codes([beneath], 2).tolist())) == 1
    lists = pa.ListArray.from_arrays(
        pa.array([0, 1, 2], pa.int32()), pa.array([1, 2]), mask=pa.array([True, True])
    )
    assert len(set(row_codes([lists], 2).tolist())) == 1


def test_rows_are_equal_when_all_their_columns_are() -> None:
    one, two = pa.array([1, 1, 1, None, None]), pa.array(["a", "b", "a", None, None])
    assert row_codes([one, two], 5).tolist() == [0, 1, 0, 2, 2]
    assert row_codes([], 3).tolist() == [0, 0, 0]
    assert row_codes([pa.array([], pa.int64())] * 2, 0).tolist() == []
