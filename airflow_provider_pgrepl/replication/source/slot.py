"""The replication slot: made with an exported snapshot, looked at, dropped."""

from __future__ import annotations

from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.source.exported_snapshot import ExportedSnapshot
from airflow_provider_pgrepl.replication.source.slot_creation import PLUGIN, SlotCreation
from airflow_provider_pgrepl.replication.source.slot_record import Slot, advance_slot, drop_slot, read_slot

__all__ = ["PLUGIN", "ExportedSnapshot", "Slot", "advance_slot", "drop_slot", "export_slot", "read_slot"]


def export_slot(dsn: str, name: str, *, temporary: bool, timeout_s: float) -> ExportedSnapshot:
    """Create a slot with an exported snapshot.

    The server waits for all transactions that write when it starts. After `timeout_s` this is given up:
    SnapshotError names who is in the way, and no slot is left behind. Raises SlotError when the name is
    taken, ServerSettingError when there is no free slot or sender or wal_level is not logical.
    """
    control = connect(dsn, "slot control")
    try:
        return SlotCreation(control, dsn, name, temporary=temporary, timeout_s=timeout_s).run()
    finally:
        control.close()
