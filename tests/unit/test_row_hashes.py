"""lake/verify/row_hashes.py: equal values have equal hashes, different ones have not."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from airflow_provider_pgrepl.replication.lake.verify.row_hashes import RowHashes, hashes_of

# Computed by the reference implementation, MurmurHash3_x64_128 with seed 0.
_KNOWN = {
    b"": "00000000000000000000000000000000",
    b"hello": "cbd8a7b341bd9b025b1e906a48ae1d19",
    b"hello, world": "342fac623a5ebc8e4cdcbc079642414d",
    b"The quick brown fox jumps over the lazy dog.": "cd99481f9ee902c9695da1a38987b6e7",
}


@pytest.mark.parametrize("data", _KNOWN)
def test_hash_of_bytes_is_that_of_the_reference_implementation(data: bytes) -> None:
    found = hashes_of([pa.array([data], pa.binary())], 1)
    assert f"{found.h1[0]:016x}{found.h2[0]:016x}" == _KNOWN[data]


_PART = pa.struct([("a", pa.int32()), ("b", pa.string())])
_VALUES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "bool": (pa.bool_(), [None, True, False]),
    "int16": (pa.int16(), [None, 0, 1, -1, 300]),
    "int64": (pa.int64(), [None, 0, -1, 2**62]),
    "uint64": (pa.uint64(), [None, 0, 2**64 - 1]),
    "float": (pa.float32(), [None, 0.0, -0.0, 1.5, math.nan, math.inf]),
    "double": (pa.float64(), [None, 0.0, -0.0, 1.5, math.nan, -math.inf]),
    "decimal": (pa.decimal128(38, 2), [None, Decimal("0.00"), Decimal("-0.01"), Decimal(2**70)]),
    "date": (pa.date32(), [None, date(1970, 1, 1), date(1, 1, 1)]),
    "ts": (
        pa.timestamp("us", "UTC"),
        [None, datetime(1970, 1, 1, tzinfo=UTC), datetime(1, 1, 1, tzinfo=UTC)],
    ),
    "text": (pa.string(), [None, "", "a", "ä" * 40, "a\0"]),
    "bytes": (pa.binary(), [None, b"", b"\0", b"\0\0"]),
    "list": (pa.list_(pa.int32()), [None, [], [None], [1], [1, 2], [2, 1], [0]]),
    "texts": (pa.list_(pa.string()), [None, [], ["ab", "c"], ["a", "bc"], [""]]),
    "struct": (_PART, [None, {"a": None, "b": None}, {"a": 1, "b": "x"}, {"a": 1, "b": ""}]),
    "map": (pa.map_(pa.string(), pa.string()), [None, [], [("a", None)], [("a", "")], [("", "a")]]),
    "structs": (pa.list_(_PART), [None, [None], [{"a": None, "b": None}], [{"a": 1, "b": "x"}] * 2]),
}


def _pairs(hashes: RowHashes) -> list[tuple[int, int]]:
    return list(zip(hashes.h1.tolist(), hashes.h2.tolist(), strict=True))


@pytest.mark.parametrize("name", _VALUES)
def test_different_values_of_a_type_have_different_hashes_and_equal_ones_the_same(name: str) -> None:
    kind, values = _VALUES[name]
    once = _pairs(hashes_of([pa.array(values, kind)], len(values), (7, 8)))
    assert len(set(once)) == len(values)
    # A slice of a longer array has other offsets into the same buffers.
    padded = pa.array([*values[1:], *values, values[-1]], kind).slice(len(values) - 1, len(values))
    assert _pairs(hashes_of([padded], len(values), (7, 8))) == once
    assert not set(once) & set(_pairs(hashes_of([pa.array(values, kind)], len(values), (7, 9))))


def test_every_nan_has_the_same_hash() -> None:
    bits = np.array([0x7FF8000000000000, 0x7FF8000000000001, 0xFFF8000000000000], np.uint64)
    found = hashes_of([pa.array(bits.view(np.float64))], 3)
    assert len(set(_pairs(found))) == 1


def test_swapped_columns_have_another_hash() -> None:
    one, two = pa.array(["a", "b"]), pa.array(["c", "d"])
    assert not set(_pairs(hashes_of([one, two], 2))) & set(_pairs(hashes_of([two, one], 2)))
