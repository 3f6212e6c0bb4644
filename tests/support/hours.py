"""A changelog whose files are received in hours of a test's choice."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa

from airflow_provider_pgrepl.replication.changelog.layout import ROW_SCHEMA, changelog_uri, hour_of
from airflow_provider_pgrepl.replication.changelog.reader import live_files, open_changelog, read_rows
from airflow_provider_pgrepl.replication.changelog.writer import ChangelogWriter, Part, create_changelog
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.storage import open_storage
from tests.support.changelogs import epoch_record

BEGAN = datetime(2026, 5, 4, tzinfo=UTC)

Place = tuple[int, int, int]
"""Relation, commit LSN and ordinal of a row."""


def after_hour(hour: int) -> datetime:
    """Return the time at which an hour is just closed: 10 minutes after its end."""
    return BEGAN + timedelta(hours=hour + 1, minutes=10)


class HourWriter(ChangelogWriter):
    """The receiver's writer, whose clock is at `hour` hours after BEGAN."""

    hour = 0

    def write_part(self, rows: pa.Table) -> Part:
        return self._parts.write(rows, hour_of(BEGAN + timedelta(hours=self.hour)))

    def land(self, *places: Place, hour: int | None = None, epoch: int = 1) -> None:
        """Commit one file."""
        self.hour = self.hour if hour is None else hour
        lsns = [LSN(lsn) for _, lsn, _ in places]
        self.append(
            [self.write_part(rows_at(*places, epoch=epoch))],
            durable_lsn=max(self.durable_lsn, LSN(max(lsns) + 5)),
            first_lsn=min(lsns),
            last_lsn=max(lsns),
            last_commit_us=0,
        )


def new_lake(folder: Path) -> str:
    """Make a lake that holds only an empty changelog, and return its path."""
    create_changelog(changelog_uri(str(folder)), epoch_record())
    return str(folder)


def rows_at(*places: Place, epoch: int = 1, text: str = "") -> pa.Table:
    """Return one row for each place, in stream order."""
    rows = [
        {
            "epoch": epoch,
            "commit_lsn": lsn,
            "ordinal": ordinal,
            "xid": lsn,
            "commit_ts": lsn,
            "relation_id": relation,
            "relation_version": 7,
            "op": "I",
            "new": [f"{lsn}:{ordinal}", None, text],
            "unchanged": [1] if ordinal % 2 else None,
        }
        for relation, lsn, ordinal in places
    ]
    return pa.Table.from_pylist(rows, schema=ROW_SCHEMA)


def read(lake: str, relation: int, above: int = 0, epoch: int = 1) -> pa.Table:
    """A relation's rows above an LSN, as the applier reads them from the live files."""
    uri = changelog_uri(lake)
    filesystem, root = open_storage(uri)
    files = live_files(open_changelog(uri), Epoch(epoch), LSN(above))
    paths = [file.path for file in files if file.may_hold(relation)]
    return read_rows(filesystem, root, paths, relation, LSN(above))


def held(lake: str) -> dict[str, list[tuple[int, int]]]:
    """The LSN ranges of the live files of each hour, as `04T00`."""
    table = pa.table(open_changelog(changelog_uri(lake)).get_add_actions(flatten=True)).to_pylist()
    found: dict[str, list[tuple[int, int]]] = {}
    for file in sorted(table, key=lambda file: (file["partition.received_hour"], file["min.commit_lsn"])):
        hour = file["partition.received_hour"][-5:]
        found.setdefault(hour, []).append((file["min.commit_lsn"], file["max.commit_lsn"]))
    return found
