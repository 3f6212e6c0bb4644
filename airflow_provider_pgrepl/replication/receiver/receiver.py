"""The receiver, from the slot to the changelog. Only this file confirms received LSNs to the slot.

It has two threads. One owns the replication connection: it reads, and sends status messages even while a
flush is slow. The other splits messages and writes the changelog. An LSN is confirmed to the slot only after
the changelog commit that covers it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import (
    BusyError,
    FencedError,
    PgReplError,
    SourceConnectionError,
    UnsendableError,
)
from airflow_provider_pgrepl.replication.changelog.gaps import last_gap
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import open_changelog, read_durable_lsn, read_token
from airflow_provider_pgrepl.replication.changelog.writer import ChangelogWriter, Fence
from airflow_provider_pgrepl.replication.pgoutput.columns import TransactionBegin
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.connection import (
    Connection,
    SessionEndDetector,
    connect,
    server_dsn,
)
from airflow_provider_pgrepl.replication.source.slot import advance_slot, read_slot
from airflow_provider_pgrepl.replication.source.stream import Chunk, Liveness, ReplicationStream, is_at_work
from airflow_provider_pgrepl.replication.state.source_tokens import NewToken, renew_token, replace_token
from airflow_provider_pgrepl.replication.storage import durable, storage_errors
from airflow_provider_pgrepl.trace import log_unexpected, trace_of

from . import continuity
from .changelog_feed import ChangelogFeed, KeepaliveRule, ReceiverProgress
from .in_progress import InProgressTransactions, NotKeptError

log = logging.getLogger(__name__)
_CHUNK_BYTES = 8 << 20
_STATUS_INTERVAL_S = 5.0
_SMALL_BYTES, _GATHER_S = 64 << 10, 0.005
_POLL_S = 0.05
_MENDABLE = (SourceConnectionError, UnsendableError)
"""The errors after which `ReconnectingReceiver` may connect again."""
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
_FAILED_POLL_S = 0.1
_STOP_LIMIT_S = 60.0
_PROTOCOL_CHANGE_S = 60.0
"""The least seconds for connecting again with another version of the protocol, which is no outage."""
FollowPromotion = Callable[[LSN], None]
"""Called before changes are received from a promoted standby, with the LSN at which it left the recorded
timeline: stops tables that may have rows from after that LSN. May be called again for the same promotion."""


def _leave_to_app(fork_lsn: LSN) -> None:
    raise BusyError(
        f"the source was promoted at {fork_lsn}, and the replication app has not received from it yet",
        "start the replication app, then run this again",
    )


def pass_gaps(source: Connection, pipeline: Pipeline) -> None:
    """Advance the slot past the last durable gap, if it has not confirmed that gap yet.

    Raises BusyError while a walsender reads the slot, LakeUnavailableError, and what `continuity.check`
    raises.
    """
    uri = changelog_uri(pipeline.lake_root)
    changelog = open_changelog(uri)
    slot, durable_lsn = read_slot(source, pipeline.slot), read_durable_lsn(changelog)
    if slot is None or slot.confirmed_flush_lsn is None or slot.confirmed_flush_lsn >= durable_lsn:
        return
    record = EpochRecord.from_json(changelog.metadata().description)
    lsn = last_gap(changelog, record.epoch, LSN(max(0, slot.confirmed_flush_lsn - 1)))
    if lsn is not None:
        continuity.check(source, record, durable_lsn, read_token(changelog))
        # The process that recorded the gap may have died before the commit was flushed to disk.
        with storage_errors(uri):
            durable.flush_newest(uri)
        advance_slot(source, slot.name, LSN(lsn + 1))
        log.warning("the slot %s was moved past the transaction at %s, which was skipped", slot.name, lsn)


def _outranks(later: BaseException, first: BaseException) -> bool:
    """Return True if `later` is to be reported instead of `first`.

    A fence outranks every error: the takeover may have caused the lost connection. An error that connecting
    again does not resolve, such as a failed flush to disk, outranks one that it may resolve.
    """
    if isinstance(later, FencedError):
        return True
    return isinstance(first, _MENDABLE) and not isinstance(later, _MENDABLE)


class Receiver:
    """A receiver that runs until it is stopped or fails. `start` raises errors; `error` holds later ones.

    `progress`: the progress of the receiver that this one replaces and continues.
    """

    def __init__(
        self,
        dsn: str,
        pipeline: Pipeline,
        keepalive: KeepaliveRule | None = None,
        progress: ReceiverProgress | None = None,
        follow_promotion: FollowPromotion = _leave_to_app,
        *,
        in_progress: bool = False,
    ) -> None:
        self._dsn = dsn
        self._follow_promotion = follow_promotion
        self._pipeline = pipeline
        self._rule = keepalive or KeepaliveRule()
        self._receives_in_progress = in_progress
        self._in_progress = InProgressTransactions()
        self._chunks: queue.Queue[Chunk | None] = queue.Queue(
            max(1, pipeline.receive_buffer_bytes // _CHUNK_BYTES)
        )
        self._stopping = threading.Event()
        self._ask_for_reply = threading.Event()
        self._connections = ExitStack()
        self._threads: list[threading.Thread] = []
        self._last_status = 0.0
        self._confirmed_lsn = LSN(0)
        self.progress = progress or ReceiverProgress()
        self.error: BaseException | None = None
        self.unfinished: TransactionBegin | None = None
        """The transaction that the server began to send but could not finish, with an UnsendableError.

        Every transaction that committed before it is durable.
        """
        self.failed = threading.Event()
        self._renews, self._superseded = True, 0
        self._has_fenced = False
        self.must_await_commits = False
        """True if a transaction has to be received after its commit."""
        self.had_slot = False
        """True once this receiver has acquired the slot: address, login and privileges were accepted."""

    def start(self) -> None:
        """Check source and changelog, acquire the slot, fence the changelog, and start the threads."""
        with ExitStack() as connections:
            self._prepare(connections)
            self._connections = connections.pop_all()
        log.info("receiving from slot %s, durable up to %s", self._pipeline.slot, self.progress.durable_lsn)
        self._writing = self._thread("pgrepl-write", self._write)
        self._reading = self._thread("pgrepl-read", self._read)
        # The reading thread queues chunks only while the writing thread is alive, so start that one first.
        self._threads = [self._writing, self._reading]
        for thread in self._threads:
            thread.start()

    def _prepare(self, connections: ExitStack) -> None:
        pipeline = self._pipeline
        self._catalog = connect(self._dsn, f"catalog {pipeline.name}", read_only=True)
        connections.callback(self._catalog.close)
        self._session = SessionEndDetector(self._catalog)
        # From here on use one server: the connection string may name several.
        self._server_dsn = server_dsn(self._catalog)
        changelog = open_changelog(changelog_uri(pipeline.lake_root))
        record = EpochRecord.from_json(changelog.metadata().description)
        # Check the source before the slot: a slot of another database says nothing about this pipeline's.
        server = continuity.check_source(self._catalog, record)
        # Check the slot before streaming: START_REPLICATION does not report why a slot was invalidated.
        continuity.check_slot(self._catalog, pipeline.slot, server)
        if server.timeline != record.timeline:
            # A promoted standby that lacks changes may lack the token as well, which does not name them.
            continuity.check_history(self._catalog, server, record, read_durable_lsn(changelog))
        pass_gaps(self._catalog, pipeline)
        self._stream = connections.enter_context(
            ReplicationStream(
                self._server_dsn,
                pipeline.slot,
                pipeline.publication,
                messages=bool(pipeline.message_prefixes) or pipeline.event_trigger,
                message_bytes=pipeline.message_bytes,
                server=server,
                in_progress=self._receives_in_progress,
            )
        )
        connections.callback(self._in_progress.close)
        self.had_slot = True
        self._liveness = Liveness(partial(is_at_work, self._server_dsn, self._stream.sender_pid))
        # While this receiver holds the slot, no other receiver on this server writes a token for it.
        writer = ChangelogWriter(
            changelog_uri(pipeline.lake_root), self.progress.sequence, self._check_continuation
        )
        self._feed = ChangelogFeed(
            pipeline,
            self._catalog,
            writer,
            self.progress,
            self._rule,
            self._confirmed_lsn,
            self._replace_token,
        )
        self._has_fenced = True

    def _check_continuation(self, before: int, record: EpochRecord, durable_lsn: LSN) -> Fence:
        """Return the content of the fence. Raises what `continuity.check` and `renew_token` raise."""
        found = continuity.Continuation(LSN(0), record.timeline)

        def check() -> None:
            nonlocal found
            found = continuity.check(self._catalog, record, durable_lsn, before)

        used = self._pipeline.used_publication
        token = renew_token(self._server_dsn, self._pipeline.slot, check, before, used)
        self._confirmed_lsn = found.confirmed_lsn
        if found.fork_lsn is not None:
            self._follow_promotion(found.fork_lsn)
            log.warning(
                "the source is a promoted standby on timeline %d, which left timeline %d at %s; everything"
                " received, up to %s, is in its history: continuing",
                found.timeline,
                record.timeline,
                found.fork_lsn,
                durable_lsn,
            )
        return Fence(token, found.timeline)

    def _replace_token(self, before: int) -> NewToken | None:
        """Return a new token, or None if the source keeps none or cannot write one now."""
        if not self._renews or not before:
            return None
        try:
            used = self._pipeline.used_publication
            fresh = replace_token(self._server_dsn, self._pipeline.slot, before, self._superseded, used)
        except PgReplError as error:
            log.info("the token that source and lake share is renewed later: %s", error.message)
            return None
        # A token that was not replaced will not be either next time; the reason was logged once.
        self._renews = fresh is not None
        self._superseded = before
        return fresh

    def _thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=self._guard, args=(work,), name=name, daemon=True)

    def stop(self, timeout_s: float = 60.0, *, is_replaced: bool = False) -> None:
        """Flush complete transactions, confirm them to the slot, and end within `timeout_s` seconds.

        Does nothing if the receiver was not started or has been stopped. `is_replaced`: another receiver of
        this process follows, so the changelog does not record that this one has ended.
        """
        self._stopping.set()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not self.has_ended:
            # Do not close a connection that a thread still uses. The slot is free when the process exits.
            log.warning(
                "the receiver did not end within %s s; what it was writing is not confirmed", timeout_s
            )
            return
        if self._has_fenced and not is_replaced:
            self._rest()
        if self._threads:
            # The next receiver continues from the last commit, even if this one failed before recording it.
            self.progress.sequence, self._threads = self._feed.sequence, []
        self._connections.close()

    def _rest(self) -> None:
        self._has_fenced = False
        try:
            self._feed.rest()
        except PgReplError as error:
            log.info("the changelog does not say that this receiver has ended: %s", error.message)

    @property
    def has_ended(self) -> bool:
        """Return True if no thread of the receiver is running."""
        return not any(thread.is_alive() for thread in self._threads)

    def request_keepalive(self) -> None:
        """Request a keepalive, so that `seen_lsn` advances without waiting for the server's own keepalive."""
        self._ask_for_reply.set()

    def record_past(self, wanted: LSN) -> None:
        """Make the changelog durable past an LSN as soon as that was received, also if the source is idle.

        May be called again and again: only a higher LSN than before has an effect.
        """
        if wanted > self.progress.wanted_lsn:
            self.progress.wanted_lsn = wanted
            self.request_keepalive()

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that supervises
            if self.error is None or _outranks(error, self.error):
                self.error = error
            is_error = not (isinstance(error, FencedError) or self.must_await_commits)
            level = logging.ERROR if is_error else logging.WARNING
            if isinstance(error, PgReplError):
                log.log(level, "the receiver ended: %s", error)
            else:
                log.error("the receiver ended: unexpected %s", trace_of(error))
        finally:
            self._stopping.set()
            if self.error is not None:
                self.failed.set()

    # The methods of the reading thread, which owns the replication connection.

    def _read(self) -> None:
        try:
            while not self._stopping.is_set():
                chunk = self._stream.read(_POLL_S, _CHUNK_BYTES)
                if chunk.messages or chunk.keepalive:
                    self._hand_over_committed(chunk)
                if chunk.has_heard:
                    self._liveness.heard()
                elif self._liveness.must_ask():
                    self.request_keepalive()
                wants_reply = chunk.keepalive is not None and chunk.keepalive.wants_reply
                is_small = chunk.has_heard and not wants_reply and chunk.size < _SMALL_BYTES
                del chunk  # free its memory before the next one is read
                self._send_status_if_due(asked=wants_reply)
                if is_small:
                    # A chunk costs as much as some hundred messages: wait, so that more arrive together.
                    self._stopping.wait(_GATHER_S)
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
        """Return the error with the transaction's position, if the server began to send the transaction.

        Called after the writing thread has ended.
        """
        self.unfinished = begun = self._feed.begun
        if begun is None:
            place = f"the next transaction after {self.progress.durable_lsn}"
            way_out = f"it cannot be skipped, because the server does not name it: {errors.NEW_EPOCH}"
        else:
            place = f"the transaction at {LSN(begun.commit_lsn)} (xid {begun.xid})"
            way_out = (
                "skip the transaction, which is then missing in the lake: pgrepl skip FILE.json --lsn"
                f" {LSN(begun.commit_lsn)} prints the tables that need a resnapshot, and with --yes skips it"
            )
        return UnsendableError(
            f"the server cannot send {place}: {error.message}. The transaction stays in the WAL,"
            " whatever is done to the row now, and ends the stream each time",
            "first fix the cause (the program that writes such rows, a row filter, or the server's own error"
            f" in its log); then {way_out}",
        )

    def _hand_over_committed(self, chunk: Chunk) -> None:
        """Queue what the chunk has of transactions that have committed, and keep the rest until they do.

        Raises SourceConnectionError if it cannot be kept.
        """
        try:
            for part in self._in_progress.take(chunk):
                if self._stopping.is_set():
                    return
                self._hand_over(part)
                self._send_status_if_due()
        except NotKeptError as error:
            self.must_await_commits = True
            raise SourceConnectionError(f"a transaction in progress cannot be kept: {error}") from None

    def _hand_over(self, chunk: Chunk) -> None:
        """Queue the chunk for the writing thread. While the queue is full, send status messages."""
        while self._writing.is_alive():
            try:
                self._chunks.put(chunk, timeout=_POLL_S)
                return
            except queue.Full:
                self._send_status_if_due()
        # The writing thread failed and has set `error`. The chunk is not durable, so the slot retains it.
        self._stopping.set()

    def _end_writing(self) -> None:
        """Let the writing thread process the queued chunks and end, even if the connection is lost."""
        while self._writing.is_alive():
            with suppress(queue.Full):
                self._chunks.put(None, timeout=_POLL_S)
                return

    def _send_status_if_due(self, *, asked: bool = False) -> None:
        self._check_session()
        moved = self._confirmable_lsn > self.progress.confirmed_lsn
        overdue = time.monotonic() - self._last_status >= _STATUS_INTERVAL_S
        if asked or moved or overdue or self._ask_for_reply.is_set():
            self._send_status()

    def _check_session(self) -> None:
        """Close the stream and raise SourceConnectionError if the server has ended the catalog session.

        Without that session nothing becomes durable. The writing thread notices its end only after its
        commit, and a server that shuts down waits for the receiver.
        """
        if self._session.has_ended():
            self._stream.close()
            raise SourceConnectionError("the server ended the session at the catalog, as in a shutdown")

    @property
    def _confirmable_lsn(self) -> LSN:
        return self.progress.durable_lsn if self._feed.has_passed_resent else self._feed.confirmed_lsn

    def _send_status(self) -> None:
        if self._stream.has_ended:
            # The server reads no more status messages, and `read` has yet to raise why the stream ended.
            return
        asks = self._ask_for_reply.is_set()
        self._ask_for_reply.clear()
        confirmed = self._confirmable_lsn
        self._stream.send_status(max(self.progress.received_lsn, confirmed), confirmed, wants_reply=asks)
        self.progress.confirmed_lsn = confirmed
        self._last_status = time.monotonic()

    # The methods of the writing thread, which owns the feed and the catalog connection.

    def _write(self) -> None:
        feed = self._feed
        while True:
            feed.look_if_due()
            feed.renew_if_due()
            try:
                chunk = self._chunks.get(timeout=feed.until_flush())
            except queue.Empty:
                feed.flush_if_due()
                continue
            if chunk is None:
                break
            feed.take(chunk)
            feed.flush_if_due()
        feed.finish()


class ReconnectingReceiver:
    """A receiver that connects again until it is stopped, or fails with an error that this does not resolve.

    An outage lasts from the first loss until a new receiver has made changes durable, or has run for longer
    than `reconnect_s`. If the outage lasts longer than `reconnect_s`, the error is final. A new receiver
    acquires the slot and a new fence. If another receiver acquired them first, this one fails, even if the
    other has ended since: what this process knows about the lake is outdated. An UnsendableError is final
    only if it occurs twice in a row at the same transaction: some of its causes can be temporary.
    """

    def __init__(
        self,
        dsn: str,
        pipeline: Pipeline,
        keepalive: KeepaliveRule | None = None,
        follow_promotion: FollowPromotion = _leave_to_app,
    ) -> None:
        self._pipeline = pipeline
        self.progress = ReceiverProgress()
        self._new = partial(Receiver, dsn, pipeline, keepalive, self.progress, follow_promotion)
        self._receives_in_progress = pipeline.stream_in_progress
        self._receiver = self._new(in_progress=self._receives_in_progress)
        self._stopping = threading.Event()
        self._watching: threading.Thread | None = None
        self._pause_s = FIRST_PAUSE_S
        self._cannot_send: int | None = None
        self.error: BaseException | None = None
        self.failed = threading.Event()

    def start(self) -> None:
        """Start receiving. Raises the errors of `Receiver.start`.

        If the connection is lost after the slot was acquired, nothing is raised: that is an outage.
        """
        try:
            self._receiver.start()
        except SourceConnectionError as error:
            if not self._receiver.had_slot:
                raise
            self._receiver.error = error
            self._receiver.failed.set()
        self._watching = threading.Thread(target=self._watch, name="pgrepl-reception", daemon=True)
        self._watching.start()

    def stop(self) -> None:
        """Flush complete transactions, confirm them to the slot, and end.

        Does nothing if receiving was not started or has been stopped.
        """
        self._stopping.set()
        if self._watching is not None:
            self._watching.join(_STOP_LIMIT_S)
            if self._watching.is_alive():
                log.warning("connecting again did not end within %s s", _STOP_LIMIT_S)
        self._receiver.stop()

    def request_keepalive(self) -> None:
        """Request a keepalive from the server."""
        self._receiver.request_keepalive()

    def record_past(self, wanted: LSN) -> None:
        """Make the changelog durable past an LSN as soon as that was received, also if the source is idle."""
        self._receiver.record_past(wanted)

    def _watch(self) -> None:
        try:
            self._replace_when_lost()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that supervises
            log_unexpected(log, "connecting to the source again", error)
            self.error = error
            self.failed.set()

    def _replace_when_lost(self) -> None:
        began = 0.0
        while not self._stopping.is_set():
            started, durable, changes = time.monotonic(), self.progress.durable_lsn, self.progress.changes
            while not self._receiver.failed.wait(_FAILED_POLL_S):
                if self._stopping.is_set():
                    return
            self._receiver.stop(is_replaced=True)
            # Read the error after the receiver has ended: a fence may still replace a lost connection.
            error = self._receiver.error
            assert error is not None
            if not self._receiver.has_ended or not self._may_help(error):
                raise error
            assert isinstance(error, SourceConnectionError | UnsendableError)
            now = time.monotonic()
            # Count changes as well: the token that each start writes also advances the durable LSN.
            is_further = self.progress.durable_lsn > durable and self.progress.changes > changes
            is_new = now - started > self._pipeline.reconnect_s or is_further
            if is_new or not began or self._receiver.must_await_commits:
                began, self._pause_s = now, FIRST_PAUSE_S
            least_s = _PROTOCOL_CHANGE_S if self._receiver.must_await_commits else 0.0
            self._connect_again(began + max(least_s, self._pipeline.reconnect_s), error)

    def _may_help(self, error: BaseException) -> bool:
        """Return True if connecting again may resolve the error.

        An UnsendableError is retried once at the same transaction. After it, transactions are received when
        they have committed: only then does the server name one that it cannot send.
        """
        if self._receiver.must_await_commits or isinstance(error, UnsendableError):
            self._receives_in_progress = False
        if isinstance(error, SourceConnectionError):
            lost = "the connection to the source was lost; connecting again"
            later = f"{error}; from now on, transactions are received when they have committed"
            log.warning("%s", later if self._receiver.must_await_commits else lost)
            return True
        if not isinstance(error, UnsendableError):
            return False
        unfinished = self._receiver.unfinished
        place = int(self.progress.durable_lsn) if unfinished is None else unfinished.commit_lsn
        if self._cannot_send == place:
            return False
        self._cannot_send = place
        log.warning("the server failed to send a transaction; trying once more")
        return True

    def _connect_again(
        self, deadline: float, error: SourceConnectionError | BusyError | UnsendableError
    ) -> None:
        """Start a new receiver. Raises the last connection error or BusyError at `deadline`, others at once.

        Does nothing if `stop` is called first.
        """
        while time.monotonic() + self._pause_s <= deadline:
            if self._stopping.wait(self._pause_s):
                return
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            receiver = self._new(in_progress=self._receives_in_progress)
            try:
                receiver.start()
            except (SourceConnectionError, BusyError) as failure:
                # The slot is busy until the server notices the lost connection, or while another reads it.
                error = failure
                log.info("not connected yet: %s", failure.message)
            else:
                self._receiver = receiver
                self.progress.reconnects += 1
                if self._stopping.is_set():
                    # `stop` was called while this receiver started, and stopped the previous one.
                    receiver.stop()
                log.warning("connected to the source again; durable up to %s", self.progress.durable_lsn)
                return
        raise error
