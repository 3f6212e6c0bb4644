"""Gaps: transactions that were skipped because the server cannot send them, as rows of the changelog.

A gap has a row with op `G` for each table that the transaction may have changed, and one row that belongs to
no table. A reader of a table's changes finds the gap row among them, ordered by commit LSN. The gap row is
kept as long as the changes around it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import ChangelogError, GapError
from airflow_provider_pgrepl.replication.pgoutput.columns import TransactionBegin
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.storage import open_storage

from .layout import ROW_SCHEMA, changelog_uri
from .reader import live_files, read_rows
from .writer import ChangelogWriter

GAP = "G"
NO_RELATION = 0
"""The `relation_id` of a row that belongs to no table."""

_PLACES = ["commit_lsn", "ordinal", "relation_id", "op"]


@dataclass(frozen=True)
class Gap:
    """A skipped transaction, and the oids of the tables that it may have changed."""

    begun: TransactionBegin
    relations: frozenset[int]
    why: str

    @property
    def lsn(self) -> LSN:
        return LSN(self.begun.commit_lsn)

    @property
    def end_lsn(self) -> LSN:
        """The durable LSN of a changelog that holds every transaction before the gap, and the gap.

        The gap's commit record begins at `lsn`. No other WAL record can begin inside that record, wherever
        it ends, so no other transaction has a commit LSN there.
        """
        return LSN(self.lsn + 1)

    def rows(self, epoch: Epoch) -> pa.Table:
        """Return the gap's rows in ROW_SCHEMA: one for each relation, and one for NO_RELATION."""
        about = json.dumps({"why": self.why, "relations": sorted(self.relations)})
        place = {
            "epoch": epoch,
            "commit_lsn": self.lsn,
            "ordinal": 0,
            "xid": self.begun.xid,
            "commit_ts": self.begun.commit_us,
            "relation_version": 0,
            "op": GAP,
            "new": [about],
        }
        found = [{**place, "relation_id": oid} for oid in sorted({NO_RELATION, *self.relations})]
        return pa.Table.from_pylist(found, schema=ROW_SCHEMA)


def find_gap(changelog: DeltaTable, epoch: Epoch, lsn: LSN) -> Gap | None:
    """Return the gap at a commit LSN, or None. Raises ChangelogFileGoneError if a file no longer exists."""
    rows = _read(changelog, epoch, NO_RELATION, LSN(lsn - 1), ROW_SCHEMA.names)
    for row in rows.filter(pc.equal(rows["commit_lsn"], int(lsn))).to_pylist():
        about = json.loads(row["new"][0])
        begun = TransactionBegin(lsn, row["xid"], int(row["commit_ts"].timestamp() * 1_000_000))
        return Gap(begun, frozenset(about["relations"]), about["why"])
    return None


def gap_after(changelog: DeltaTable, epoch: Epoch, above: LSN) -> LSN | None:
    """Return the commit LSN of the first gap above an LSN, or None if there is no gap."""
    found = pc.min(_read(changelog, epoch, NO_RELATION, above, _PLACES)["commit_lsn"]).as_py()
    return None if found is None else LSN(found)


def last_gap(changelog: DeltaTable, epoch: Epoch, above: LSN) -> LSN | None:
    """Return the commit LSN of the last gap above an LSN, or None if there is no gap."""
    found = pc.max(_read(changelog, epoch, NO_RELATION, above, _PLACES)["commit_lsn"]).as_py()
    return None if found is None else LSN(found)


def check_no_gap(changelog: DeltaTable, epoch: Epoch, table: TableName, oid: int, above: LSN) -> None:
    """Raise GapError if a gap above an LSN may have changed the table, so that it cannot continue there."""
    found = first_gap(_read(changelog, epoch, oid, above, _PLACES), table)
    if found is not None:
        raise GapError(f"{table}: {found[1].message}", found[1].hint)


def first_gap(changes: pa.Table, table: TableName) -> tuple[LSN, GapError] | None:
    """Return the LSN of the first gap among a table's changelog rows, and the error that stops the table."""
    found = pc.min(changes.filter(pc.equal(changes["op"], GAP))["commit_lsn"]).as_py()
    if found is None:
        return None
    return LSN(found), gap_error(LSN(found), table)


def gap_error(lsn: LSN, table: TableName) -> GapError:
    """Return the error of a table that the skipped transaction at an LSN may have changed."""
    return GapError(
        f"the transaction at {lsn}, which the server could not send, was skipped; it may have changed this"
        " table",
        errors.resnapshot(table),
    )


def _read(changelog: DeltaTable, epoch: Epoch, oid: int, above: LSN, columns: list[str]) -> pa.Table:
    """Return the gap rows of one relation above an LSN, ordered by (commit_lsn, ordinal)."""
    filesystem, root = open_storage(changelog.table_uri)
    paths = [file.path for file in live_files(changelog, epoch, above) if file.may_hold(oid)]
    rows = read_rows(filesystem, root, paths, oid, above, columns)
    return rows.filter(pc.equal(rows["op"], GAP))


def record_gap(lake_root: str, gap: Gap, after: int | None) -> None:
    """Record the gap in the changelog, in one commit, after everything that was received before it.

    `after`: the `sequence` of the writer that made those changes durable. Raises FencedError if another
    receiver has written since, ChangelogError if the changelog is durable past the gap, LakeUnavailableError.
    """
    writer = ChangelogWriter(changelog_uri(lake_root), after)
    if writer.durable_lsn > gap.lsn:
        raise ChangelogError(f"the changelog is durable up to {writer.durable_lsn}, beyond {gap.lsn}")
    part = writer.write_part(gap.rows(writer.epoch))
    writer.append(
        [part],
        durable_lsn=gap.end_lsn,
        first_lsn=gap.lsn,
        last_lsn=gap.lsn,
        last_commit_us=gap.begun.commit_us,
        kind="gap",
    )
    writer.rest()
