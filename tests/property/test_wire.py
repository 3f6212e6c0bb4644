"""wire/: any bytes give messages or a WireError, and any cutting into chunks gives the same."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_pgrepl.errors import WireError
from airflow_provider_pgrepl.replication.pgoutput import messages
from airflow_provider_pgrepl.replication.pgoutput.columns import NO_TIME, SplitChunk, Splitter
from tests.support import wire_bytes as wire
from tests.support.examples import examples

OIDS = st.integers(0, 2**32 - 1)
LSNS = st.integers(1, 2**63 - 1)
TIMES = st.integers(-(2**53), 2**53)
TEXTS = st.one_of(st.none(), st.text("a1 é漢😀\0\n", max_size=8))
NAMES = st.text('aZ_é漢😀" .', max_size=6)
TUPLES = st.lists(TEXTS, max_size=5)
UNCHANGED_VALUE = st.lists(st.one_of(TEXTS, st.just(...)), max_size=5)
COLUMNS = st.tuples(NAMES, OIDS, st.integers(-(2**31), 2**31 - 1), st.booleans())

CHANGES = st.one_of(
    st.builds(wire.put_insert, OIDS, TUPLES),
    st.builds(wire.put_update, OIDS, UNCHANGED_VALUE),
    st.builds(wire.put_update, OIDS, UNCHANGED_VALUE, TUPLES, st.sampled_from([b"K", b"O"])),
    st.builds(wire.put_delete, OIDS, TUPLES, st.sampled_from([b"K", b"O"])),
    st.builds(wire.put_relation, OIDS, NAMES, NAMES, st.lists(COLUMNS, max_size=3)),
    st.builds(wire.put_truncate, st.lists(OIDS, max_size=3), st.integers(0, 3)),
    st.builds(wire.put_type, OIDS, NAMES, NAMES),
    st.builds(wire.put_origin, LSNS, NAMES),
    st.builds(lambda *of: wire.put_message(*of, transactional=True), LSNS, NAMES, st.binary(max_size=5)),
)
OUTSIDE = st.one_of(
    st.builds(lambda *of: [wire.put_message(*of, transactional=False)], LSNS, NAMES, st.binary(max_size=5)),
    st.builds(lambda *of: [wire.put_type(*of)], OIDS, NAMES, NAMES),
)


@st.composite
def transactions(draw: Any) -> list[bytes]:
    lsn, us, xid = draw(LSNS), draw(TIMES), draw(OIDS)
    changes = draw(st.lists(CHANGES, max_size=6))
    return [wire.put_begin(lsn, xid, us), *changes, wire.put_commit(lsn, draw(LSNS), us)]


@st.composite
def streams(draw: Any) -> list[bytes]:
    """Messages in a legal order, possibly ending inside a transaction."""
    whole = list(chain.from_iterable(draw(st.lists(st.one_of(transactions(), OUTSIDE), max_size=5))))
    return whole[: len(whole) - draw(st.integers(0, 3))] if draw(st.booleans()) else whole


@st.composite
def damaged_streams(draw: Any) -> list[bytes]:
    """Streams with bytes changed, messages cut short, made longer, doubled, swapped or left out."""
    stream = draw(streams())
    for _ in range(draw(st.integers(0, 3))):
        if not stream:
            break
        at = draw(st.integers(0, len(stream) - 1))
        message, how = stream[at], draw(st.integers(0, 5))
        place = draw(st.integers(0, len(message)))
        pieces = [
            [message[:place] + bytes([draw(st.integers(0, 255))]) + message[place + 1 :]],
            [message[:place]],
            [message + draw(st.binary(max_size=4))],
            [message, message],
            [],
            [draw(st.binary(max_size=60))],
        ]
        stream = stream[:at] + pieces[how] + stream[at + 1 :]
    return stream


def cut(stream: Sequence[bytes], places: Sequence[int]) -> list[Sequence[bytes]]:
    bounds = [0, *sorted({place % (len(stream) + 1) for place in places}), len(stream)]
    return [stream[start:stop] for start, stop in pairwise(bounds)]


def split_all(chunks: Sequence[Sequence[bytes]]) -> tuple[list[Any], list[Any], list[Any], bool]:
    splitter = Splitter()
    splits = [splitter.split(chunk) for chunk in chunks]
    return (
        [row for split in splits for row in rows_of(split)],
        [stamped(control) for split in splits for control in split.controls],
        [(end.commit_lsn, end.end_lsn) for split in splits for end in split.ended],
        splitter.is_open,
    )


def rows_of(split: SplitChunk) -> list[tuple[Any, ...]]:
    split.rows.validate(full=True)
    names = ("commit_lsn", "commit_ts", "xid", "ordinal", "relation_id", "op", "new", "old", "unchanged")
    columns = {name: split.rows[name] for name in names}
    columns["commit_ts"] = columns["commit_ts"].cast(pa.int64())
    return list(zip(*(column.to_pylist() for column in columns.values()), strict=True))


def stamped(control: Any) -> tuple[Any, ...]:
    us = None if control.commit_us == NO_TIME else control.commit_us
    return (control.commit_lsn, us, control.xid, control.ordinal, control.tag, control.data)


def by_oracle(stream: Sequence[bytes]) -> tuple[list[Any], list[Any], list[Any], bool] | None:
    oracle = wire.Oracle()
    try:
        for message in stream:
            oracle.take(message)
    except ValueError:
        return None
    return oracle.rows, oracle.controls, oracle.ended, oracle.open


def assert_as_the_plain_reader(stream: Sequence[bytes], chunks: Sequence[Sequence[bytes]]) -> None:
    expected = by_oracle(stream)
    if expected is None:
        with pytest.raises(WireError):
            split_all(chunks)
    else:
        assert split_all(chunks) == expected


@examples(100)
@given(streams(), st.lists(st.integers(0, 99), max_size=4))
def test_a_stream_split_in_any_chunks_is_what_was_put_into_it(stream: list[bytes], places: list[int]) -> None:
    assert split_all(cut(stream, places)) == by_oracle(stream)


@examples(400)
@given(damaged_streams(), st.lists(st.integers(0, 99), max_size=3))
def test_damaged_bytes_are_refused_exactly_where_the_plain_reader_refuses_them(
    stream: list[bytes], places: list[int]
) -> None:
    assert_as_the_plain_reader(stream, cut(stream, places))


@examples(300)
@given(
    st.lists(
        st.tuples(st.sampled_from("BCIUDRTMYO"), st.binary(max_size=60)).map(
            lambda of: wire.wal_data(of[0].encode() + of[1])
        ),
        max_size=5,
    )
)
def test_random_bytes_give_messages_or_a_wire_error(stream: list[bytes]) -> None:
    inside = [wire.put_begin(8, 1), *stream]
    assert_as_the_plain_reader(stream, [stream])
    assert_as_the_plain_reader(inside, [inside])


@examples(100)
@given(st.binary(max_size=60), st.sampled_from("RTM"))
def test_control_messages_parse_or_are_refused(data: bytes, tag: str) -> None:
    parse = {
        "R": messages.parse_relation,
        "T": messages.parse_truncate,
        "M": messages.parse_message,
    }[tag]
    with contextlib.suppress(WireError):
        parse(tag.encode() + data)


@examples(100)
@given(st.data())
def test_every_cut_of_a_control_message_is_refused(data: st.DataObject) -> None:
    message = data.draw(CHANGES)[25:]
    parse = {
        "R": messages.parse_relation,
        "T": messages.parse_truncate,
        "M": messages.parse_message,
    }.get(chr(message[0]))
    if parse is None:
        return
    parse(message)
    for length in range(1, len(message)):
        with pytest.raises(WireError):
            parse(message[:length])
    with pytest.raises(WireError):
        parse(message + b"\0")


@examples(100)
@given(st.lists(st.integers(0, 3), max_size=300), st.integers(0, 2**20))
def test_values_of_any_length_come_out_as_they_went_in(lengths: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    values = ["é" * int(random.integers(0, 40 * length + 1)) for length in lengths]
    stream = [wire.put_begin(8, 1), *(wire.put_insert(7, [value]) for value in values), wire.put_commit(8, 9)]
    assert Splitter().split(stream).rows["new"].to_pylist() == [[value] for value in values]


CHECKED = """
import sys
import pytest
from airflow_provider_pgrepl.replication.runtime import compiled_loops as compiled
# The other loops are not called here.
compiled._SHARES = (("pgoutput.kernels",),)
sys.exit(pytest.main(sys.argv[1:]))
"""


def test_no_byte_outside_the_messages_is_ever_read(tmp_path: Path) -> None:
    """The same tests, with loops compiled to check every index: an IndexError would fail them."""
    command = [sys.executable, "-c", CHECKED, "-q", "-p", "no:cacheprovider", __file__]
    command += ["-k", "damaged or random"]
    environment = {**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
