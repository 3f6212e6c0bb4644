"""The compiled loops that take texts apart: arrays, records, ranges and hstores into the texts they hold.

Each writes the parts, without quotes and escapes, one after the other into `out`; where each row's parts
begin into `starts`, where each part ends into `ends`, which parts are NULL into `nulls`. Returns a status,
and how many parts and bytes there are. What PostgreSQL does not write is found, never guessed at.
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
    """Copy what stands in quotes from `at` on; gives the place behind them (-1: they do not end).

    Within quotes a quote is escaped or written twice, a backslash likewise escaped.
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
    """Copy one part; gives the place of the delimiter or end behind it (-1: malformed)."""
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
    """`{1,NULL,"a,b"}` into elements; with other brackets or another delimiter likewise."""
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
            # As _copy_part does; here, since to hand arrays to a function takes longer than most parts do.
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
    """`(1,"a b",)` into its `width` fields, of which an empty one is NULL; or a range into its bounds."""
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
    """The place behind the bracketed part that begins at `at`; -1 when it does not end."""
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
    """`{{1,2},{3,4}}` into its rows, or a multirange into its ranges, each as it is written."""
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
    """The place behind `=>`; -1 when that is not there."""
    if at < 0 or at + 1 >= end or data[at] != _EQUALS or data[at + 1] != _GREATER:
        return -1
    return at + 2


@loop(INTS, BYTES, FLAGS, *_OUT)
def split_pairs(places, data, valid, starts, ends, nulls, out):  # type: ignore[no-untyped-def]
    """`"a"=>"1", "b"=>NULL` into keys and values by turns."""
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
