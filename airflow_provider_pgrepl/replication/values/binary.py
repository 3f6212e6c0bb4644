"""bytea."""

from __future__ import annotations

from binascii import Error as NotHex
from binascii import unhexlify

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from airflow_provider_pgrepl.replication.postgres.relation import PgType
from airflow_provider_pgrepl.replication.settings.tables import ColumnChoice
from airflow_provider_pgrepl.replication.values.parser import not_output_of_type

_PREFIX = "\\x"
_INT32_MAX = 2**31 - 1


class Binary:
    """bytea, written `\\x…` in hexadecimal digits, as bytes."""

    lake_type: pa.DataType = pa.binary()
    csv_type: pa.DataType | None = None

    def parse(self, texts: pa.Array) -> pa.Array:
        """All rows at once: their digits are one run of bytes once the prefixes are taken out."""
        if pc.all(pc.starts_with(texts, _PREFIX)).as_py() is False:
            raise not_output_of_type()
        lengths = pc.fill_null(pc.binary_length(texts), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        digits_per_row = np.maximum(lengths - len(_PREFIX), 0)
        digits = _text_bytes(texts).translate(None, _PREFIX.encode())
        if len(digits) != digits_per_row.sum() or (digits_per_row & 1).any():
            raise not_output_of_type()
        try:
            data = unhexlify(digits)
        except NotHex:
            raise not_output_of_type() from None
        offsets = np.zeros(len(texts) + 1, np.int64)
        np.cumsum(digits_per_row >> 1, out=offsets[1:])
        return _binary_array(offsets, data, texts)


def _text_bytes(texts: pa.Array) -> bytes:
    """The bytes of all rows, without what a slice or a null hides."""
    if texts.null_count:
        texts = texts.drop_null()
    if len(texts) == 0:
        return b""
    _, offsets, data = texts.buffers()
    width = np.int64 if pa.types.is_large_string(texts.type) else np.int32
    bounds = np.frombuffer(offsets, width)
    first, last = int(bounds[texts.offset]), int(bounds[texts.offset + len(texts)])
    return b"" if data is None else data.slice(first, last - first).to_pybytes()


def _binary_array(offsets: NDArray[np.int64], data: bytes, texts: pa.Array) -> pa.Array:
    validity = None
    if texts.null_count:
        validity = pa.array(texts.is_valid().to_numpy(zero_copy_only=False)).buffers()[1]
    if len(data) <= _INT32_MAX:
        arrow_type, bounds = pa.binary(), pa.py_buffer(offsets.astype(np.int32))
    else:
        arrow_type, bounds = pa.large_binary(), pa.py_buffer(offsets)
    buffers = [validity, bounds, pa.py_buffer(data)]
    return pa.Array.from_buffers(arrow_type, len(texts), buffers, null_count=texts.null_count)


def binary(_: PgType, __: ColumnChoice) -> Binary:
    """bytea."""
    return Binary()
