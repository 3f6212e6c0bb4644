"""ReconnectingReceiver: a receiver, replaced by a new one when its connection to the source was lost."""

from __future__ import annotations

import logging
import threading
import time

from airflow_provider_pgrepl.errors import BusyError, SourceConnectionError, UnsendableError
from airflow_provider_pgrepl.replication.receiver.changelog_feed import KeepaliveRule, ReceiverProgress
from airflow_provider_pgrepl.replication.receiver.receiver import Receiver
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.trace import log_unexpected

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
_POLL_S = 0.1
_STOP_LIMIT_S = 60.0


class ReconnectingReceiver:
    """Receives until stopped, or until something fails that connecting again does not mend.

    An outage lasts from the first loss until a new receiver has made something durable, or has lived for as
    long as an outage may last (`reconnect_s`); after that time the error stands. A new receiver takes the
    slot and a new fence. Who has taken them meanwhile keeps them, also one that has ended since: what this
    process knows of the lake is over then. That the server cannot send a transaction is believed when it says
    so twice in a row of the same one: some of the errors by which it does are also those of chance.
    """

    def __init__(self, dsn: str, pipeline: Pipeline, keepalive: KeepaliveRule | None = None) -> None:
        self._dsn = dsn
        self._pipeline = pipeline
        self._keepalive = keepalive
        self.progress = ReceiverProgress()
        self._receiver = self._make()
        self._stopping = threading.Event()
        self._watching: threading.Thread | None = None
        self._pause_s = FIRST_PAUSE_S
        self._unsent: int | None = None
        self.error: BaseException | None = None
        self.failed = threading.Event()

    def start(self) -> None:
        """Start receiving; raises what is wrong at the start.

        A connection lost once the slot was taken says nothing of that: it is an outage like any other.
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
        """Flush what is whole, tell the slot, and end. Harmless when nothing was started, or twice."""
        self._stopping.set()
        if self._watching is not None:
            self._watching.join(_STOP_LIMIT_S)
            if self._watching.is_alive():
                log.warning("connecting again did not end within %s s", _STOP_LIMIT_S)
        self._receiver.stop()

    def request_keepalive(self) -> None:
        """Ask the server how far it is."""
        self._receiver.request_keepalive()

    def _make(self) -> Receiver:
        return Receiver(self._dsn, self._pipeline, self._keepalive, self.progress)

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
            while not self._receiver.failed.wait(_POLL_S):
                if self._stopping.is_set():
                    return
            self._receiver.stop(is_replaced=True)
            # Once it has ended: that another took over outranks the lost connection that may be how.
            error = self._receiver.error
            assert error is not None
            if not self._receiver.has_ended or not self._may_help(error):
                raise error
            assert isinstance(error, SourceConnectionError | UnsendableError)
            now = time.monotonic()
            # The token that each start writes at the source makes the durable LSN move, too.
            is_further = self.progress.durable_lsn > durable and self.progress.changes > changes
            is_new = now - started > self._pipeline.reconnect_s or is_further
            if is_new or not began:
                began, self._pause_s = now, FIRST_PAUSE_S
            self._connect_again(began + self._pipeline.reconnect_s, error)

    def _may_help(self, error: BaseException) -> bool:
        """Whether to connect again after an error."""
        if isinstance(error, SourceConnectionError):
            log.warning("the connection to the source was lost; connecting again")
            return True
        if not isinstance(error, UnsendableError):
            return False
        unfinished = self._receiver.unfinished
        place = int(self.progress.durable_lsn) if unfinished is None else unfinished.commit_lsn
        if self._unsent == place:
            return False
        self._unsent = place
        log.warning("the server failed to send a transaction; trying once more")
        return True

    def _connect_again(
        self, deadline: float, error: SourceConnectionError | BusyError | UnsendableError
    ) -> None:
        """A new receiver at work. Raises the last error when the time is over, and any other at once."""
        while time.monotonic() + self._pause_s <= deadline:
            if self._stopping.wait(self._pause_s):
                return
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            receiver = self._make()
            try:
                receiver.start()
            except (SourceConnectionError, BusyError) as failure:
                # The slot is busy until the server has noticed that we are gone, or for good.
                error = failure
                log.info("not connected yet: %s", failure.message)
            else:
                self._receiver = receiver
                if self._stopping.is_set():
                    # Whoever stopped us did not wait for it.
                    receiver.stop()
                log.warning("connected to the source again; durable up to %s", self.progress.durable_lsn)
                return
        raise error
