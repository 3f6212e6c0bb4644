"""Deletion vectors as Delta's protocol has them: the bitmaps, their files, and how the log names them."""

from __future__ import annotations

import tempfile
import uuid
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import fs
from pyroaring import BitMap64

from airflow_provider_pgrepl.errors import LakeTableError
from airflow_provider_pgrepl.replication.lake.delta.deletion_vector import (
    VectorRecord,
    encode,
    from_z85,
    read_vector,
    to_z85,
    vector_path,
)
from tests.support.examples import examples

FILES = fs.LocalFileSystem()

# From Delta's PROTOCOL.md, "Deletion Vectors". The first is in the native format of Roaring bitmaps, which
# files never have, as the same page says; no writer produces it.
NATIVE = {
    "storageType": "i",
    "pathOrInlineDv": "wi5b=000010000siXQKl0rr91000f55c8Xg0@@D72lkbi5=-{L",
    "sizeInBytes": 40,
    "cardinality": 6,
}
IN_A_FILE = {
    "storageType": "u",
    "pathOrInlineDv": "ab^-aqEH.-t@S}K{vb[*k^",
    "offset": 4,
    "sizeInBytes": 40,
    "cardinality": 6,
}

row_numbers = st.sets(st.one_of(st.integers(0, 200), st.integers(0, 2**21), st.integers(0, 2**40)))


def record_of(told: dict[str, object]) -> VectorRecord:
    record = VectorRecord.of_action(told)
    assert record is not None
    return record


def test_the_protocols_own_examples_are_understood() -> None:
    assert record_of(IN_A_FILE).path == "ab/deletion_vector_d2c639aa-8816-431a-aaf6-d3fe2512ff61.bin"
    assert [record_of(told).to_action() for told in (NATIVE, IN_A_FILE)] == [NATIVE, IN_A_FILE]
    assert record_of(NATIVE).path is None
    with pytest.raises(LakeTableError, match="in the log does not match"):
        read_vector(FILES, "/nowhere", record_of(NATIVE))


def test_a_vector_in_the_log_itself_is_read() -> None:
    content, records = encode({"part": BitMap64([3, 4, 29])}, uuid.uuid4())
    bitmap = content[records["part"].offset + 4 :][: records["part"].size]
    text = to_z85(bitmap + bytes(-len(bitmap) % 4))
    told = {"storageType": "i", "pathOrInlineDv": text, "sizeInBytes": len(bitmap), "cardinality": 3}
    assert sorted(read_vector(FILES, "/nowhere", record_of(told))) == [3, 4, 29]


@given(st.lists(row_numbers, min_size=1, max_size=4))
@examples(100)
def test_vectors_are_read_as_they_were_written(several: list[set[int]]) -> None:
    name = uuid.uuid4()
    vectors = {f"part-{number}": BitMap64(rows) for number, rows in enumerate(several)}
    content, records = encode(vectors, name)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / vector_path(name)).write_bytes(content)
        for path, record in records.items():
            assert record.path == vector_path(name)
            assert record.rows == len(vectors[path])
            assert read_vector(FILES, folder, record_of(record.to_action())) == vectors[path]
    assert max(record.end for record in records.values()) == len(content)


@examples(100)
@given(st.binary(max_size=64).filter(lambda data: len(data) % 4 == 0))
def test_base_85_goes_both_ways(data: bytes) -> None:
    assert from_z85(to_z85(data)) == data


def test_base_85_is_that_of_zeromq() -> None:
    # The example of https://rfc.zeromq.org/spec/32/
    assert to_z85(bytes.fromhex("864fd26fb559f75b")) == "HelloWorld"


@pytest.mark.parametrize("text", ["Hell", "Hello~orld", "%nSc1", "#####"])
def test_decoding_invalid_base_85_raises_lake_table_error(text: str) -> None:
    with pytest.raises(LakeTableError, match="not Delta's"):
        from_z85(text)


@pytest.mark.parametrize("damage", ["size", "bitmap", "checksum", "cardinality", "magic", "short"])
def test_a_damaged_vector_is_refused(damage: str, tmp_path: Path) -> None:
    name = uuid.uuid4()
    content, records = encode({"part": BitMap64([1, 5, 2**33])}, name)
    told, damaged = records["part"].to_action(), bytearray(content)
    at = {"size": 1, "bitmap": 30, "checksum": len(content) - 1, "magic": 5}.get(damage)
    if at is not None:
        damaged[at] ^= 1
    if damage == "short":
        del damaged[-10:]
    if damage == "cardinality":
        told["cardinality"] += 1
    (tmp_path / vector_path(name)).write_bytes(damaged)
    with pytest.raises(LakeTableError, match="does not match its entry") as caught:
        read_vector(FILES, str(tmp_path), record_of(told))
    assert caught.value.message.startswith(f"{tmp_path}: the deletion vector in deletion_vector_")


def test_a_vector_elsewhere_is_refused() -> None:
    told = {**IN_A_FILE, "storageType": "p", "pathOrInlineDv": "s3://other/deletion_vector_x.bin"}
    with pytest.raises(LakeTableError, match="outside of the table"):
        read_vector(FILES, "/nowhere", record_of(told))
