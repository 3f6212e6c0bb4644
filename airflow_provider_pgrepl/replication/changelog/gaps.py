"""Gaps: transactions that were skipped because the server cannot send them, as rows of the changelog.

A gap is a row with op `G` for each table that the transaction may have changed, and one that belongs to no
table. So it is found by whoever reads a table's changes, in its place among them, and lasts as long as they.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import GapError
from airflow_provider_pgrepl.replication.changelog.layout import ROW_SCHEMA
from airflow_provider_pgrepl.replication.changelog.reader import live_files, read_rows
from airflow_provider_pgrepl.replication.pgoutput.columns import TransactionBegin
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.storage import open_storage

GAP = "G"
NO_RELATION = 0
"""What the changelog says of a row that belongs to no table."""

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
        """All that committed before it is in the changelog, or in this gap.

        No other record can begin within that of the commit, wherever it ends, so no other transaction's does.
        """
        return LSN(self.lsn + 1)

    def rows(self, epoch: Epoch) -> pa.Table:
        """Its rows in ROW_SCHEMA."""
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
    """The gap at a commit LSN. Raises ChangelogError when a file is gone."""
    rows = _read(changelog, epoch, NO_RELATION, LSN(lsn - 1), ROW_SCHEMA.names)
    for row in rows.filter(pc.equal(rows["commit_lsn"], int(lsn))).to_pylist():
        about = json.loads(row["new"][0])
        begun = TransactionBegin(lsn, row["xid"], int(row["commit_ts"].timestamp() * 1_000_000))
        return Gap(begun, frozenset(about["relations"]), about["why"])
    return None


def gap_after(changelog: DeltaTable, epoch: Epoch, above: LSN) -> LSN | None:
    """The commit LSN of the first gap above an LSN."""
    found = pc.min(_read(changelog, epoch, NO_RELATION, above, _PLACES)["commit_lsn"]).as_py()
    return None if found is None else LSN(found)


def last_gap(changelog: DeltaTable, epoch: Epoch, above: LSN) -> LSN | None:
    """The commit LSN of the last gap above an LSN."""
    found = pc.max(_read(changelog, epoch, NO_RELATION, above, _PLACES)["commit_lsn"]).as_py()
    return None if found is None else LSN(found)


def check_no_gap(changelog: DeltaTable, epoch: Epoch, table: TableName, oid: int, above: LSN) -> None:
    """Raises GapError when the table cannot go on from above an LSN because of a gap."""
    found = first_gap(_read(changelog, epoch, oid, above, _PLACES), table)
    if found is not None:
        raise GapError(f"{table}: {found[1].message}", found[1].hint)


def first_gap(changes: pa.Table, table: TableName) -> tuple[LSN, GapError] | None:
    """The first gap among changelog rows of a table, and the error with which the table stops before it."""
    found = pc.min(changes.filter(pc.equal(changes["op"], GAP))["commit_lsn"]).as_py()
    if found is None:
        return None
    return LSN(found), gap_error(LSN(found), table)


def gap_error(lsn: LSN, table: TableName) -> GapError:
    """With what a table stops that the skipped transaction at an LSN may have changed."""
    return GapError(
        f"the transaction at {lsn}, which the server could not send, was skipped; it may have changed this"
        " table",
        errors.resnapshot(table),
    )


def _read(changelog: DeltaTable, epoch: Epoch, oid: int, above: LSN, columns: list[str]) -> pa.Table:
    """The gap rows of one relation above an LSN, in order."""
    filesystem, root = open_storage(changelog.table_uri)
    paths = [file.path for file in live_files(changelog, epoch, above) if file.may_hold(oid)]
    rows = read_rows(filesystem, root, paths, oid, above, columns)
    return rows.filter(pc.equal(rows["op"], GAP))
