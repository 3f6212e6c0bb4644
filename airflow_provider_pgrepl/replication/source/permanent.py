"""The slot of a pipeline, which stays, moved to a place from which the server decodes rightly.

The server finds its view of the catalog in phases, each of which waits for the transactions of the one
before. What commits in the first is not tracked (DecodeXactOp in decode.c returns early), so a transaction
that begins in the second may be decoded by a catalog from before: a column that was added is left out, one
that was rewritten ends the stream; and so may be what comes later, until the slot begins to decode from a
view that the server has stored. https://postgrespro.ru/list/thread-id/2779642
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing

from airflow_provider_pgrepl.errors import PgReplError, SnapshotError
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.source.connection import Connection, connect
from airflow_provider_pgrepl.replication.source.export import ExportedSnapshot
from airflow_provider_pgrepl.replication.source.slot import Slot, advance_slot, drop_slot, read_slot
from airflow_provider_pgrepl.replication.source.slot_creation import SlotCreation, export_snapshot
from airflow_provider_pgrepl.replication.source.temporary import temporary_name

log = logging.getLogger(__name__)

_ATTEMPTS = 5


def create_slot(
    dsn: str,
    name: str,
    *,
    through: str | None = None,
    timeout_s: float,
    made: Callable[[], None] = lambda: None,
) -> ExportedSnapshot:
    """Create a slot that stays, and export the snapshot of the place where it stands.

    `through`: the name of the temporary slot that exports it, or one of our choice. That slot is made after
    the first, and so waits for every transaction that ran while the first was made; then the first is moved
    to its consistent point. `timeout_s` limits each of the two. `made` is called once the slot is there.
    Raises as `export_snapshot`; no slot is left behind then.
    """
    with closing(connect(dsn, "slot control")) as control:
        creation = SlotCreation(control, dsn, name, temporary=False, timeout_s=timeout_s)
        try:
            point = creation.create()
            made()
            for _ in range(_ATTEMPTS):
                exported = export_snapshot(dsn, through or temporary_name(control), timeout_s=timeout_s)
                if _has_moved(control, name, point, exported):
                    return exported
            raise SnapshotError(
                f"slot {name} still reads from before {point}, where transactions ran while it was made",
                "transactions that last long may be in the way: run the same again",
            )
        except BaseException:
            if creation.has_made:
                drop_unused(dsn, control, name)
            raise


def _has_moved(control: Connection, name: str, point: LSN, exported: ExportedSnapshot) -> bool:
    """Move the slot; whether it will read from a view of the catalog that was stored after `point`."""
    try:
        # Moved for the first time, it may come to a view that another slot had stored before that point; from
        # there, moved to the same place, it comes to the next.
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
    """Drop a slot that nothing was begun with, over a new connection where the first is lost.

    Raises nothing: the error that brought us here is the one to be said. A slot that stays is logged.
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
