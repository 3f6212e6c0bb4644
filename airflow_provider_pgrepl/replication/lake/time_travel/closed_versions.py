"""Versions of rows that have ended: those that a plan's changes end, and older ones in its columns."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
from deltalake import DeltaTable

from airflow_provider_pgrepl.replication.lake.history.rows import ended_rows
from airflow_provider_pgrepl.replication.lake.history.table import aligned
from airflow_provider_pgrepl.replication.lake.schema_evolution.translation import evolved
from airflow_provider_pgrepl.replication.lake.time_travel.overlay import Overlay
from airflow_provider_pgrepl.replication.lake.time_travel.plan import TablePlan
from airflow_provider_pgrepl.replication.postgres.lsn import Epoch
from airflow_provider_pgrepl.replication.values import typed_columns


def ended_since(plan: TablePlan, schema: pa.Schema, epoch: Epoch) -> pa.Table:
    """The versions of rows that a plan's changes end, in the history's columns.

    Where the table evolved in between, or between two of its changes, all of its rows are read.
    Raises LakeError, LakeTableError, DriftError, ValueRangeError.
    """
    pieces: list[pa.Table] = []
    held: DeltaTable | pa.Table = plan.version.open()
    for number, overlay in enumerate(plan.overlays, start=1):
        if overlay.evolves:
            pieces = [evolved_closed(piece, [overlay]) for piece in pieces]
            held = overlay.evolved(plan.version.read() if number == 1 else held)
        if overlay.count:
            rows = ended_rows(
                held, overlay.changes(), overlay.relation, overlay.choices, epoch, overlay.above
            )
            pieces.extend(rows)
        if number < len(plan.overlays):
            held = overlay.lay_over(held if isinstance(held, pa.Table) else plan.version.read())
    return pa.concat_tables([schema.empty_table(), *(aligned(piece, schema) for piece in pieces)])


def _evolved_ended(rows: pa.Table, overlay: Overlay) -> pa.Table:
    """Versions that ended before a relation came into force, in its types: null in the columns added."""
    before = overlay.before
    held = {column.attnum for column in (*before.columns, *before.unpublished, *before.dropped)}
    after = evolved(rows, before, overlay.relation, overlay.choices)
    for number, typed in enumerate(typed_columns(overlay.relation, overlay.choices)):
        if typed.column.attnum not in held:
            known = typed.name in rows.column_names
            values = rows[typed.name] if known else pa.nulls(len(rows), typed.lake_type)
            after = after.set_column(number, typed.name, values)
    return after


def evolved_closed(rows: pa.Table, overlays: Iterable[Overlay]) -> pa.Table:
    """The same for all relations that came into force, one after the other."""
    for overlay in overlays:
        if overlay.evolves:
            rows = _evolved_ended(rows, overlay)
    return rows
