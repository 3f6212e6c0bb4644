"""The compiled functions behind row hashes: MurmurHash3_x64_128 of each value, and sums of hashes by bucket.

The hash of a row is a pair of 64-bit numbers, its state. Each value of the row is hashed with the state as
the seed of both halves, and the result is the next state. NULL is a value of its own, unequal to any other.
https://github.com/aappleby/smhasher/blob/master/src/MurmurHash3.cpp (public domain)
"""

from __future__ import annotations

import numpy as np

from airflow_provider_pgrepl.replication.runtime.compiled_loops import (
    BYTES,
    FLAGS,
    HASHES,
    HASHES_OUT,
    INT,
    INTS,
    INTS_OUT,
    inner,
    loop,
)

_C1, _C2 = np.uint64(0x87C37B91114253D5), np.uint64(0x4CF5AD432745937F)
_M1, _M2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_ADD1, _ADD2, _FIVE = np.uint64(0x52DCE729), np.uint64(0x38495AB5), np.uint64(5)
_R27, _R31, _R33 = np.uint64(27), np.uint64(31), np.uint64(33)
_R64 = np.uint64(64)
_EIGHT, _WORD, _PAIR = np.uint64(8), 8, 16
_OF_NULL = np.uint64(0xFFFFFFFFFFFFFFFF)
"""Used as the length of NULL, which no value has."""


@inner
def _rotated(word, by):  # type: ignore[no-untyped-def]
    return (word << by) | (word >> (_R64 - by))


@inner
def _scrambled(word, first, by, second):  # type: ignore[no-untyped-def]
    return _rotated(word * first, by) * second


@inner
def _avalanched(word):  # type: ignore[no-untyped-def]
    word = (word ^ (word >> _R33)) * _M1
    word = (word ^ (word >> _R33)) * _M2
    return word ^ (word >> _R33)


@inner
def _block(h1, h2, k1, k2):  # type: ignore[no-untyped-def]
    """Add 16 bytes, as two words, to a state."""
    h1 = _rotated(h1 ^ _scrambled(k1, _C1, _R31, _C2), _R27) + h2
    h1 = h1 * _FIVE + _ADD1
    h2 = _rotated(h2 ^ _scrambled(k2, _C2, _R33, _C1), _R31) + h1
    return h1, h2 * _FIVE + _ADD2


@inner
def _finished(h1, h2, length):  # type: ignore[no-untyped-def]
    h1, h2 = h1 ^ length, h2 ^ length
    h1 = h1 + h2
    h2 = h2 + h1
    h1, h2 = _avalanched(h1), _avalanched(h2)
    h1 = h1 + h2
    return h1, h2 + h1


@inner
def _read_word(data, start, end):  # type: ignore[no-untyped-def]
    """Return up to 8 bytes as a little-endian word."""
    word = np.uint64(0)
    for at in range(end - 1, start - 1, -1):
        word = (word << _EIGHT) | np.uint64(data[at])
    return word


@inner
def _of_bytes(h1, h2, data, start, end):  # type: ignore[no-untyped-def]
    length = np.uint64(end - start)
    while end - start >= _PAIR:
        k1, k2 = _read_word(data, start, start + _WORD), _read_word(data, start + _WORD, start + _PAIR)
        h1, h2 = _block(h1, h2, k1, k2)
        start += _PAIR
    if end - start > _WORD:
        h2 = h2 ^ _scrambled(_read_word(data, start + _WORD, end), _C2, _R33, _C1)
        end = start + _WORD
    if end > start:
        h1 = h1 ^ _scrambled(_read_word(data, start, end), _C1, _R31, _C2)
    return _finished(h1, h2, length)


@loop(HASHES, FLAGS, HASHES_OUT, HASHES_OUT)
def add_words(words, valid, h1, h2):  # type: ignore[no-untyped-def]
    """Add one value of 8 bytes to the state of each row."""
    for row in range(len(valid)):
        if valid[row]:
            one = h1[row] ^ _scrambled(words[row], _C1, _R31, _C2)
            h1[row], h2[row] = _finished(one, h2[row], _EIGHT)
        else:
            h1[row], h2[row] = _finished(h1[row], h2[row], _OF_NULL)


@loop(HASHES, FLAGS, HASHES_OUT, HASHES_OUT)
def add_pairs(words, valid, h1, h2):  # type: ignore[no-untyped-def]
    """Add one value of 16 bytes, which are two words, to the state of each row."""
    for row in range(len(valid)):
        if valid[row]:
            one, two = _block(h1[row], h2[row], words[2 * row], words[2 * row + 1])
            h1[row], h2[row] = _finished(one, two, np.uint64(_PAIR))
        else:
            h1[row], h2[row] = _finished(h1[row], h2[row], _OF_NULL)


@loop(INTS, BYTES, FLAGS, HASHES_OUT, HASHES_OUT)
def add_bytes(places, data, valid, h1, h2):  # type: ignore[no-untyped-def]
    """Add one value of any length to the state of each row. `places`: where each value begins, and the end of
    the last one."""
    for row in range(len(valid)):
        if valid[row]:
            h1[row], h2[row] = _of_bytes(h1[row], h2[row], data, places[row], places[row + 1])
        else:
            h1[row], h2[row] = _finished(h1[row], h2[row], _OF_NULL)


@loop(INTS, HASHES, HASHES, FLAGS, HASHES_OUT, HASHES_OUT)
def add_lists(places, e1, e2, valid, h1, h2):  # type: ignore[no-untyped-def]
    """Add one list to the state of each row. `e1` and `e2`: the hashes of the elements of all lists."""
    for row in range(len(valid)):
        if valid[row]:
            one, two = h1[row], h2[row]
            for at in range(places[row], places[row + 1]):
                one, two = _block(one, two, e1[at], e2[at])
            h1[row], h2[row] = _finished(one, two, np.uint64(places[row + 1] - places[row]))
        else:
            h1[row], h2[row] = _finished(h1[row], h2[row], _OF_NULL)


@loop(HASHES, HASHES, HASHES, HASHES, INTS, INT, INTS_OUT, HASHES_OUT, HASHES_OUT)
def add_to_buckets(k1, k2, r1, r2, slots, sub_buckets, counts, s1, s2):  # type: ignore[no-untyped-def]
    """Add each row to the sum of its bucket, modulo 2^64 in each half.

    `k1`, `k2`: the hash of the row's key. `r1`, `r2`: the row's. `slots`: for each remainder of k1 the number
    of its range, -1 to leave it out. k2 chooses one of the range's `sub_buckets`. Both numbers of buckets are
    powers of 2.
    """
    mask, sub_mask = np.uint64(len(slots) - 1), np.uint64(sub_buckets - 1)
    for row in range(len(k1)):
        slot = slots[np.int64(k1[row] & mask)]
        if slot >= 0:
            at = slot * sub_buckets + np.int64(k2[row] & sub_mask)
            counts[at] += 1
            s1[at] += r1[row]
            s2[at] += r2[row]
