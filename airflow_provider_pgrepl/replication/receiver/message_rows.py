"""Logical messages as rows of the changelog, built in Arrow: a content takes no more than its digits do."""

from __future__ import annotations

import logging
from binascii import hexlify
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from airflow_provider_pgrepl.replication.changelog.layout import ROW_SCHEMA
from airflow_provider_pgrepl.replication.pgoutput.columns import NO_TIME, ControlMessage
from airflow_provider_pgrepl.replication.pgoutput.messages import LogicalMessage
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch

log = logging.getLogger(__name__)

ALL_PREFIXES = "*"

_PIECE = 1 << 20
_MOST_WARNINGS = 10

Placed = tuple[ControlMessage, LogicalMessage]


@dataclass
class KeptMessages:
    """Which messages are kept, by their prefixes; says of each prefix once that a content was left out."""

    prefixes: frozenset[str] = frozenset({ALL_PREFIXES})
    _warned: set[str] = field(default_factory=set)

    def keeps(self, message: LogicalMessage, lsn: int) -> bool:
        """Whether a message is to become a row."""
        if not self.prefixes & {ALL_PREFIXES, message.prefix}:
            return False
        if message.left_out and message.prefix not in self._warned and len(self._warned) < _MOST_WARNINGS:
            self._warned.add(message.prefix)
            log.warning(
                "the content of the logical message at %s with prefix %r is left out, because its %d bytes"
                " are more than message_bytes; so it is with the others that are",
                LSN(lsn),
                message.prefix,
                message.left_out,
            )
        return True


def message_rows(epoch: Epoch, placed: Sequence[Placed]) -> pa.Table:
    """Rows in ROW_SCHEMA: `new` is the prefix and the content's digits, or the prefix, null and the size."""
    controls = [control for control, _ in placed]
    outside = [control.commit_us == NO_TIME for control in controls]
    count = len(placed)
    columns = {
        "epoch": pa.repeat(pa.scalar(int(epoch), pa.int64()), count),
        "commit_lsn": [control.commit_lsn for control in controls],
        "ordinal": [control.ordinal for control in controls],
        "xid": [None if out else control.xid for control, out in zip(controls, outside, strict=True)],
        "commit_ts": [
            None if out else control.commit_us for control, out in zip(controls, outside, strict=True)
        ],
        "relation_id": pa.repeat(pa.scalar(0, pa.int64()), count),
        "relation_version": pa.repeat(pa.scalar(0, pa.int64()), count),
        "op": pa.repeat("M", count),
        "new": _texts([message for _, message in placed]),
        "old": pa.nulls(count, ROW_SCHEMA.field("old").type),
        "unchanged": pa.nulls(count, ROW_SCHEMA.field("unchanged").type),
    }
    return pa.table(columns, schema=ROW_SCHEMA)


def _texts(messages: Sequence[LogicalMessage]) -> pa.Array:
    """The lists of all messages over one buffer, which is as long as all of their texts and filled once."""
    parts = [part for message in messages for part in _parts(message)]
    lengths = [0 if part is None else len(part) if raw else 2 + 2 * len(part) for part, raw in parts]
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    values = np.empty(int(offsets[-1]), np.uint8)
    for (part, raw), start, end in zip(parts, offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        if part is None:
            continue
        if raw:
            values[start:end] = np.frombuffer(part, np.uint8)
        else:
            values[start : start + 2] = (ord("\\"), ord("x"))
            for at in range(0, len(part), _PIECE):
                digits = np.frombuffer(hexlify(part[at : at + _PIECE]), np.uint8)
                values[start + 2 + 2 * at :][: len(digits)] = digits
    valid = pa.array([part is not None for part, _ in parts]).buffers()[1]
    texts = pa.LargeStringArray.from_buffers(len(parts), pa.py_buffer(offsets), pa.py_buffer(values), valid)
    ends = np.cumsum([0, *(3 if message.left_out else 2 for message in messages)])
    return pa.LargeListArray.from_arrays(pa.array(ends, pa.int64()), texts)


def _parts(message: LogicalMessage) -> list[tuple[bytes | None, bool]]:
    """The texts of a message, and of each whether it is there as it is, not by its digits."""
    prefix = (message.prefix.encode(), True)
    if message.left_out:
        return [prefix, (None, True), (str(message.left_out).encode(), True)]
    return [prefix, (message.content, False)]
