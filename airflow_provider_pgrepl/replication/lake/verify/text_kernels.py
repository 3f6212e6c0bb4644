"""The compiled function that computes PostgreSQL's `hashtextextended`, which is lookup3 with a 64-bit seed.

https://github.com/postgres/postgres/blob/REL_18_STABLE/src/common/hashfn.c (hash_bytes_extended). Servers on
big-endian hosts have other hashes.
"""

from __future__ import annotations

import numpy as np

from airflow_provider_pgrepl.replication.runtime.compiled_loops import (
    BYTES,
    FLAGS,
    HASHES_OUT,
    INTS,
    inner,
    loop,
)

_WORD = np.uint64(0xFFFFFFFF)
_START = np.uint64(0x9E3779B9 + 3923095)
_ZERO, _ONE, _BITS = np.uint64(0), np.uint64(1), np.uint64(32)
_R4, _R6, _R8, _R11, _R14 = np.uint64(4), np.uint64(6), np.uint64(8), np.uint64(11), np.uint64(14)
_R16, _R19, _R24, _R25 = np.uint64(16), np.uint64(19), np.uint64(24), np.uint64(25)
_BLOCK = 12


@inner
def _rotated(word, by):  # type: ignore[no-untyped-def]
    return ((word << by) | (word >> (_BITS - by))) & _WORD


@inner
def _mixed(a, b, c):  # type: ignore[no-untyped-def]
    a = ((a - c) & _WORD) ^ _rotated(c, _R4)
    c = (c + b) & _WORD
    b = ((b - a) & _WORD) ^ _rotated(a, _R6)
    a = (a + c) & _WORD
    c = ((c - b) & _WORD) ^ _rotated(b, _R8)
    b = (b + a) & _WORD
    a = ((a - c) & _WORD) ^ _rotated(c, _R16)
    c = (c + b) & _WORD
    b = ((b - a) & _WORD) ^ _rotated(a, _R19)
    a = (a + c) & _WORD
    c = ((c - b) & _WORD) ^ _rotated(b, _R4)
    return a, (b + a) & _WORD, c


@inner
def _finished(a, b, c):  # type: ignore[no-untyped-def]
    c = ((c ^ b) - _rotated(b, _R14)) & _WORD
    a = ((a ^ c) - _rotated(c, _R11)) & _WORD
    b = ((b ^ a) - _rotated(a, _R25)) & _WORD
    c = ((c ^ b) - _rotated(b, _R16)) & _WORD
    a = ((a ^ c) - _rotated(c, _R4)) & _WORD
    b = ((b ^ a) - _rotated(a, _R14)) & _WORD
    c = ((c ^ b) - _rotated(b, _R24)) & _WORD
    return (b << _BITS) | c


@inner
def _little_endian(data, start, end):  # type: ignore[no-untyped-def]
    """Return up to 4 bytes as a little-endian word."""
    word = _ZERO
    for at in range(end - 1, start - 1, -1):
        word = (word << _R8) | np.uint64(data[at])
    return word


@inner
def _of_text(data, start, end, seed):  # type: ignore[no-untyped-def]
    a = b = c = (_START + np.uint64(end - start)) & _WORD
    if seed != _ZERO:
        a, b, c = _mixed((a + (seed >> _BITS)) & _WORD, (b + (seed & _WORD)) & _WORD, c)
    while end - start >= _BLOCK:
        a = (a + _little_endian(data, start, start + 4)) & _WORD
        b = (b + _little_endian(data, start + 4, start + 8)) & _WORD
        c = (c + _little_endian(data, start + 8, start + _BLOCK)) & _WORD
        a, b, c = _mixed(a, b, c)
        start += _BLOCK
    a = (a + _little_endian(data, start, min(end, start + 4))) & _WORD
    b = (b + _little_endian(data, start + 4, min(end, start + 8))) & _WORD
    # The lowest byte of c is reserved for the length.
    c = (c + (_little_endian(data, start + 8, end) << _R8)) & _WORD
    return _finished(a, b, c)


@loop(INTS, BYTES, FLAGS, HASHES_OUT)
def add_texts(places, data, valid, hashes):  # type: ignore[no-untyped-def]
    """Replace the hash of each row by that of one text, with the hash as seed.

    NULL is hashed as the empty text, with the lowest bit of the seed inverted. `places`: where each text
    begins, and the end of the last one.
    """
    for row in range(len(valid)):
        seed = hashes[row] if valid[row] else hashes[row] ^ _ONE
        hashes[row] = _of_text(data, places[row], places[row + 1], seed)
