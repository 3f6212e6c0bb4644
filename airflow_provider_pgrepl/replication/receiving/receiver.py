"""Receiver: from the slot to the changelog. The only file that tells the slot an LSN.

Two threads: one owns the connection (reads, and sends status messages also while a flush is slow), one splits
and writes. The slot is told an LSN only after the changelog commit that covers it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial

from airflow_provider_pgrepl import hints
from airflow_provider_pgrepl.errors import FencedError, PgReplError, UnsendableError
from airflow_provider_pgrepl.replication import continuity
from airflow_provider_pgrepl.replication.changelog.layout import changelog_uri
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex, relations_uri
from airflow_provider_pgrepl.replication.changelog.writer import ChangelogWriter
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.drift.hidden_columns import HiddenColumns
from airflow_provider_pgrepl.replication.lsn import LSN
from airflow_provider_pgrepl.replication.receiving.buffer import TransactionBuffer
from airflow_provider_pgrepl.replication.receiving.catalog_watch import CatalogWatch
from airflow_provider_pgrepl.replication.receiving.message_rows import KeptMessages
from airflow_provider_pgrepl.replication.receiving.publication_watch import PublicationWatch
from airflow_provider_pgrepl.replication.receiving.redelivered import ResentCheck
from airflow_provider_pgrepl.replication.receiving.relation_tracker import RelationTracker
from airflow_provider_pgrepl.replication.receiving.skipping import pass_gaps
from airflow_provider_pgrepl.replication.receiving.version_tagging import VersionTagger
from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.source.ddl_capture import event_trigger
from airflow_provider_pgrepl.replication.source.liveness import Liveness, is_at_work
from airflow_provider_pgrepl.replication.source.stream import Chunk, ReplicationStream
from airflow_provider_pgrepl.replication.wire.columns import Splitter, TransactionBegin

log = logging.getLogger(__name__)

_CHUNK_BYTES = 8 << 20
_STATUS_INTERVAL_S = 5.0
_POLL_S = 0.05
_LOOK_S, _IDLE_LOOK_S = 0.2, 5.0


@dataclass(frozen=True)
class KeepaliveRule:
    """When a keepalive's LSN is recorded in the changelog, so that an idle database's slot moves."""

    min_interval_s: float = 30.0
    min_bytes: int = 1 << 20
    max_wait_s: float = 60.0


@dataclass
class ReceiverProgress:
    """How far the receiver has got. `seen_lsn`: all that committed at or before it is durable. `sequence`:
    that of its writer's last commit, None before the first."""

    received_lsn: LSN = field(default_factory=lambda: LSN(0))
    durable_lsn: LSN = field(default_factory=lambda: LSN(0))
    confirmed_lsn: LSN = field(default_factory=lambda: LSN(0))
    seen_lsn: LSN = field(default_factory=lambda: LSN(0))
    changelog_version: int = 0
    sequence: int | None = None
    changes: int = 0


class Receiver:
    """Receives until stopped or failed: `start` raises what is wrong then, `error` holds what came later.

    `progress`: that of a receiver which this one replaces, to go on with.
    """

    def __init__(
        self,
        dsn: str,
        pipeline: Pipeline,
        keepalive: KeepaliveRule | None = None,
        progress: ReceiverProgress | None = None,
    ) -> None:
        self._dsn = dsn
        self._pipeline = pipeline
        self._rule = keepalive or KeepaliveRule()
        self._chunks: queue.Queue[Chunk | None] = queue.Queue(
            max(1, pipeline.receive_buffer_bytes // _CHUNK_BYTES)
        )
        self._stopping = threading.Event()
        self._ask_for_reply = threading.Event()
        self._connections = ExitStack()
        self._threads: list[threading.Thread] = []
        self._last_status = 0.0
        self.progress = progress or ReceiverProgress()
        self.error: BaseException | None = None
        self.unsent: TransactionBegin | None = None
        """The transaction that the server has begun to send, and failed to: `error` is UnsendableError then.
        All that committed before it is durable."""
        self.failed = threading.Event()
        self.had_slot = False
        """Whether the slot was taken: address, login and rights are right then."""

    def start(self) -> None:
        """Take the slot, fence the changelog, check that source and changelog continue each other, and go."""
        with ExitStack() as connections:
            self._prepare(connections)
            self._connections = connections.pop_all()
        log.info("receiving from slot %s, durable up to %s", self._pipeline.slot, self._writer.durable_lsn)
        self._writing = self._thread("pgrepl-write", self._write)
        self._reading = self._thread("pgrepl-read", self._read)
        # The reader hands over to a writer that is alive, so that one goes first.
        self._threads = [self._writing, self._reading]
        for thread in self._threads:
            thread.start()

    def _prepare(self, connections: ExitStack) -> None:
        pipeline, uri = self._pipeline, changelog_uri(self._pipeline.lake_root)
        self._catalog = connect(self._dsn, f"catalog {pipeline.name}", read_only=True)
        connections.callback(self._catalog.close)
        pass_gaps(self._catalog, pipeline)
        self._stream = connections.enter_context(
            ReplicationStream(
                self._dsn,
                pipeline.slot,
                pipeline.publication,
                messages=bool(pipeline.message_prefixes) or pipeline.event_trigger,
                message_bytes=pipeline.message_bytes,
            )
        )
        self.had_slot = True
        self._liveness = Liveness(partial(is_at_work, self._dsn, self._stream.sender_pid))
        self._writer = writer = ChangelogWriter(uri, self.progress.sequence)
        self.progress.sequence = writer.sequence
        self._confirmed = continuity.check(self._catalog, writer.epoch_record, writer.durable_lsn)
        self._resent = ResentCheck.load(uri, writer, self._confirmed)
        self._watch = CatalogWatch(
            self._catalog, writer.epoch_record, trusts_owners=pipeline.trust_table_owners
        )
        index = RelationIndex(relations_uri(pipeline.lake_root))
        announcements = RelationTracker(
            pipeline.name,
            pipeline.publication,
            writer.epoch,
            index,
            read_relation=self._watch.read_relation,
            read_trigger=self._read_trigger,
            read_key=partial(event_trigger.read_key, self._catalog, pipeline.name),
            hidden=HiddenColumns(pipeline, index.catalogs),
        )
        if pipeline.event_trigger and self._read_trigger() is None:
            log.warning("the event trigger is not there, or does not fire: %s", hints.SNAPSHOT)
        elif pipeline.event_trigger and event_trigger.read_key(self._catalog, pipeline.name) is None:
            log.warning("the key of the event trigger cannot be read: %s", hints.SNAPSHOT)
        self._splitter = Splitter()
        # Without the option nobody's messages say anything of tables.
        look_at_ddl = announcements.look_at_ddl if pipeline.event_trigger else None
        kept = KeptMessages(frozenset(pipeline.message_prefixes))
        self._stamper = VersionTagger(writer.epoch, announcements.announced, look_at_ddl, kept)
        self._buffer = TransactionBuffer(writer, pipeline.part_bytes)
        # All that committed before it has been received; once the buffer is flushed it is durable too.
        self._idle_lsn = writer.durable_lsn
        self._last_flush = self._last_record = self._last_move = time.monotonic()
        self._publication = PublicationWatch(
            self._catalog, writer, index, trusts_owners=pipeline.trust_table_owners
        )
        # The writing thread looks first of all: a connection lost meanwhile is then one lost while running.
        self._looked_lsn, self._last_look = self._idle_lsn, float("-inf")
        progress = self.progress
        progress.durable_lsn = progress.seen_lsn = progress.received_lsn = writer.durable_lsn
        progress.changelog_version = writer.version

    def _thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=self._guard, args=(work,), name=name, daemon=True)

    def stop(self, timeout_s: float = 60.0) -> None:
        """Flush what is whole, tell the slot, and end. Harmless when nothing was started, or twice."""
        self._stopping.set()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not self.has_ended:
            # A connection must not be closed under the thread that uses it; the slot is free when we exit.
            log.warning(
                "the receiver did not end within %s s; what it was writing is not confirmed", timeout_s
            )
            return
        self._connections.close()

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it is at work any more."""
        return not any(thread.is_alive() for thread in self._threads)

    def request_keepalive(self) -> None:
        """Ask the server how far it is, so that `seen_lsn` moves without waiting for its own keepalive."""
        self._ask_for_reply.set()

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            # Who replaces this one continues from its last commit, also when it failed before it said so.
            self.progress.sequence = self._writer.sequence
            # That another took over outranks a lost connection, which may be how it took over.
            if self.error is None or isinstance(error, FencedError):
                self.error = error
            level = logging.WARNING if isinstance(error, FencedError) else logging.ERROR
            log.log(level, "the receiver ended: %s", error, exc_info=not isinstance(error, PgReplError))
        finally:
            self._stopping.set()
            if self.error is not None:
                self.failed.set()

    # The reading thread: the connection is its own.

    def _read(self) -> None:
        try:
            while not self._stopping.is_set():
                chunk = self._stream.read(_POLL_S, _CHUNK_BYTES)
                if chunk.messages or chunk.keepalive:
                    self._hand_over(chunk)
                    self._liveness.heard()
                elif self._liveness.must_ask():
                    self.request_keepalive()
                wants_reply = chunk.keepalive is not None and chunk.keepalive.wants_reply
                del chunk  # while the next one comes, it need not be there as well
                self._send_status_if_due(asked=wants_reply)
        except UnsendableError as error:
            self._end_writing()
            self._writing.join()
            raise self._unsendable(error) from None
        finally:
            self._end_writing()
        while self._writing.is_alive():
            self._writing.join(_POLL_S)
            self._send_status_if_due()
        if self.error is None:
            self._send_status()
            self._stream.end()

    def _unsendable(self, error: UnsendableError) -> UnsendableError:
        """The same, with the place of the transaction if it has begun. The writing thread has ended."""
        self.unsent = begun = self._splitter.begun
        if begun is None:
            place = f"the next transaction after {self.progress.durable_lsn}"
            way_out = hints.NEW_EPOCH
        else:
            place = f"the transaction at {LSN(begun.commit_lsn)} (xid {begun.xid})"
            way_out = (
                f"pgrepl skip FILE.json --lsn {LSN(begun.commit_lsn)} says what it"
                " costs to go on without this transaction, and with --yes does so"
            )
        return UnsendableError(
            f"the server cannot send {place}: {error.message}. It stands in the WAL as it is, whatever is"
            " done to the row now, and ends the stream each time",
            f"mend what writes such rows first; then {way_out}",
        )

    def _hand_over(self, chunk: Chunk) -> None:
        """Queue it for the writing thread; while that is behind, go on sending status messages."""
        while self._writing.is_alive():
            try:
                self._chunks.put(chunk, timeout=_POLL_S)
                return
            except queue.Full:
                self._send_status_if_due()
        # The writer failed; its error stands. What was read is not durable, so the slot keeps it.
        self._stopping.set()

    def _end_writing(self) -> None:
        """Let the writing thread finish what it was given, also when the connection is gone."""
        while self._writing.is_alive():
            with suppress(queue.Full):
                self._chunks.put(None, timeout=_POLL_S)
                return

    def _send_status_if_due(self, *, asked: bool = False) -> None:
        moved = self._confirmable_lsn > self.progress.confirmed_lsn
        overdue = time.monotonic() - self._last_status >= _STATUS_INTERVAL_S
        if asked or moved or overdue or self._ask_for_reply.is_set():
            self._send_status()

    @property
    def _confirmable_lsn(self) -> LSN:
        return self.progress.durable_lsn if self._resent.is_passed else self._confirmed

    def _send_status(self) -> None:
        asks = self._ask_for_reply.is_set()
        self._ask_for_reply.clear()
        confirmed = self._confirmable_lsn
        self._stream.send_status(max(self.progress.received_lsn, confirmed), confirmed, wants_reply=asks)
        self.progress.confirmed_lsn = confirmed
        self._last_status = time.monotonic()

    # The writing thread: splitter, buffer, changelog and catalog connection are its own.

    def _write(self) -> None:
        while True:
            self._look_if_due()
            try:
                chunk = self._chunks.get(timeout=self._until_flush())
            except queue.Empty:
                self._flush_if_due()
                continue
            if chunk is None:
                break
            self._take(chunk)
            self._flush_if_due()
        self._flush()
        if self._idle_lsn > self.progress.durable_lsn:
            self._record_idle()

    def _take(self, chunk: Chunk) -> None:
        if chunk.messages:
            split = self._splitter.split(chunk.messages)
            # A row of hundreds of MB need not be there twice while it is written.
            chunk.messages.clear()
            rows = self._resent.drop(self._stamper.stamp(split), split.ended)
            self._buffer.add(rows, split.ended, chunk.size)
            self.progress.changes += rows.num_rows
            if split.ended:
                self._idle_lsn = max(self._idle_lsn, LSN(split.ended[-1].end_lsn))
        if chunk.keepalive and not self._splitter.is_open:
            self._resent.pass_idle(chunk.keepalive.lsn)
            self._idle_lsn = max(self._idle_lsn, chunk.keepalive.lsn)
        self.progress.received_lsn = self._idle_lsn
        if not self._buffer.has_whole:
            self._settle()

    def _look_if_due(self) -> None:
        """What came is seen to be all that there is; also that nothing comes."""
        interval = _LOOK_S if self._idle_lsn > self._looked_lsn else _IDLE_LOOK_S
        if not self._buffer.has_whole and time.monotonic() - self._last_look >= interval:
            self._look()
            self._settle()

    def _look(self) -> None:
        """Before anything becomes durable: are all changes sent? Says in the changelog where they may not be.

        Raises PublicationError, and what `PublicationWatch.look` does.
        """
        self._watch.check_publication()
        self._publication.look()
        self._looked_lsn, self._last_look = self._idle_lsn, time.monotonic()

    def _until_flush(self) -> float:
        if not self._buffer.has_whole:
            return self._pipeline.flush_interval_s
        return max(0.0, self._last_flush + self._pipeline.flush_interval_s - time.monotonic())

    def _flush_if_due(self) -> None:
        interval_over = time.monotonic() - self._last_flush >= self._pipeline.flush_interval_s
        if self._buffer.has_whole:
            if interval_over or self._buffer.whole_bytes >= self._pipeline.flush_bytes:
                self._flush()
        elif self._keepalive_due():
            self._record_idle()

    def _flush(self) -> None:
        if not self._buffer.has_whole:
            return
        self._look()
        self._buffer.flush(self._idle_lsn)
        self._last_flush = time.monotonic()
        self._settle()

    def _settle(self) -> None:
        """Say how far everything is durable now; the reading thread tells the slot."""
        progress, durable = self.progress, self._writer.durable_lsn
        if durable > progress.durable_lsn:
            self._last_move = time.monotonic()
        progress.changelog_version = self._writer.version
        progress.sequence = self._writer.sequence
        progress.durable_lsn = durable
        progress.seen_lsn = max(durable, self._looked_lsn)

    def _keepalive_due(self) -> bool:
        now, ahead = time.monotonic(), self._idle_lsn - self._writer.durable_lsn
        if ahead <= 0 or self._splitter.is_open or now - self._last_record < self._rule.min_interval_s:
            return False
        return ahead >= self._rule.min_bytes or now - self._last_move >= self._rule.max_wait_s

    def _record_idle(self) -> None:
        self._look()
        self._writer.record_keepalive(self._idle_lsn)
        self._last_record = time.monotonic()
        self._settle()

    def _read_trigger(self) -> str | None:
        return event_trigger.read_watching(self._catalog, self._pipeline)
