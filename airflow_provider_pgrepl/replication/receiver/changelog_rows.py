"""The conversion of a split chunk to changelog rows, with relation versions and rows for control messages."""

from __future__ import annotations

import logging
from binascii import hexlify
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.errors import WireError
from airflow_provider_pgrepl.replication.changelog.layout import ROW_SCHEMA
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.pgoutput import messages as logical_messages
from airflow_provider_pgrepl.replication.pgoutput.columns import NO_TIME, ControlMessage, Int64s, SplitChunk
from airflow_provider_pgrepl.replication.pgoutput.messages import LogicalMessage
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch

log = logging.getLogger(__name__)

ALL_PREFIXES = "*"

_PIECE = 1 << 20
_MOST_WARNINGS = 10

Placed = tuple[ControlMessage, LogicalMessage]
Hidden = Mapping[int, Sequence[int]]
"""By relation version: the indexes, in the message, of the columns whose values are not stored."""
LookUp = Callable[[logical_messages.RelationMessage, int, int], RelationRecord | None]
"""Returns the record of a relation received at a commit LSN in a transaction (xid).

None: changes of this relation do not belong in the changelog.
"""


@dataclass
class MessagePrefixes:
    """The prefixes of the logical messages that become rows.

    For each prefix, up to 10 prefixes, it logs once that the content of a message was left out.
    """

    prefixes: frozenset[str] = frozenset({ALL_PREFIXES})
    _warned: set[str] = field(default_factory=set)

    def keeps(self, message: LogicalMessage, lsn: int) -> bool:
        """Return True if the message becomes a row."""
        if not self.prefixes & {ALL_PREFIXES, message.prefix}:
            return False
        if message.left_out and message.prefix not in self._warned and len(self._warned) < _MOST_WARNINGS:
            self._warned.add(message.prefix)
            log.warning(
                "the content of the logical message at %s with prefix %r was not stored, because its %d bytes"
                " exceed message_bytes. Further messages with this prefix are not logged. To store them,"
                " raise message_bytes and restart the replication app",
                LSN(lsn),
                message.prefix,
                message.left_out,
            )
        return True


def message_rows(epoch: Epoch, placed: Sequence[Placed]) -> pa.Table:
    """Return rows in ROW_SCHEMA.

    `new` is the prefix and the content as hexadecimal digits. If the content was left out, `new` is the
    prefix, null and the size.
    """
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
    """Return the lists of all messages over one buffer, which has the size of all text values."""
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
    """Return the text values of a message. Each has True if it is stored as is, False if as digits."""
    prefix = (message.prefix.encode(), True)
    if message.left_out:
        return [prefix, (None, True), (str(message.left_out).encode(), True)]
    return [prefix, (message.content, False)]


def without_hidden(rows: pa.Table, hidden: Hidden) -> pa.Table:
    """Return the rows with null in place of hidden values in `new` and `old`.

    The bytes of these values are removed from the buffers as well. An insert then lacks other values only:
    those that are hidden are not needed.
    """
    versions = rows["relation_version"].to_numpy()
    found = [version for version in np.unique(versions).tolist() if hidden.get(version)]
    if not found:
        return rows
    for name in ("new", "old"):
        index = rows.schema.get_field_index(name)
        lists = rows[name].combine_chunks()
        rows = rows.set_column(index, rows.schema.field(index), _blanked(lists, versions, found, hidden))
    return _with_hidden_sent(rows, hidden)


def _with_hidden_sent(rows: pa.Table, hidden: Hidden) -> pa.Table:
    """Return the rows without the hidden columns of inserts in `unchanged`. Very few inserts lack values."""
    lacks = pc.and_kleene(pc.equal(rows["op"], "I"), pc.is_valid(rows["unchanged"]))
    if not pc.any(lacks).as_py():
        return rows
    versions, unchanged = rows["relation_version"].to_pylist(), rows["unchanged"].to_pylist()
    for number in np.flatnonzero(lacks.to_numpy()).tolist():
        left = set(unchanged[number]).difference(hidden.get(versions[number], ()))
        unchanged[number] = sorted(left) or None
    index = rows.schema.get_field_index("unchanged")
    kind = rows.schema.field(index)
    return rows.set_column(index, kind, pa.array(unchanged, kind.type))


def _blanked(
    lists: pa.LargeListArray, versions: npt.NDArray[np.int64], found: Sequence[int], hidden: Hidden
) -> pa.LargeListArray:
    if isinstance(lists, pa.ChunkedArray):
        lists = pa.concat_arrays(lists.chunks)
    # Compute new offsets that begin at 0 and refer to no values of other rows.
    starts = np.concatenate([[0], np.cumsum(pc.fill_null(pc.list_value_length(lists), 0).to_numpy())])
    values = lists.flatten()
    blank = np.zeros(len(values), bool)
    for version in found:
        mine = np.flatnonzero(versions == version)
        places = starts[mine][:, None] + np.asarray(hidden[version])[None, :]
        blank[places[places < starts[mine + 1][:, None]]] = True
    # Do not use if_else: it would mark the values as null and leave their bytes in the buffer.
    values = values.take(pa.array(np.arange(len(values)), mask=blank))
    return pa.LargeListArray.from_arrays(pa.array(starts), values, mask=lists.is_null())


@dataclass(frozen=True)
class Ddl:
    """The content of an event trigger's message.

    `record`: the new definition of the table, if the message is about one. `effective`: the relation records
    that apply to later rows although the stream may not send a Relation message again.
    """

    record: RelationRecord | None = None
    effective: tuple[RelationRecord, ...] = ()


LookAtDdl = Callable[[logical_messages.LogicalMessage, int, int], Ddl | None]
"""Returns the DDL in a logical message of the transaction with this commit LSN and xid.

None: the message is not from this pipeline's event trigger.
"""


@dataclass(frozen=True)
class _Events:
    """The relation records and logical messages of a chunk, by message index, in order.

    `records` become rows. `effective` has the relation version that applies to the rows after each index.
    """

    records: dict[int, RelationRecord]
    effective: list[tuple[int, RelationRecord]]
    messages: dict[int, logical_messages.LogicalMessage]


class VersionTagger:
    """A converter of splits, in stream order, to ROW_SCHEMA tables. It remembers each relation's version."""

    def __init__(
        self,
        epoch: Epoch,
        look_up: LookUp,
        look_at_ddl: LookAtDdl | None = None,
        kept: MessagePrefixes | None = None,
    ) -> None:
        self._epoch = epoch
        self._kept = kept or MessagePrefixes()
        self._look_up = look_up
        self._look_at_ddl = look_at_ddl or (lambda _message, _lsn, _xid: None)
        self._versions: dict[int, int] = {}
        self._hidden: dict[int, tuple[int, ...]] = {}
        self._unknown: set[int] = set()

    def tag(self, split: SplitChunk) -> pa.Table:
        """Return the chunk's rows, ordered by (commit_lsn, ordinal).

        Raises WireError for a row whose relation was not received before it.
        """
        events = self._events(split)
        split = self._without_unknown(split)
        versions = self._stamp_versions(split, events)
        rows = split.rows.append_column("epoch", pa.array(np.full(len(versions), self._epoch)))
        rows = rows.append_column("relation_version", pa.array(versions)).select(ROW_SCHEMA.names)
        self._hidden.update(
            {record.version: record.hidden for _, record in events.effective if record.hidden}
        )
        rows = without_hidden(rows, self._hidden)
        controls = [row for control in split.controls for row in self._control_rows(control, events)]
        placed = [
            (control, message)
            for control in split.controls
            if (message := self._message(control, events)) is not None
        ]
        self._versions.update({record.message.oid: record.version for _, record in events.effective})
        if not controls and not placed:
            return rows
        pieces = [rows, pa.Table.from_pylist(controls, schema=ROW_SCHEMA)]
        table = pa.concat_tables([*pieces, message_rows(self._epoch, placed)] if placed else pieces)
        if table.num_rows == 1:
            return table
        return table.sort_by([("commit_lsn", "ascending"), ("ordinal", "ascending")])

    def _events(self, split: SplitChunk) -> _Events:
        """Look up the chunk's Relation messages, and parse its logical messages and the DDL in them."""
        events = _Events({}, [], {})
        for control in split.controls:
            if control.tag == "R":
                received = logical_messages.parse_relation(control.data)
                record = self._look_up(received, control.commit_lsn, control.xid)
                if record is None:
                    self._unknown.add(received.oid)
                    continue
                self._unknown.discard(received.oid)
                events.records[control.index] = record
                events.effective.append((control.index, record))
            elif control.tag == "M":
                message = events.messages[control.index] = logical_messages.parse_message(control.data)
                if control.commit_us == NO_TIME:
                    continue
                ddl = self._look_at_ddl(message, control.commit_lsn, control.xid)
                if ddl is not None and ddl.record is not None:
                    events.records[control.index] = ddl.record
                events.effective.extend((control.index, record) for record in (ddl.effective if ddl else ()))
        return events

    def _without_unknown(self, split: SplitChunk) -> SplitChunk:
        """Remove the rows of relations that do not belong in the changelog."""
        if not self._unknown:
            return split
        ours = ~np.isin(split.rows["relation_id"].to_numpy(), list(self._unknown))
        return replace(split, rows=split.rows.filter(pa.array(ours)), row_index=split.row_index[ours])

    def _stamp_versions(self, split: SplitChunk, events: _Events) -> Int64s:
        """Return each row's relation version: the last one that became effective before the row."""
        ids = split.rows["relation_id"].to_numpy()
        versions = np.zeros(len(ids), np.int64)
        for relation_id in np.unique(ids).tolist():
            mine = ids == relation_id
            version = self._versions.get(relation_id)
            if version is not None:
                versions[mine] = version
            for index, record in events.effective:
                if record.message.oid == relation_id:
                    versions[mine & (split.row_index > index)] = record.version
        if len(versions) and not versions.all():
            raise WireError("the stream sent a row before its relation")
        return versions

    def _version_at(self, relation_id: int, index: int, events: _Events) -> int:
        """Return a relation's version at a message of the chunk, or 0 if it was never received."""
        version = self._versions.get(relation_id, 0)
        for place, record in events.effective:
            if place < index and record.message.oid == relation_id:
                version = record.version
        return version

    def _control_rows(self, control: ControlMessage, events: _Events) -> list[dict[str, object]]:
        record = events.records.get(control.index)
        if record is not None:
            return [self._row(control, "R", record.message.oid, record.version, [record.to_json()])]
        if control.tag == "R":
            return []
        if control.tag == "T":
            truncate = logical_messages.parse_truncate(control.data)
            option = {(1, 1): "cascade restart identity", (1, 0): "cascade", (0, 1): "restart identity"}
            text = option.get((truncate.cascade, truncate.restart_identity), "")
            return [
                self._row(control, "T", oid, self._version_at(oid, control.index, events), [text], offset)
                for offset, oid in enumerate(truncate.oids)
                if oid not in self._unknown
            ]
        return []

    def _message(self, control: ControlMessage, events: _Events) -> logical_messages.LogicalMessage | None:
        """Return the logical message if it becomes a row, otherwise None."""
        message = events.messages.get(control.index)
        if message is None or control.index in events.records:
            return None
        if message.prefix == logical_messages.DDL_PREFIX and not message.content and not message.left_out:
            return None  # it only fixes the position of the message before it
        if message.prefix == logical_messages.DDL_PREFIX:
            # Remove the content: its catalog rows may hold the default of a column that is not stored.
            message = replace(message, content=b"")
        return message if self._kept.keeps(message, control.commit_lsn) else None

    def _row(
        self,
        control: ControlMessage,
        op: str,
        relation_id: int,
        version: int,
        new: list[str],
        offset: int = 0,
    ) -> dict[str, object]:
        outside = control.commit_us == NO_TIME
        return {
            "epoch": self._epoch,
            "commit_lsn": control.commit_lsn,
            "ordinal": control.ordinal + offset,
            "xid": None if outside else control.xid,
            "commit_ts": None if outside else control.commit_us,
            "relation_id": relation_id,
            "relation_version": version,
            "op": op,
            "new": new,
        }
