"""The creation of a slot, which is canceled if it takes too long.

`create_slot` advances a pipeline's slot to a position from which the server decodes correctly. The server
builds its snapshot of the catalog in phases, and each phase waits for the transactions of the previous one.
Commits in the first phase are not tracked (DecodeXactOp in decode.c returns early). So a transaction that
begins in the second may be decoded with an outdated catalog: an added column is left out, a rewritten one
ends the stream. The same is possible later, until the slot begins to decode from a catalog snapshot that the
server has stored. https://postgrespro.ru/list/thread-id/2779642

`take_over_slot` creates a slot at the position of another program's slot. pg_copy_logical_replication_slot
copies restart_lsn and confirmed_flush_lsn, so the server sends the new slot everything that the other's
reader has not confirmed (PostgreSQL's manual, 9.28.6).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import datetime
from types import TracebackType
from typing import Any, NoReturn

import psycopg2.errors

from airflow_provider_pgrepl.errors import (
    BusyError,
    PgReplError,
    PrivilegeError,
    PublicationError,
    ServerSettingError,
    SlotError,
    SnapshotError,
    SourceConnectionError,
)
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import quote_identifier

from .connection import Connection, abandon, connect, connect_replication, patience, row, rows
from .server import read_server
from .server_errors import describe, source_errors, translate
from .slot import (
    PLUGIN,
    READING_WAL_S,
    Slot,
    advance_slot,
    drop_slot,
    read_slot,
    reason_to_keep,
    temporary_name,
)

_BLOCKERS = """
SELECT pg_catalog.format('pid %%s (transaction %%s, %%s, %%s, in it since %%s)', a.pid,
           coalesce(l.transactionid::text, 'unknown'), coalesce(a.usename, 'unknown user'),
           coalesce(nullif(a.application_name, ''), 'no application name'),
           coalesce(a.xact_start::timestamptz(0)::text, 'unknown'))
FROM unnest(pg_catalog.pg_blocking_pids(%(pid)s)) AS b (pid)
    JOIN pg_catalog.pg_stat_activity a ON a.pid = b.pid
    LEFT JOIN pg_catalog.pg_locks l
        ON l.pid = b.pid AND l.locktype = 'transactionid' AND l.granted AND l.mode = 'ExclusiveLock'
UNION
SELECT pg_catalog.format('prepared transaction %%L (transaction %%s)', p.gid, p.transaction)
FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_prepared_xacts p ON p.transaction = l.transactionid
WHERE l.pid = %(pid)s AND NOT l.granted
"""
_WITHOUT = (
    "run pgrepl snapshot FILE.json without --take-over: all tables are copied, but publishers do not send the"
    " changes that only that slot retains"
)
_CANCEL_GRACE_S = 10.0
_LOG_EVERY_S = 1.0
_LOG_AT_PRIMARY = (
    "nothing was created. Run the command again, and meanwhile on the primary:"
    " select pg_log_standby_snapshot(); or name a connection to the primary, whose role may execute that"
    " function, and this command does that: primary_conn_id, or PGREPL_PRIMARY_DSN"
)
_END_AT_PRIMARY = (
    "nothing was created. Wait until the primary's old transactions have ended (pg_stat_activity and"
    " pg_prepared_xacts there) and run the command again, or raise slot_timeout_s"
)
_ENDED_BY_US = (None, "57014", "57P01")
log = logging.getLogger(__name__)
_ATTEMPTS = 5


class ExportedSnapshot:
    """The snapshot of a temporary slot. It sees every transaction that committed before `consistent_point`.

    It exists while this object's replication connection is idle. Import it, then close this object, which
    drops the slot.
    """

    def __init__(
        self,
        connection: Connection,
        name: str,
        *,
        consistent_point: LSN,
        snapshot: str,
        exported_at: datetime,
    ) -> None:
        self._connection = connection
        self.name = name
        self.consistent_point = consistent_point
        self.snapshot = snapshot
        self.exported_at = exported_at

    def close(self) -> None:
        """End the export of the snapshot, and drop the slot. May be called again."""
        if self._connection.closed:
            return
        with contextlib.suppress(psycopg2.Error):
            # Closing the connection drops the slot too, but some time later.
            self._connection.cursor().execute(f"DROP_REPLICATION_SLOT {quote_identifier(self.name)}")
        self._connection.close()

    def __enter__(self) -> ExportedSnapshot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def export_snapshot(dsn: str, name: str, *, timeout_s: float, primary_dsn: str = "") -> ExportedSnapshot:
    """Create a temporary slot, which exports a snapshot until it is closed.

    The server waits for all transactions that are writing when it starts. After `timeout_s` seconds the
    creation is canceled: SnapshotError names the blocking transactions, and no slot is left. Raises SlotError
    if the name is taken, ServerSettingError if no slot or walsender is free or wal_level is not logical.

    :param primary_dsn: the primary of a standby, which is asked to log its running transactions meanwhile
    """
    with closing(connect(dsn, "slot control")) as control:
        return SlotCreation(
            control, dsn, name, temporary=True, timeout_s=timeout_s, primary_dsn=primary_dsn
        ).export()


class SlotCreation:
    """One CREATE_REPLICATION_SLOT with a time limit.

    A temporary slot exports a snapshot, and is dropped with the connection that created it.
    """

    def __init__(
        self,
        control: Connection,
        dsn: str,
        name: str,
        *,
        temporary: bool,
        timeout_s: float,
        failover: bool = False,
        primary_dsn: str = "",
    ) -> None:
        self._control = control
        self._name = name
        self._temporary = temporary
        self._failover = failover
        self._timeout_s = timeout_s
        self._primary_dsn = primary_dsn
        self._not_logged = ""
        self._connection = connect_replication(dsn, "slot export")
        self._answer: tuple[Any, ...] | None = None
        self._error: Any = None

    @property
    def has_made(self) -> bool:
        """Return True if this object has created the slot."""
        return self._answer is not None

    def export(self) -> ExportedSnapshot:
        """Create a temporary slot and return its snapshot. Raises as `export_snapshot`."""
        _, point, snapshot, _ = self._run()
        try:
            with source_errors("asking for the time"):
                now = row(self._control, "SELECT pg_catalog.clock_timestamp()")[0]
        except BaseException:
            self._connection.close()
            raise
        return ExportedSnapshot(
            self._connection,
            self._name,
            consistent_point=LSN.parse(point),
            snapshot=snapshot,
            exported_at=now,
        )

    def create(self) -> LSN:
        """Create a permanent slot and return its consistent point. Raises as `export_snapshot`."""
        _, point, _, _ = self._run()
        self._connection.close()
        return LSN.parse(point)

    def _run(self) -> tuple[Any, ...]:
        worker = threading.Thread(target=self._create, name=f"create slot {self._name}", daemon=True)
        try:
            worker.start()
            self._wait(worker)
            if worker.is_alive():
                self._give_up(worker)
            if self._error is not None:
                self._refuse(self._error)
            if self._answer is None:
                raise SlotError(f"the server gave no answer to the creation of slot {self._name}")
            return self._answer
        except BaseException:
            if worker.is_alive():  # interrupted: closing would wait for the command
                with suppress(psycopg2.Error):
                    self._end(worker, "pg_cancel_backend")
                abandon(self._connection)
                worker.join(_CANCEL_GRACE_S)
            if not worker.is_alive():
                self._connection.close()
            raise

    def _wait(self, worker: threading.Thread) -> None:
        """Wait for the answer until the time limit. If possible, let a standby's primary log meanwhile.

        A standby reads the running transactions from its WAL, and an idle primary writes them there only when
        it is asked (PostgreSQL's manual, 9.28.6: pg_log_standby_snapshot).
        """
        deadline = time.monotonic() + self._timeout_s
        if self._primary_dsn and (standby := read_server(self._control)).in_recovery:
            try:
                self._log_running_transactions(standby.system_identifier, worker, deadline)
            except PgReplError as error:
                self._not_logged = error.message
                log.warning("%s: the slot waits until the primary does this by itself", error.message)
        worker.join(max(0.0, deadline - time.monotonic()))

    def _log_running_transactions(
        self, system_identifier: str, worker: threading.Thread, deadline: float
    ) -> None:
        """Let the primary log them each second until the answer, or the time limit. Raises PgReplError."""
        with closing(connect(self._primary_dsn, "slot control")) as primary:
            if read_server(primary).system_identifier != system_identifier:
                raise SourceConnectionError(
                    "primary_conn_id, or PGREPL_PRIMARY_DSN, does not lead to this standby's primary"
                )
            while worker.is_alive() and time.monotonic() < deadline:
                with source_errors("logging the running transactions of the primary"):
                    rows(primary, "SELECT pg_catalog.pg_log_standby_snapshot()")
                worker.join(_LOG_EVERY_S)

    def _create(self) -> None:
        has_options = self._connection.server_version >= 150000
        if self._temporary:
            kind, options = "TEMPORARY LOGICAL", "(SNAPSHOT 'export')" if has_options else "EXPORT_SNAPSHOT"
        else:
            more = ", FAILOVER true" if self._failover else ""
            kind, options = "LOGICAL", f"(SNAPSHOT 'nothing'{more})" if has_options else "NOEXPORT_SNAPSHOT"
        command = f"CREATE_REPLICATION_SLOT {quote_identifier(self._name)} {kind} {PLUGIN} {options}"
        try:
            self._answer = row(self._connection, command)
        except Exception as error:  # noqa: BLE001 - handed to the waiting thread, whatever it is
            self._error = error

    def _give_up(self, worker: threading.Thread) -> None:
        """Cancel the creation and raise SnapshotError, unless the creation completes first."""
        pid = self._connection.info.backend_pid
        with source_errors("looking for what blocks the slot"):
            blockers = [text for (text,) in rows(self._control, _BLOCKERS, {"pid": pid})]
            for end in ("pg_cancel_backend", "pg_terminate_backend"):
                self._end(worker, end)
                if not worker.is_alive():
                    break
        if self._answer is not None:
            return
        if worker.is_alive():  # canceling failed: closing would wait for the answer
            abandon(self._connection)
            worker.join(_CANCEL_GRACE_S)
        if getattr(self._error, "pgcode", None) not in _ENDED_BY_US:
            self._refuse(self._error)
        self._connection.close()
        self._wait_until_gone()
        late = (
            f"{'a snapshot' if self._temporary else f'slot {self._name}'} could not be made within"
            f" {self._timeout_s:g} s"
        )
        if read_server(self._control).in_recovery:
            self._refuse_standby(late)
        raise SnapshotError(
            f"{late}, because the server waits for transactions that were running:"
            f" {'; '.join(blockers) or 'none of them can be seen'}",
            "nothing was created. Wait until they have ended and run the command again, or raise"
            " slot_timeout_s. Ending one (select pg_terminate_backend(pid)) rolls its work back: ask its"
            " owner first. A prepared transaction ends with COMMIT PREPARED or ROLLBACK PREPARED",
        )

    def _refuse_standby(self, late: str) -> NoReturn:
        if self._primary_dsn and not self._not_logged:
            raise SnapshotError(
                f"{late}: the server is a standby, and waits for transactions that run on the primary",
                _END_AT_PRIMARY,
            )
        why = f": {self._not_logged}" if self._not_logged else ""
        raise SnapshotError(
            f"{late}: the server is a standby, and waits until the primary logs its running transactions,"
            f" which an idle primary does not{why}",
            _LOG_AT_PRIMARY,
        )

    def _end(self, worker: threading.Thread, how: str) -> None:
        rows(self._control, f"SELECT pg_catalog.{how}(%s)", (self._connection.info.backend_pid,))
        worker.join(_CANCEL_GRACE_S)

    def _wait_until_gone(self) -> None:
        """Wait until the slot no longer exists, and drop it if it is inactive or still exists after 10 s.

        The server drops a slot whose creation was canceled, at the latest at the end of the session.
        """
        deadline = time.monotonic() + _CANCEL_GRACE_S
        while (slot := read_slot(self._control, self._name)) is not None:
            if not slot.active or time.monotonic() > deadline:
                drop_slot(self._control, self._name)
                return
            time.sleep(0.05)

    def _refuse(self, error: Any) -> NoReturn:
        code = getattr(error, "pgcode", None)
        if code == "42710":
            self._refuse_taken()
        if code == "53400":
            raise ServerSettingError(
                f"slot {self._name} cannot be made: all of the server's max_replication_slots are in use",
                "raise max_replication_slots (needs a restart), or drop a slot that no program"
                " needs (that loses the changes that its reader lacks): select slot_name, active, wal_status"
                " from pg_replication_slots",
            )
        if code == "55000":
            raise ServerSettingError(
                f"slot {self._name} cannot be made: {describe(error)}",
                "correct the setting that the server names (wal_level = logical, max_replication_slots), on"
                " the primary for a standby; each needs a restart of that server",
            )
        if code == "42501":
            raise PrivilegeError(
                f"slot {self._name} cannot be made: {describe(error)}",
                "ALTER ROLE … REPLICATION (Amazon RDS and Aurora: GRANT rds_replication TO …)",
            )
        if isinstance(error, psycopg2.Error):
            raise translate(error, f"making slot {self._name}") from None
        raise error

    def _refuse_taken(self) -> NoReturn:
        slot = read_slot(self._control, self._name)
        facts = (
            f" with plugin {slot.plugin} in database {slot.database}"
            + (f", read by pid {slot.active_pid}" if slot.active else ", not active")
            if slot
            else ""
        )
        raise SlotError(
            f"a slot named {self._name} exists already{facts}",
            "run the command again after the session that created the slot has ended, which drops it"
            if self._temporary
            else "give the pipeline another slot name, or drop that slot if no program needs it: select"
            f" pg_drop_replication_slot('{self._name}'); that loses the changes that its reader lacks",
        )


def create_slot(
    dsn: str,
    name: str,
    *,
    through: str | None = None,
    timeout_s: float,
    made: Callable[[], None] = lambda: None,
    failover: bool = False,
    primary_dsn: str = "",
) -> ExportedSnapshot:
    """Create a permanent slot, and export a snapshot of its position. `failover`: make it a failover slot.

    A temporary slot named `through`, or with a generated name, exports the snapshot. It is created after the
    first slot, and so waits for every transaction that ran during the first creation. Then the first slot is
    advanced to its consistent point. `timeout_s` limits each creation. `made` is called once the first slot
    exists. `primary_dsn` is as in `export_snapshot`. Raises as `export_snapshot`; no slot is left then.
    """
    with closing(connect(dsn, "slot control")) as control:
        creation = SlotCreation(
            control,
            dsn,
            name,
            temporary=False,
            timeout_s=timeout_s,
            failover=failover,
            primary_dsn=primary_dsn,
        )
        try:
            point = creation.create()
            made()
            for _ in range(_ATTEMPTS):
                exported = export_snapshot(
                    dsn, through or temporary_name(control), timeout_s=timeout_s, primary_dsn=primary_dsn
                )
                if _has_moved(control, name, point, exported):
                    return exported
            raise SnapshotError(
                f"slot {name} still reads from before {point}, where transactions ran while it was made",
                "run the command again; wait until long transactions of the source have ended",
            )
        except BaseException:
            if creation.has_made:
                drop_unused(dsn, control, name)
            raise


def _has_moved(control: Connection, name: str, point: LSN, exported: ExportedSnapshot) -> bool:
    """Advance the slot. Return True if it decodes from a catalog snapshot that was stored after `point`.

    Otherwise `exported` is closed.
    """
    try:
        # The first advance may reach a catalog snapshot that was stored for another slot before `point`. A
        # second advance to the same LSN then reaches the next one.
        for _ in range(2):
            advance_slot(control, name, exported.consistent_point)
            slot = read_slot(control, name)
            if slot is not None and _is_settled(slot, point, exported.consistent_point):
                return True
        log.info("slot %s still reads from before %s", name, point)
    except BaseException:
        exported.close()
        raise
    exported.close()
    return False


def _is_settled(slot: Slot, point: LSN, wanted: LSN) -> bool:
    reads_from = slot.restart_lsn
    return slot.confirmed_flush_lsn == wanted and reads_from is not None and reads_from >= point


def drop_unused(dsn: str, control: Connection, name: str) -> None:
    """Drop a slot that was created but not used, over a new connection if dropping it over the first fails.

    Does not raise PgReplError: the caller's error is the one to report. A slot that stays is logged.
    """
    try:
        drop_slot(control, name)
    except PgReplError:
        try:
            with closing(connect(dsn, "slot control")) as fresh:
                drop_slot(fresh, name)
        except PgReplError as error:
            log.warning(
                "slot %s stays, and holds the source's WAL until it is dropped: %s", name, error.message
            )


def take_over_slot(dsn: str, name: str, other: str, publication: str) -> LSN:
    """Create the slot `name` at the position of `other`, and return that position. `other` is not changed.

    Raises BusyError while a session reads `other`, SlotError if it does not exist or cannot be continued,
    PublicationError if the publication did not exist yet at its position. No new slot is left then.
    """
    with closing(connect(dsn, "slot control")) as control:
        check_slot_to_take_over(control, other)
        with source_errors(f"copying slot {other}"):
            rows(control, "SELECT pg_catalog.pg_copy_logical_replication_slot(%s, %s, false)", (other, name))
        try:
            _check_decodes(control, name, publication)
            copied = read_slot(control, name)
            if copied is None or copied.confirmed_flush_lsn is None:
                raise BusyError(
                    f"another session dropped slot {name} before the take-over was complete",
                    "run the command again",
                )
        except BaseException:
            drop_unused(dsn, control, name)
            raise
    log.info("slot %s begins where slot %s stands, at %s", name, other, copied.confirmed_flush_lsn)
    return copied.confirmed_flush_lsn


def check_slot_to_take_over(control: Connection, other: str) -> None:
    """Raise BusyError while a session reads `other`, SlotError if it is missing or cannot be continued."""
    slot = read_slot(control, other)
    if slot is None:
        raise SlotError(
            f"there is no slot {other} whose position could be taken over",
            f"name the slot of the program that is replaced, or {_WITHOUT}",
        )
    invalid = f"the server has invalidated it ({slot.invalidation})" if slot.invalidation else None
    if reason := reason_to_keep(control, slot) or invalid:
        raise SlotError(
            f"the position of slot {other} cannot be taken over: {reason}",
            _WITHOUT,
        )
    if slot.active:
        raise BusyError(
            f"slot {other} is still read, by pid {slot.active_pid}",
            "stop the program that is replaced, then run the same again",
        )


def _check_decodes(control: Connection, name: str, publication: str) -> None:
    """Raise PublicationError if the publication did not exist yet at the slot's first change.

    Without it, servers before 18 raise an error; servers from 18 on leave changes out, with a warning.
    """
    options = ("proto_version", "1", "publication_names", quote_identifier(publication))
    peek = "SELECT count(*) FROM pg_catalog.pg_logical_slot_peek_binary_changes(%s, NULL, 1, %s, %s, %s, %s)"
    with source_errors(f"reading slot {name}"), patience(control, READING_WAL_S):
        control.notices = []
        try:
            rows(control, peek, (name, *options))
            # Search for the name: the notice itself may be translated.
            is_missing = any(publication in notice for notice in control.notices)
        except psycopg2.errors.UndefinedObject:
            is_missing = True
    if is_missing:
        raise PublicationError(
            f"the publication {publication} was not there yet where the slot stands",
            "name the publication that the replaced program has used",
        )
