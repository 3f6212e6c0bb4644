"""The writing half of the receiver: from stream messages to changelog commits and a durable LSN.

It also records changes of the publication, which the stream does not report. A publication that leaves
changes out, and is altered back before the next check, looks the same as before; but other transactions
wrote its catalog rows. So before received changes become durable, a digest of these rows is compared with
the one in the changelog. If they differ, one row for each table records its publication status, between the
durable changes and the next ones. The applier compares it with the status under which the table was copied,
and stops the tables that may lack changes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pyarrow as pa

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.replication.changelog.layout import ROW_SCHEMA, STATUS_ORDINAL, changelog_uri
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex, relations_uri
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.changelog.writer import ChangelogWriter, Part
from airflow_provider_pgrepl.replication.drift.matching import HiddenColumns, excluded
from airflow_provider_pgrepl.replication.pgoutput.columns import (
    NO_TIME,
    Splitter,
    TransactionBegin,
    TransactionEnd,
)
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import PublicationStatus
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog.followed_names import FollowedNames
from airflow_provider_pgrepl.replication.source.catalog.partitions import say_had_rows
from airflow_provider_pgrepl.replication.source.connection import Connection
from airflow_provider_pgrepl.replication.source.event_trigger import trigger
from airflow_provider_pgrepl.replication.source.publication import Publishing
from airflow_provider_pgrepl.replication.source.server import is_synchronous, synchronous_problem, written_lsn
from airflow_provider_pgrepl.replication.source.stream import Chunk
from airflow_provider_pgrepl.replication.state.source_tokens import NewToken

from .changelog_rows import MessagePrefixes, VersionTagger
from .redelivery import RedeliveryFilter
from .relation_tracker import CatalogWatch, RelationTracker

log = logging.getLogger(__name__)
_LOOK_S, _IDLE_LOOK_S = 0.2, 5.0
_STANDBYS_S = 5.0
RENEW_S = 120.0
"""The most seconds between two commits of a running receiver, except while a token waits."""
_WAITS_FOR_TOKEN = 1.1
"""The factor of `renew_s` after which a receiver commits its last token again."""


@dataclass(frozen=True)
class _Said:
    """A digest for which rows of `relation_ids` were recorded once.

    `read_lsn`: the source's WAL position after the digest was read. A table that was copied before it, but is
    past the durable LSN, does not see those rows. They are recorded again when everything up to `read_lsn` is
    durable; only then is the digest stored.
    """

    digest: int
    read_lsn: LSN
    relation_ids: frozenset[int]


class PublicationWatch:
    """A recorder of publication changes. Only the thread that owns `connection` may use it."""

    def __init__(
        self,
        connection: Connection,
        writer: ChangelogWriter,
        index: RelationIndex,
        pipeline: Pipeline,
    ) -> None:
        self._connection = connection
        self._writer = writer
        self._index = index
        self._pipeline = pipeline
        self._said: _Said | None = None
        self._known: dict[int, PublicationStatus] = {}

    def look(self) -> None:
        """Record the publication status of tables in the changelog if the publication has changed.

        Called before received changes become durable. Raises SourceConnectionError, FencedError,
        LakeUnavailableError.
        """
        # Read the index each time, so that tables copied since the last call are included.
        publishing = Publishing(self._writer.epoch_record.publication, self._index.relation_ids())
        digest = publishing.digest(self._connection, self._followed().values())
        if digest == self._writer.published:
            return
        if self._said is None or self._said.digest != digest:
            self._say_first(publishing, digest)
        elif self._writer.durable_lsn >= self._said.read_lsn:
            self._writer.published = digest
            self._say(self._read_status(publishing, self._said.relation_ids))
            self._said = None

    def _say_first(self, publishing: Publishing, digest: int) -> None:
        if not publishing.oids:
            self._writer.published = digest
            return
        statuses = self._read_status(publishing, publishing.oids)
        moved = {oid: found for oid, found in statuses.items() if found != self._known.get(oid)}
        self._say(moved)
        self._known = statuses
        unsaid = frozenset() if self._said is None else self._said.relation_ids
        self._said = _Said(digest, written_lsn(self._connection), unsaid | moved.keys())

    def _read_status(self, publishing: Publishing, oids: Collection[int]) -> dict[int, PublicationStatus]:
        some = Publishing(publishing.publication, sorted(oids))
        followed = self._followed()

        def names(oid: int) -> set[TableName]:
            # Its earlier names are those of other tables, if it is followed under one that it has now.
            return {followed[oid]} if oid in followed else self._index.names(oid)

        return some.read_status(self._connection, names)

    def _followed(self) -> dict[int, TableName]:
        return FollowedNames.read(self._pipeline, self._index.pipeline_names).followed()

    def _say(self, statuses: dict[int, PublicationStatus]) -> None:
        if statuses:
            # For new tables, and after a start, this may be the first record and not a change.
            level = logging.INFO if statuses.keys() & self._known.keys() else logging.DEBUG
            log.log(level, "recorded in the changelog how %d tables are published now", len(statuses))
            self._writer.append_between(self._rows(statuses))

    def _rows(self, statuses: dict[int, PublicationStatus]) -> pa.Table:
        return pa.Table.from_pylist([self._row(*item) for item in sorted(statuses.items())], ROW_SCHEMA)

    def _row(self, relation_id: int, status: PublicationStatus) -> dict[str, object]:
        partitions = say_had_rows(
            self._connection,
            relation_id,
            status.partitions,
            trusts_owners=self._pipeline.trust_table_owners,
        )
        record = RelationRecord.of_publication_status(relation_id, replace(status, partitions=partitions))
        return {
            "epoch": self._writer.epoch,
            "commit_lsn": self._writer.durable_lsn,
            "ordinal": STATUS_ORDINAL,
            "relation_id": relation_id,
            "relation_version": record.version,
            "op": "R",
            "new": [record.to_json()],
        }


class TransactionBuffer:
    """A buffer that holds rows until a flush commits them.

    Memory stays bounded for transactions of any size: parts of an open transaction are written early, and the
    commit at its end adds them all.
    """

    def __init__(self, writer: ChangelogWriter, part_bytes: int) -> None:
        self._writer = writer
        self._part_bytes = part_bytes
        self._whole: list[pa.Table] = []
        self._whole_parts: list[Part] = []
        self._open: list[pa.Table] = []
        self._open_parts: list[Part] = []
        self._open_bytes = 0
        self._first_lsn = 0
        self._last: TransactionEnd | None = None
        self._last_us = 0
        self.whole_bytes = 0

    @property
    def has_whole(self) -> bool:
        """Return True if the buffer holds a complete transaction, which a flush would commit."""
        return bool(self._whole or self._whole_parts)

    def add(self, rows: pa.Table, ended: Sequence[TransactionEnd], size: int) -> None:
        """Add a chunk's rows, in order of commit LSN.

        `ended`: the transactions that end in the chunk. `size`: the chunk's bytes.
        """
        if ended:
            self._end_open(rows, ended, size)
            return
        self._push_open(rows, size)
        if self._open_bytes >= self._part_bytes:
            self._spill_open()

    def _end_open(self, rows: pa.Table, ended: Sequence[TransactionEnd], size: int) -> None:
        last = ended[-1]
        cut = int(np.searchsorted(rows["commit_lsn"].to_numpy(), last.commit_lsn, side="right"))
        rest = size * (rows.num_rows - cut) // max(1, rows.num_rows)
        if cut or self._open or self._open_parts:
            self._whole += [*self._open, *([rows.slice(0, cut)] if cut else [])]
            self._whole_parts += self._open_parts
            self._first_lsn = self._first_lsn or ended[0].commit_lsn
            self._last = last
            self._last_us = max(
                [self._last_us, *(end.commit_us for end in ended if end.commit_us != NO_TIME)]
            )
            self.whole_bytes += size - rest + self._open_bytes
        self._open, self._open_parts, self._open_bytes = [], [], 0
        self._push_open(rows.slice(cut), rest)

    def _push_open(self, rows: pa.Table, size: int) -> None:
        if rows.num_rows:
            self._open.append(rows)
            self._open_bytes += size

    def _spill_open(self) -> None:
        self._open_parts.append(self._writer.write_part(pa.concat_tables(self._open)))
        self._open, self._open_bytes = [], 0

    def flush(self, idle_lsn: LSN) -> int:
        """Commit all complete transactions, and return the bytes of their values.

        `idle_lsn`: an LSN before the commit of any later transaction.
        """
        if self._last is None:
            return 0
        parts = [*self._whole_parts, *(self._writer.write_part(rows) for rows in self._cut_parts())]
        self._writer.append(
            parts,
            durable_lsn=max(LSN(self._last.end_lsn), idle_lsn),
            first_lsn=LSN(self._first_lsn),
            last_lsn=LSN(self._last.commit_lsn),
            last_commit_us=self._last_us,
        )
        self._whole, self._whole_parts, self.whole_bytes = [], [], 0
        self._first_lsn, self._last = 0, None
        return sum(part.value_bytes for part in parts)

    def _cut_parts(self) -> list[pa.Table]:
        parts: list[list[pa.Table]] = []
        room = 0
        for rows in self._whole:
            if room <= 0:
                parts.append([])
                room = self._part_bytes
            parts[-1].append(rows)
            room -= rows.nbytes
        return [pa.concat_tables(part) for part in parts]


@dataclass(frozen=True)
class KeepaliveRule:
    """The limits for recording a keepalive's LSN in the changelog, so that an idle database's slot advances.

    An LSN is recorded after `max_wait_s` at the latest, or after `idle_wait_s` if only keepalives arrived
    since the last record. `renew_s`: the seconds between two commits with a new token.
    """

    min_interval_s: float = 30.0
    min_bytes: int = 1 << 20
    max_wait_s: float = 60.0
    idle_wait_s: float = 120.0
    renew_s: float = RENEW_S


@dataclass
class ReceiverProgress:
    """The progress of a receiver.

    `seen_lsn`: every transaction that committed at or before it is durable. `wanted_lsn`: the LSN past which
    the changelog is to become durable without delay, also if the source is idle. `sequence`: the sequence of
    the writer's last commit, None before the first. Counts since the start: `changes` received, `bytes` of
    the messages that held them, `committed_bytes` (uncompressed values in the changelog), `reconnects`.
    """

    received_lsn: LSN = field(default_factory=lambda: LSN(0))
    durable_lsn: LSN = field(default_factory=lambda: LSN(0))
    confirmed_lsn: LSN = field(default_factory=lambda: LSN(0))
    seen_lsn: LSN = field(default_factory=lambda: LSN(0))
    wanted_lsn: LSN = field(default_factory=lambda: LSN(0))
    changelog_version: int = 0
    sequence: int | None = None
    changes: int = 0
    bytes: int = 0
    committed_bytes: int = 0
    reconnects: int = 0


class ChangelogFeed:
    """The writing half of a receiver: splits, tags, buffers and flushes.

    From the first `look_if_due` on, only one thread may use it and the catalog connection.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        catalog: Connection,
        writer: ChangelogWriter,
        progress: ReceiverProgress,
        rule: KeepaliveRule,
        confirmed_lsn: LSN,
        renew_token: Callable[[int], NewToken | None],
    ) -> None:
        self._pipeline = pipeline
        self._catalog = catalog
        self._writer = writer
        self._progress = progress
        self._rule = rule
        self._renew_token, self._last_renewal = renew_token, time.monotonic()
        self._new_token: NewToken | None = None
        """A token that the source has, and the changelog does not have yet."""
        # If the connection is lost from here on, the next receiver continues from this sequence.
        progress.sequence = writer.sequence
        self.confirmed_lsn = confirmed_lsn
        """The LSN that the slot had confirmed when the receiver started."""
        self._resent = RedeliveryFilter.load(changelog_uri(pipeline.lake_root), writer, self.confirmed_lsn)
        trusts = pipeline.trust_table_owners
        self._watch = CatalogWatch(catalog, writer.epoch_record, trusts_owners=trusts)
        index = RelationIndex(relations_uri(pipeline.lake_root))
        self._splitter = Splitter()
        self._tagger = self._make_tagger(index)
        self._buffer = TransactionBuffer(writer, pipeline.part_bytes)
        # Everything that committed before this LSN has been received, and is durable after the next flush.
        self._idle_lsn = writer.durable_lsn
        self._is_idle = False
        self._last_flush = self._last_record = self._last_move = time.monotonic()
        self._publication = PublicationWatch(catalog, writer, index, pipeline)
        # The writing thread starts with a check: a connection lost before it counts as lost while running.
        self._looked_lsn, self._last_look = self._idle_lsn, float("-inf")
        self._is_synchronous, self._standbys_at = False, float("-inf")
        progress.durable_lsn = progress.seen_lsn = progress.received_lsn = writer.durable_lsn
        progress.changelog_version = writer.version

    def _name_in_pipeline(self, index: RelationIndex, oid: int, now: TableName) -> TableName:
        followed = FollowedNames.read(self._pipeline, index.pipeline_names)
        if followed.follows_any and followed.recorded.get(oid) != now:
            # The table may have been copied since, also under another name than before.
            index.catch_up()
            followed = FollowedNames.read(self._pipeline, index.pipeline_names)
        return self._watch.find_name(followed, oid, now)

    def _make_tagger(self, index: RelationIndex) -> VersionTagger:
        pipeline, catalog = self._pipeline, self._catalog
        read_key = partial(trigger.read_key, catalog, pipeline.name)
        tracker = RelationTracker(
            pipeline.name,
            pipeline.publication,
            self._writer.epoch,
            index,
            read_relation=self._watch.read_relation,
            read_trigger=self._read_trigger,
            read_key=read_key,
            hidden=HiddenColumns(excluded(pipeline), index.records),
            name_of=partial(self._name_in_pipeline, index),
        )
        if pipeline.event_trigger and self._read_trigger() is None:
            log.warning(
                "the event trigger does not exist or is disabled; the next pgrepl snapshot FILE.json"
                " installs it, and also copies errored tables"
            )
        elif pipeline.event_trigger and read_key() is None:
            log.warning("the key of the event trigger cannot be read: %s", errors.SNAPSHOT)
        # Without the option, no logical message counts as a message of the event trigger.
        look_at_ddl = tracker.look_at_ddl if pipeline.event_trigger else None
        kept = MessagePrefixes(frozenset(pipeline.message_prefixes))
        return VersionTagger(self._writer.epoch, tracker.received, look_at_ddl, kept)

    @property
    def sequence(self) -> int:
        """Return the sequence of the writer's last commit."""
        return self._writer.sequence

    @property
    def begun(self) -> TransactionBegin | None:
        """Return the transaction that has begun and not ended, or None."""
        return self._splitter.begun

    @property
    def has_passed_resent(self) -> bool:
        """Return True if every transaction that the server sends again was received and is the same."""
        return self._resent.is_passed

    def take(self, chunk: Chunk) -> None:
        """Buffer the rows of a chunk, and clear its messages. The rows are not durable yet."""
        if chunk.messages:
            split = self._splitter.split(chunk.messages)
            # Free the messages: a row of hundreds of MB would be in memory twice while it is written.
            chunk.messages.clear()
            rows = self._resent.drop(self._tagger.tag(split), split.ended)
            self._buffer.add(rows, split.ended, chunk.size)
            self._progress.changes += rows.num_rows
            self._progress.bytes += chunk.size
            if split.ended:
                self._idle_lsn = max(self._idle_lsn, LSN(split.ended[-1].end_lsn))
        if chunk.keepalive and not self._splitter.is_open:
            self._resent.pass_idle(chunk.keepalive.lsn)
            self._idle_lsn = max(self._idle_lsn, chunk.keepalive.lsn)
        self._progress.received_lsn = self._idle_lsn
        if not self._buffer.has_whole:
            self._settle()

    def look_if_due(self) -> None:
        """Check the publication if the interval has passed and no complete transaction is buffered.

        After the check, the received LSN counts as seen, even if no transaction was received.
        """
        interval = _LOOK_S if self._idle_lsn > self._looked_lsn else _IDLE_LOOK_S
        if not self._buffer.has_whole and time.monotonic() - self._last_look >= interval:
            self._look()
            self._settle()

    def _look(self) -> None:
        """Check that the publication sends all changes, and record in the changelog where it may not.

        Called before changes become durable. Raises PublicationError, and what `PublicationWatch.look` does.
        """
        self._watch.check_publication()
        self._publication.look()
        self._look_at_standbys()
        self._looked_lsn, self._last_look = self._idle_lsn, time.monotonic()

    def _look_at_standbys(self) -> None:
        """Check every 5 s whether commits at the source wait for this receiver.

        While they do, the receiver flushes without waiting for the flush interval.
        """
        now = time.monotonic()
        if now - self._standbys_at < _STANDBYS_S:
            return
        self._standbys_at, before = now, self._is_synchronous
        self._is_synchronous = is_synchronous(self._catalog, self._pipeline.slot)
        if self._is_synchronous and not before:
            log.warning("%s", synchronous_problem(self._catalog, self._pipeline.slot))

    @property
    def _interval_s(self) -> float:
        return 0.0 if self._is_synchronous else self._pipeline.flush_interval_s

    def until_flush(self) -> float:
        """Return the seconds until complete transactions must be flushed, or until the next check."""
        if not self._buffer.has_whole:
            return min(self._pipeline.flush_interval_s, self._rule.renew_s)
        return max(0.0, self._last_flush + self._interval_s - time.monotonic())

    def flush_if_due(self) -> None:
        """Flush complete transactions if time or size require it, or record the LSN of an idle source."""
        interval_over = time.monotonic() - self._last_flush >= self._interval_s
        if self._buffer.has_whole:
            if interval_over or self._buffer.whole_bytes >= self._pipeline.flush_bytes:
                self._flush()
        elif self._keepalive_due():
            self._record_idle()

    def _flush(self) -> None:
        if not self._buffer.has_whole:
            return
        self._look()
        self._progress.committed_bytes += self._buffer.flush(self._idle_lsn)
        self._is_idle = False
        self._last_flush = time.monotonic()
        self._settle()

    def _settle(self) -> None:
        """Update the durable LSN in `progress`; the reading thread confirms it to the slot."""
        progress, durable = self._progress, self._writer.durable_lsn
        if durable > progress.durable_lsn:
            self._last_move = time.monotonic()
        progress.changelog_version = self._writer.version
        progress.sequence = self._writer.sequence
        progress.durable_lsn = durable
        progress.seen_lsn = max(durable, self._looked_lsn)

    def renew_if_due(self) -> None:
        """Commit a new token if `renew_s` seconds have passed since the last one.

        A copy of the source that was made earlier lacks the new token. A receiver that runs against such a
        copy sees the commits of this receiver. The new token is committed when the durable LSN is past it, so
        that a promoted standby which lacks the token also lacks changes. If this takes long, the last token
        is committed again.
        """
        silent_s = time.monotonic() - self._last_renewal
        if self._new_token is None:
            if silent_s < self._rule.renew_s:
                return
            self._new_token = self._renew_token(self._writer.token)
        new, lsn = self._new_token, self._writer.durable_lsn
        if new is not None and lsn < new.lsn <= self._idle_lsn and self._is_between:
            self._look()
            lsn = max(self._writer.durable_lsn, self._idle_lsn)
        if new is not None and lsn < new.lsn:
            if silent_s < self._rule.renew_s * _WAITS_FOR_TOKEN:
                return
            new = None
        self._writer.give_sign_of_life(self._writer.token if new is None else new.token, lsn)
        self._new_token = None if new is not None else self._new_token
        self._last_renewal = time.monotonic()
        self._settle()

    @property
    def _is_between(self) -> bool:
        """Return True if no transaction is being received, or waits for a flush."""
        return not self._buffer.has_whole and not self._splitter.is_open

    def rest(self) -> None:
        """Record in the changelog that this receiver has ended, and no other follows it."""
        self._writer.rest()
        self._settle()

    def finish(self) -> None:
        """Flush complete transactions and record the idle LSN. Nothing may be added afterwards."""
        self._flush()
        if self._idle_lsn > self._progress.durable_lsn:
            self._record_idle()

    def _keepalive_due(self) -> bool:
        now, ahead = time.monotonic(), self._idle_lsn - self._writer.durable_lsn
        if self._is_synchronous:
            return ahead > 0 and not self._splitter.is_open
        if ahead > 0 and not self._splitter.is_open and self._is_wanted:
            return True
        if ahead <= 0 or self._splitter.is_open or now - self._last_record < self._rule.min_interval_s:
            return False
        wait_s = self._rule.idle_wait_s if self._is_idle else self._rule.max_wait_s
        return ahead >= self._rule.min_bytes or now - self._last_move >= wait_s

    @property
    def _is_wanted(self) -> bool:
        return self._writer.durable_lsn <= self._progress.wanted_lsn < self._idle_lsn

    def _record_idle(self) -> None:
        self._look()
        self._writer.record_keepalive(self._idle_lsn)
        self._is_idle = True
        self._last_record = time.monotonic()
        self._settle()

    def _read_trigger(self) -> str | None:
        return trigger.read_watching(self._catalog, self._pipeline)
