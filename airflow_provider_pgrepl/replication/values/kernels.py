"""The compiled functions that split the texts of arrays, records, ranges and hstores into their parts.

Each function writes the parts, without quotes and escapes, one after the other into `out`. It writes the
number of the first part of each row into `starts`, the end of each part in `out` into `ends`, and the NULL
flag of each part into `nulls`. It returns a status, the number of parts and the number of bytes in `out`.
Text that PostgreSQL does not write results in an error status, never in a guess.
"""

from __future__ import annotations

from airflow_provider_pgrepl.replication.runtime.compiled_loops import (
    BYTES,
    BYTES_OUT,
    FLAG,
    FLAGS,
    FLAGS_OUT,
    INT,
    INTS,
    INTS_OUT,
    inner,
    loop,
)

OK, MALFORMED, NESTED, NOT_NESTED, LOWER_BOUND, WRONG_COUNT = range(6)

_QUOTE, _ESCAPE, _COMMA, _BLANK, _EQUALS, _GREATER = (ord(byte) for byte in '"\\, =>')
_BRACE, _END_BRACE, _BRACKET, _END_BRACKET, _PAREN, _END_PAREN = (ord(byte) for byte in "{}[]()")
_N, _U, _L = (ord(byte) for byte in "NUL")

_OUT = (INTS_OUT, INTS_OUT, FLAGS_OUT, BYTES_OUT)


@inner
def _is_null_word(data, start, end):  # type: ignore[no-untyped-def]
    return (
        end - start == 4
        and data[start] == _N
        and data[start + 1] == _U
        and data[start + 2] == _L
        and data[start + 3] == _L
    )


@inner
def _unquote(data, at, end, out, filled):  # type: ignore[no-untyped-def]
    """Copy a quoted text from `at` on. Return the offset after the closing quote (-1: there is none), and the
    bytes in `out`.

    Within quotes, a quote is escaped or doubled, and a backslash is escaped or doubled.
    """
    while at < end:
        byte = data[at]
        if byte == _QUOTE:
            if at + 1 >= end or data[at + 1] != _QUOTE:
                return at + 1, filled
            at += 1
        elif byte == _ESCAPE:
            at += 1
            if at >= end:
                return -1, filled
        out[filled] = data[at]
        filled += 1
        at += 1
    return -1, filled


@inner
def _copy_part(data, at, end, delimiter, opening, closing, out, filled):  # type: ignore[no-untyped-def]
    """Copy one part. Return the offset of the delimiter or end after it (-1: malformed), and the bytes in
    `out`."""
    if at < end and data[at] == _QUOTE:
        at, filled = _unquote(data, at + 1, end, out, filled)
        if at >= 0 and at < end and data[at] != delimiter:
            return -1, filled
        return at, filled
    while at < end:
        byte = data[at]
        if byte == delimiter:
            break
        if byte == _QUOTE or byte == _ESCAPE or byte == opening or byte == closing:  # noqa: SIM109
            return -1, filled
        out[filled] = byte
        filled += 1
        at += 1
    return at, filled


@loop(INTS, BYTES, FLAGS, INT, INT, INT, *_OUT)
def split_array(places, data, valid, delimiter, opening, closing, starts, ends, nulls, out):  # type: ignore[no-untyped-def] # noqa: C901 - one loop, kept in one piece for speed
    """Split arrays such as `{1,NULL,"a,b"}` into elements. Brackets and delimiter are arguments."""
    parts = filled = 0
    for row in range(len(valid)):
        starts[row] = parts
        if not valid[row]:
            continue
        at, end = places[row], places[row + 1] - 1
        if end > at and opening == _BRACE and data[at] == _BRACKET:
            return LOWER_BOUND, parts, filled
        if end <= at or data[at] != opening or data[end] != closing:
            return MALFORMED, parts, filled
        at += 1
        more = at < end
        while more:
            if data[at] == opening:
                return NESTED, parts, filled
            first, before = at, filled
            if data[at] == _QUOTE:
                at, filled = _copy_part(data, at, end, delimiter, opening, closing, out, filled)
                if at < 0:
                    return MALFORMED, parts, filled
            # The code of _copy_part is repeated here: passing arrays to a function takes longer than copying
            # most parts.
            while at < end:
                byte = data[at]
                if byte == delimiter:
                    break
                if byte == _QUOTE or byte == _ESCAPE or byte == opening or byte == closing:  # noqa: SIM109
                    return MALFORMED, parts, filled
                out[filled] = byte
                filled += 1
                at += 1
            if at <= first:
                return MALFORMED, parts, filled
            nulls[parts] = _is_null_word(data, first, at)
            if nulls[parts]:
                filled = before
            ends[parts] = filled
            parts += 1
            more = at < end
            at += 1
    starts[len(valid)] = parts
    return OK, parts, filled


@loop(INTS, BYTES, FLAGS, INT, FLAG, *_OUT)
def split_record(places, data, valid, width, is_range, starts, ends, nulls, out):  # type: ignore[no-untyped-def]
    """Split records such as `(1,"a b",)` into `width` fields, or ranges into bounds. Empty parts are NULL."""
    parts = filled = 0
    for row in range(len(valid)):
        starts[row] = parts
        if not valid[row]:
            for _ in range(width):
                nulls[parts] = True
                ends[parts] = filled
                parts += 1
            continue
        at, end = places[row], places[row + 1] - 1
        if end <= at:
            return MALFORMED, parts, filled
        opened = data[at] == _PAREN or (is_range and data[at] == _BRACKET)
        closed = data[end] == _END_PAREN or (is_range and data[end] == _END_BRACKET)
        if not (opened and closed):
            return MALFORMED, parts, filled
        at += 1
        for field in range(width):
            first = at
            at, filled = _copy_part(data, at, end, _COMMA, _PAREN, _END_PAREN, out, filled)
            if at < 0:
                return MALFORMED, parts, filled
            if (at == end) != (field == width - 1):
                return WRONG_COUNT, parts, filled
            nulls[parts] = at == first
            ends[parts] = filled
            parts += 1
            at += 1
    starts[len(valid)] = parts
    return OK, parts, filled


@inner
def _whole_part(data, at, end, is_multirange):  # type: ignore[no-untyped-def]
    """Return the offset after the bracketed part that begins at `at`; -1 if it does not end."""
    depth = 0
    while at < end:
        byte = data[at]
        if byte == _QUOTE:
            at += 1
            while at < end and data[at] != _QUOTE:
                at += 2 if data[at] == _ESCAPE else 1
        elif is_multirange:
            if byte == _END_BRACKET or byte == _END_PAREN:  # noqa: SIM109
                return at + 1
        elif byte == _BRACE:
            depth += 1
        elif byte == _END_BRACE:
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    return -1


@loop(INTS, BYTES, FLAGS, INT, FLAG, *_OUT)
def split_whole(places, data, valid, delimiter, is_multirange, starts, ends, nulls, out):  # type: ignore[no-untyped-def]
    """Split arrays such as `{{1,2},{3,4}}` into rows, or multiranges into ranges, each as it is written."""
    parts = filled = 0
    for row in range(len(valid)):
        starts[row] = parts
        if not valid[row]:
            continue
        at, end = places[row], places[row + 1] - 1
        if end > at and data[at] == _BRACKET:
            return LOWER_BOUND, parts, filled
        if end <= at or data[at] != _BRACE or data[end] != _END_BRACE:
            return MALFORMED, parts, filled
        at += 1
        more = at < end
        while more:
            first = at
            if is_multirange:
                if data[at] != _BRACKET and data[at] != _PAREN:
                    return MALFORMED, parts, filled
            elif data[at] != _BRACE:
                return NOT_NESTED, parts, filled
            at = _whole_part(data, at, end, is_multirange)
            if at < 0 or (at < end and data[at] != delimiter):
                return MALFORMED, parts, filled
            out[filled : filled + at - first] = data[first:at]
            filled += at - first
            nulls[parts] = False
            ends[parts] = filled
            parts += 1
            more = at < end
            at += 1
    starts[len(valid)] = parts
    return OK, parts, filled


@inner
def _behind_arrow(data, at, end):  # type: ignore[no-untyped-def]
    """Return the offset after `=>`; -1 if it is missing at `at`."""
    if at < 0 or at + 1 >= end or data[at] != _EQUALS or data[at + 1] != _GREATER:
        return -1
    return at + 2


@loop(INTS, BYTES, FLAGS, *_OUT)
def split_pairs(places, data, valid, starts, ends, nulls, out):  # type: ignore[no-untyped-def]
    """Split hstores such as `"a"=>"1", "b"=>NULL` into alternating keys and values.

    `starts` counts pairs, not parts.
    """
    parts = filled = 0
    for row in range(len(valid)):
        starts[row] = parts // 2
        at, end = places[row], places[row + 1]
        more = valid[row] and at < end
        while more:
            if data[at] != _QUOTE:
                return MALFORMED, parts, filled
            at, filled = _unquote(data, at + 1, end, out, filled)
            at = _behind_arrow(data, at, end)
            if at < 0 or at >= end:
                return MALFORMED, parts, filled
            nulls[parts] = False
            ends[parts] = filled
            parts += 1
            nulls[parts] = data[at] != _QUOTE
            if nulls[parts]:
                if at + 4 > end or not _is_null_word(data, at, at + 4):
                    return MALFORMED, parts, filled
                at += 4
            else:
                at, filled = _unquote(data, at + 1, end, out, filled)
            ends[parts] = filled
            parts += 1
            more = at != end
            if more and (at < 0 or at + 2 >= end or data[at] != _COMMA or data[at + 1] != _BLANK):
                return MALFORMED, parts, filled
            at += 2
    starts[len(valid)] = parts // 2
    return OK, parts, filled
