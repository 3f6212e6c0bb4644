"""Letting go of old changes: whole hours of the changelog, never one that a table still has a right to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, Transaction
from deltalake.exceptions import DeltaError, TableNotFoundError

from airflow_provider_pgrepl.errors import ChangelogError
from airflow_provider_pgrepl.replication.changelog.layout import PARTITION, changelog_uri, floor_app, hour_of
from airflow_provider_pgrepl.replication.changelog.upkeep import removal, replace_files
from airflow_provider_pgrepl.replication.delta.table import open_delta
from airflow_provider_pgrepl.replication.storage import raise_if_away

_RETENTION_METADATA = "pgrepl_retention"
_HOUR = f"partition.{PARTITION}"


@dataclass(frozen=True)
class Dropped:
    """What went: the hours, oldest first, and how many files and bytes they held."""

    hours: tuple[str, ...] = ()
    files: int = 0
    bytes: int = 0


def drop_expired(
    lake_root: str, retention_h: float, needed_above: Mapping[int, int], now: datetime
) -> Dropped:
    """Take the oldest hours that ended more than `retention_h` hours ago out of the changelog, in one commit.

    `needed_above`: for each epoch the lowest position that a table, in whatever state, still has a right to;
    a file with a later change stays, and with it its hour and all hours after. An epoch before all of these
    is over, and so is the right to it. Without any, nothing goes.

    The commit carries the new floor of each epoch, under app ids that are not the receiver's, so that it
    does not fence that. The files stay until a vacuum.
    Raises ChangelogError.
    """
    try:
        table = open_delta(changelog_uri(lake_root))
    except TableNotFoundError:
        return Dropped()
    except (DeltaError, OSError) as error:
        raise_if_away("the changelog cannot be opened", error)
        raise ChangelogError(f"the changelog cannot be opened: {type(error).__name__}") from error
    hours = _files_by_hour(table)
    expired = []
    for hour in sorted(hours):
        if not _is_past(hour, now - timedelta(hours=retention_h)):
            break
        if any(_is_needed(file, needed_above) for file in hours[hour]):
            break
        expired.append(hour)
    if not expired:
        return Dropped()
    files = [file for hour in expired for file in hours[hour]]
    _remove(table, files)
    return Dropped(tuple(expired), len(files), sum(file["size_bytes"] for file in files))


def _files_by_hour(table: DeltaTable) -> dict[str, list[dict[str, Any]]]:
    hours: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    actions = pa.table(table.get_add_actions(flatten=True))
    for file in actions.to_pylist():
        hours[file[_HOUR]].append(file)
    return hours


def _is_past(hour: str, before: datetime) -> bool:
    return hour < hour_of(before)


def _is_needed(file: Mapping[str, Any], needed_above: Mapping[int, int]) -> bool:
    epoch, last_lsn = file.get("max.epoch"), file.get("max.commit_lsn")
    if epoch is None or last_lsn is None or not needed_above:
        return True
    if epoch < min(needed_above):
        return False
    return epoch not in needed_above or last_lsn > needed_above[epoch]


def _floors(table: DeltaTable, files: list[dict[str, Any]]) -> list[Transaction]:
    """Per epoch, the highest commit LSN that is gone: nobody below may go on, or be read as of later."""
    floors: defaultdict[int, int] = defaultdict(int)
    for file in files:
        floors[file["max.epoch"]] = max(floors[file["max.epoch"]], int(file["max.commit_lsn"]))
    return [
        Transaction(floor_app(epoch), floor)
        for epoch, floor in floors.items()
        if floor > (table.transaction_version(floor_app(epoch)) or 0)
    ]


def _remove(table: DeltaTable, files: list[dict[str, Any]]) -> None:
    removes = [removal(file["path"], file["size_bytes"], file[_HOUR]) for file in files]
    replace_files(table, removes, told={_RETENTION_METADATA: str(len(removes))}, apps=_floors(table, files))
