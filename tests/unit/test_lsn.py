"""postgres/lsn.py: a byte offset that reads and writes as PostgreSQL shows it."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from tests.support.examples import examples


@examples(100)
@given(st.integers(0, 2**64 - 1))
def test_an_lsn_reads_what_it_writes(offset: int) -> None:
    assert LSN.parse(str(LSN(offset))) == offset


@pytest.mark.parametrize(
    ("text", "offset"),
    [("0/0", 0), ("16/B374D848", 0x16B374D848), ("ffffffff/FFFFFFFF", 2**64 - 1), ("1/00", 1 << 32)],
)
def test_it_is_two_hexadecimal_halves(text: str, offset: int) -> None:
    assert LSN.parse(text) == offset


@pytest.mark.parametrize(
    "text", ["", "0", "0/", "/0", "0/0/0", "g/0", "123456789/0", " 0/0", "0/0\n", "-1/0", "0x1/0"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an LSN"):
        LSN.parse(text)


def test_it_compares_and_sorts_as_the_number_it_is() -> None:
    assert LSN.parse("2/0") > LSN.parse("1/FFFFFFFF") > LSN(0)
    assert repr(LSN(255)) == "LSN(0/FF)"
    assert type(pickle.loads(pickle.dumps(LSN(7)))) is LSN
