"""Moment: a place in the source's history, named by an LSN or by a time of the source's clock."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from deltalake import DeltaTable

from airflow_provider_pgrepl.errors import ConfigError, LakeError
from airflow_provider_pgrepl.replication.changelog.commit_times import first_commit_after
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import (
    live_files,
    open_changelog,
    read_durable_lsn,
    read_floor_lsn,
)
from airflow_provider_pgrepl.replication.lake.consistent_points import Points
from airflow_provider_pgrepl.replication.lake.delta.table import app_id
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch


@dataclass(frozen=True)
class Moment:
    """All that committed at or before `lsn` of `epoch`, and nothing later.

    `changelog` was open when the moment was found and holds every change up to it from `floor_lsn` on;
    `timestamp` is the time that was asked for, None when it was an LSN.
    """

    record: EpochRecord
    epoch: Epoch
    lsn: LSN
    floor_lsn: LSN
    timestamp: datetime | None
    changelog: DeltaTable

    @property
    def app(self) -> str:
        """The Delta app id under which the epoch's lake tables are written."""
        return app_id(self.record.pipeline, self.epoch)


def parse_lsn(given: int | str) -> LSN:
    """An LSN as people write it: a number, or text like `16/B374D848`. Raises ConfigError."""
    if isinstance(given, str):
        try:
            return LSN.parse(given)
        except ValueError as error:
            raise ConfigError(f"lsn: {error}") from None
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given < 2**63:
        raise ConfigError(f"lsn: {given!r} is not an LSN", "give a whole number, or text like '16/B374D848'")
    return LSN(given)


def find_moment(
    lake_root: str,
    points: Points,
    lsn: int | str | None = None,
    timestamp: datetime | None = None,
    epoch: int | None = None,
) -> Moment:
    """The moment of an LSN or a time, in `epoch` or else the newest one; without both the newest moment.

    By time it is the longest prefix, in LSN order, of transactions that all committed at or before it.

    An LSN at which a transaction ends is taken as such: the server's own functions give it after a commit.
    Raises ConfigError for arguments that cannot be meant, ChangelogError when there is no changelog,
    LakeError for what has not been received yet, or is not kept any more.
    """
    if lsn is not None and timestamp is not None:
        raise ConfigError("lsn and timestamp are both given", "give the one that is meant")
    if timestamp is not None and timestamp.tzinfo is None:
        raise ConfigError(
            f"timestamp: {timestamp.isoformat()} says no time zone",
            "pass one that does, as datetime(2026, 1, 31, 12, tzinfo=timezone.utc)",
        )
    changelog = open_changelog(changelog_uri(lake_root))
    record = EpochRecord.from_json(changelog.metadata().description)
    wanted = record.epoch if epoch is None else Epoch(epoch)
    newest = _newest_lsn(changelog, record, wanted, points)
    floor = read_floor_lsn(changelog, wanted)
    if timestamp is not None:
        place = _place_of(timestamp, changelog, wanted, newest, floor)
    elif lsn is not None:
        place = _checked(parse_lsn(lsn), record, wanted, newest)
    else:
        place = newest
    return Moment(record, wanted, place, floor, timestamp, changelog)


def _newest_lsn(changelog: DeltaTable, record: EpochRecord, epoch: Epoch, points: Points) -> LSN:
    """Up to where all of the epoch is known."""
    if epoch == record.epoch:
        # What is durable is where a commit ended; another may begin there.
        return LSN(max(0, read_durable_lsn(changelog) - 1))
    if not 0 < epoch < record.epoch:
        raise LakeError(f"there is no epoch {epoch}; the newest is {record.epoch}")
    known = [file.max_lsn for file in live_files(changelog, epoch, LSN(0))]
    known += [LSN(point.lsn) for point in points.all() if point.epoch == epoch]
    if not known:
        raise LakeError(
            f"nothing of epoch {epoch} is kept any more",
            "changelog_retention_h and points_keep_h of the pipeline say how long it would be",
        )
    return max(known)


def _checked(wanted: LSN, record: EpochRecord, epoch: Epoch, newest: LSN) -> LSN:
    if epoch != record.epoch and wanted > newest:
        raise LakeError(
            f"epoch {epoch} is over and known up to {newest}; {wanted} is beyond that",
            f"LSNs of different epochs are never compared; the newest epoch is {record.epoch}",
        )
    durable = LSN(newest + 1)
    if wanted > durable:
        raise LakeError(
            f"{wanted} has not been received yet; the changelog is durable up to {durable}",
            f"wait for the replication app, or read the newest with lsn='{durable}'",
        )
    return min(wanted, newest)


def _place_of(moment: datetime, changelog: DeltaTable, epoch: Epoch, newest: LSN, floor: LSN) -> LSN:
    after = first_commit_after(changelog, epoch, moment)
    if after is None:
        raise LakeError(
            f"what had committed at {moment.isoformat()} is not known yet: no later transaction was received,"
            f" so one of before may still come; the changelog is durable up to {LSN(newest + 1)}",
            f"to read the newest, pass lsn='{LSN(newest + 1)}'",
        )
    first = live_files(changelog, epoch, LSN(0))[0].min_lsn if floor else LSN(0)
    if after <= first:
        raise LakeError(
            f"{moment.isoformat()} is before what the changelog still holds, which begins at {first}",
            "pass a later time; changelog_retention_h of the pipeline says how long changes are kept",
        )
    return LSN(after - 1)
