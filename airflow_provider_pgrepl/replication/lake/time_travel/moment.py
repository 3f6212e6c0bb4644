"""Points in time to read tables at, named by an LSN or by a time of the source's clock."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from airflow_provider_pgrepl.errors import ConfigError, LakeError, LakeUnavailableError
from airflow_provider_pgrepl.replication.changelog import reader
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import (
    ChangelogFile,
    first_commit_after,
    live_files,
    open_changelog,
    read_durable_lsn,
    read_floor_lsn,
)
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.delta.table import open_delta, query_delta
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoints
from airflow_provider_pgrepl.replication.lake.delta.live_files import app_version
from airflow_provider_pgrepl.replication.lake.delta.table import app_id
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.lake import hadoop_uri, is_object_store
from airflow_provider_pgrepl.replication.spark.connectors import check_connector
from airflow_provider_pgrepl.replication.storage import open_storage
from airflow_provider_pgrepl.trace import log_unexpected, traced

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)
HEADS = ["commit_lsn", "ordinal", "xid", "relation_id", "relation_version", "op"]
"""The columns that give a row's position and the relation version that it uses. They contain no values of
rows."""


@dataclass(frozen=True)
class PointInTime:
    """A point in time: all transactions of `epoch` that committed at or before `lsn`, and no later ones.

    `changelog` was opened when the point was determined, and has every change from `floor_lsn` up to `lsn`.
    `timestamp`: the requested time, None if an LSN was requested.
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
    """Return an LSN that is given as a number or as text like `16/B374D848`. Raises ConfigError."""
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
    points: ConsistentPoints,
    lsn: int | str | None = None,
    timestamp: datetime | None = None,
    epoch: int | None = None,
) -> PointInTime:
    """Return the point in time of an LSN or a timestamp, in `epoch` or else the newest one. Without both,
    return the newest point in time.

    For a timestamp, this is the longest prefix, in LSN order, of transactions that all committed at or before
    it. The LSN at which the last durable transaction ends is also accepted: the server's functions return it
    after a commit.

    Raises ConfigError for contradictory or invalid arguments, ChangelogError if there is no changelog, and
    LakeError for a point in time that has not been received yet or is no longer kept.
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
    return PointInTime(record, wanted, place, floor, timestamp, changelog)


def _newest_lsn(changelog: DeltaTable, record: EpochRecord, epoch: Epoch, points: ConsistentPoints) -> LSN:
    """Return the LSN up to which every transaction of the epoch is known. Raises LakeError for an unknown
    epoch, and for one of which nothing is kept."""
    if epoch == record.epoch:
        # The durable LSN is the end of a commit. Another transaction's commit may begin there.
        return LSN(max(0, read_durable_lsn(changelog) - 1))
    if not 0 < epoch < record.epoch:
        raise LakeError(f"there is no epoch {epoch}; the newest is {record.epoch}")
    known = [file.max_lsn for file in live_files(changelog, epoch, LSN(0))]
    known += [LSN(point.lsn) for point in points.all() if point.epoch == epoch]
    if not known:
        raise LakeError(
            f"nothing of epoch {epoch} is kept any more",
            "changelog_retention_h and consistent_point_retention_h of the pipeline say how long it would be",
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
            f"the transactions that committed up to {moment.isoformat()} may not all be received yet:"
            f" no later transaction was received. The changelog is durable up to {LSN(newest + 1)}",
            f"to read the newest, pass lsn='{LSN(newest + 1)}'",
        )
    first = live_files(changelog, epoch, LSN(0))[0].min_lsn if floor else LSN(0)
    if after <= first:
        raise LakeError(
            f"{moment.isoformat()} is before what the changelog still holds, which begins at {first}",
            "pass a later time; changelog_retention_h of the pipeline says how long changes are kept",
        )
    return LSN(after - 1)


@dataclass(frozen=True)
class TableVersion:
    """Version `version` of the Delta table at `uri`. Errors name the table `name`.

    `position`: the position under the app id `app` at which a consistent point recorded this version. If the
    version has another position, the table was restored or written again, and `open` fails.
    """

    name: TableName
    uri: str
    version: int
    app: str | None = None
    position: int | None = None

    def open(self) -> DeltaTable:
        """Open the version. Raises LakeError if it cannot be read, or is not the one that the consistent
        point recorded."""
        try:
            opened = open_delta(self.uri, self.version)
        except (DeltaError, TableNotFoundError, OSError):
            raise self._unreadable() from None
        if self._is_known and app_version(opened, self.app or "") != self.position:
            raise LakeError(
                f"version {self.version} of {self.name} is not the one that the consistent point"
                " recorded: the lake table was restored from a copy",
                "start the replication app, which applies the missing changes; then read the table again",
            )
        return opened

    def read(self) -> pa.Table:
        """Return all rows, in the types of the table. Raises LakeError."""
        opened = self.open()
        schema = pa.schema(opened.schema().to_arrow())
        try:
            found = query_delta(opened, "select * from it")
        except LakeUnavailableError:
            raise
        except Exception as error:  # noqa: BLE001 - DataFusion raises plain ones, which may hold values
            log_unexpected(log, f"reading {self.name}", error)
            failed = traced(self._unreadable(), error)
        else:
            return found.select(schema.names).cast(schema)
        raise failed

    def frame(self, spark: SparkSession) -> DataFrame:
        """Return a Spark data frame that reads the version when it is used. Raises LakeError, or ToolError if
        Spark has no connector to the store."""
        if self._is_known:
            self.open()
        try:
            return spark.read.format("delta").option("versionAsOf", self.version).load(hadoop_uri(self.uri))
        except Exception as error:
            check_connector(error)
            # Spark raises one of many classes. In an object store, it may be Spark's own access that fails.
            self.open()
            if is_object_store(self.uri):
                raise self._unreached() from error
            raise self._unreadable() from error

    @property
    def _is_known(self) -> bool:
        return self.app is not None and self.position is not None

    def _unreached(self) -> LakeError:
        return LakeError(
            f"Spark cannot read {self.name} from its store, which this process can",
            "keys have to be in the environment before the session starts, and in that of executors, or come"
            " from a role, or are settings of Hadoop's: docs/how-to/keep-the-lake-on-s3.md, -on-gcs.md and"
            " -on-azure.md. Spark's own words are above",
        )

    def _unreadable(self) -> LakeError:
        return LakeError(
            f"version {self.version} of {self.name} cannot be read any more, or the table is gone",
            "read at a newer consistent point; longer reads need a longer consistent_point_keep_all_h",
        )


@dataclass(frozen=True)
class ChangelogFinder:
    """Finds rows of one relation in the live changelog files of the epoch. Raises ChangelogError if a file no
    longer exists."""

    moment: PointInTime
    index: RelationIndex

    @property
    def uri(self) -> str:
        return str(self.moment.changelog.table_uri).rstrip("/")

    def files(self, relation_id: int, above: LSN, upto: LSN | None = None) -> list[ChangelogFile]:
        """Return the files that can hold rows of the relation after `above` and up to `upto`, in LSN
        order."""
        found = reader.live_files(self.moment.changelog, self.moment.epoch, above)
        return [
            file for file in found if file.may_hold(relation_id) and (upto is None or file.min_lsn <= upto)
        ]

    def rows(
        self, files: Sequence[ChangelogFile], relation_id: int, above: LSN, upto: LSN | None = None
    ) -> pa.Table:
        """Return the HEADS columns of the relation's rows in these files, ordered by (commit_lsn,
        ordinal)."""
        filesystem, root = open_storage(self.uri)
        paths = [file.path for file in files]
        rows = reader.read_rows(filesystem, root, paths, relation_id, above, HEADS)
        return rows if upto is None else rows.filter(pc.less_equal(rows["commit_lsn"], int(upto)))

    @cached_property
    def records(self) -> list[RelationRecord]:
        """Return every relation version that the relation index has."""
        return self.index.all()

    def find_record(self, relation_id: int, version: int) -> RelationRecord | None:
        """Return the relation of a version from the index or the changelog, or None if neither has it any
        more."""
        found = self.index.find(relation_id, version)
        return found or reader.find_relation_record(self.uri, relation_id, version)
