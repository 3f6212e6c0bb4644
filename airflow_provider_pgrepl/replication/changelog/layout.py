"""The changelog's location, its columns, and the record of its epoch (a versioned public contract)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache

import pyarrow as pa

from airflow_provider_pgrepl.errors import ChangelogError
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch

LAYOUT_VERSION = 2
"""Version 2 adds the database, and the ID of the pipeline's state record, to the epoch record."""

RECEIVER_APP = "pgrepl-receiver"
"""Delta app ID of the process that may append changes. Its version counts the commits; a fence is one of
them."""
EPOCH_APP = "pgrepl-epoch"
DURABLE_APP = "pgrepl-durable-lsn"
PUBLISHED_APP = "pgrepl-published"
"""Delta app ID whose version is a hash of everything that decides what is published, as last recorded in the
changelog's rows."""
SHARED_APP = "pgrepl-shared-token"
"""Delta app ID whose version is the random token that the source also stores; 0 or missing if the source has
none."""
LAKE_APP = "pgrepl-lake:"
"""Prefix of a Delta app ID that ends with a lake's ID. The tables of a lake carry its app ID. A changelog
that replaced a lost one carries the app ID of the former lake."""
AT_REST_APP = "pgrepl-at-rest"
"""Delta app ID whose version equals that of RECEIVER_APP after the last receiver shut down by itself, and if
no receiver has run. It is less while a receiver runs, and after a receiver was killed."""
TORN_DOWN_APP = "pgrepl-torn-down"
"""Delta app ID whose version equals that of RECEIVER_APP after a teardown ended the epoch. It is less as soon
as a receiver or a new epoch commits again."""
UPKEEP_APP = "pgrepl-upkeep"
"""Delta app ID of commits that remove files; its version counts them. It makes one of two concurrent commits
fail: Delta itself does not reject them, because no row changes."""

STATUS_ORDINAL = -2
"""The ordinal of an op `R` row that belongs to no transaction: it is ordered directly before the transaction
at its commit LSN."""

CHANGES = "IUDT"
"""The ops of rows that change a table."""

_NONE = LSN(0)


@cache
def letters(ops: str) -> pa.Array:
    """Return the characters of `ops` as an Arrow array, for a membership test.

    Created on first use: the first Arrow array that a process creates from Python objects imports pandas.
    """
    return pa.array(list(ops))


def floor_app(epoch: int) -> str:
    """Return the Delta app ID whose version is the epoch's floor.

    The floor is the highest commit LSN that retention has dropped.
    """
    return f"pgrepl-floor-lsn:{epoch}"


def hour_of(moment: datetime) -> str:
    """Return the partition (such as `2026-01-31T23`) of rows received at a UTC time."""
    return moment.strftime(_HOUR)


def start_of_hour(partition: str) -> datetime:
    """Return the UTC time at which a partition begins."""
    return datetime.strptime(partition, _HOUR).replace(tzinfo=UTC)


_HOUR = "%Y-%m-%dT%H"

METADATA_KEY = "pgrepl"
PARTITION = "received_hour"

ROW_SCHEMA = pa.schema(
    [
        ("epoch", pa.int64()),
        ("commit_lsn", pa.int64()),
        ("ordinal", pa.int64()),
        ("xid", pa.int64()),
        ("commit_ts", pa.timestamp("us", "UTC")),
        ("relation_id", pa.int64()),
        ("relation_version", pa.int64()),
        ("op", pa.string()),
        ("new", pa.large_list(pa.large_string())),
        ("old", pa.large_list(pa.large_string())),
        ("unchanged", pa.list_(pa.int16())),
    ]
)
"""Columns of a changelog file; the table adds the partition column `received_hour`."""

TABLE_SCHEMA = ROW_SCHEMA.append(pa.field(PARTITION, pa.string()))


def system_folder(lake_root: str) -> str:
    """Return the folder of a lake that holds everything except the tables of the source."""
    return f"{lake_root}/_pgrepl"


def changelog_uri(lake_root: str) -> str:
    """Return the URI of the changelog, the Delta table of all changes."""
    return f"{system_folder(lake_root)}/changelog"


POINTS = "consistent_points"
RELATIONS = "relations"
SEQUENCES = "sequences"


def own_table_uri(lake_root: str, name: str) -> str:
    """Return the URI of another Delta table of this package in the lake.

    `name`: POINTS, RELATIONS, SEQUENCES, or the name of a publisher's table.
    """
    return f"{system_folder(lake_root)}/{name}"


@dataclass(frozen=True)
class EpochRecord:
    """The database history that the changelog holds, stored as the Delta table's description.

    `database`, `database_oid` and `pipeline_id` (that of the state record) are empty in a lake of layout 1
    until its next writer records them. `timeline` is that of the source which the receiver followed last.
    Comparisons ignore these fields: they do not identify a history, and they can change during an epoch.
    """

    pipeline: str
    epoch: Epoch
    system_identifier: str
    timeline: int = field(compare=False)
    slot: str
    publication: str
    publication_oid: int
    consistent_point: LSN
    layout: int = field(default=LAYOUT_VERSION, compare=False)
    database: str = field(default="", compare=False)
    database_oid: int = field(default=0, compare=False)
    pipeline_id: str = field(default="", compare=False)

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "consistent_point": str(self.consistent_point)})

    @classmethod
    def from_json(cls, text: str | None) -> EpochRecord:
        """Parse a record. Raises ChangelogError if it has a newer layout or is not an epoch record."""
        try:
            fields = json.loads(text or "")
            layout = int(fields["layout"])
            if layout > LAYOUT_VERSION:
                raise ChangelogError(
                    f"the lake has layout version {layout}, this version knows up to {LAYOUT_VERSION}",
                    "upgrade airflow-provider-pgrepl",
                )
            place = LSN.parse(fields["consistent_point"])
            return cls(**{**fields, "epoch": Epoch(fields["epoch"]), "consistent_point": place})
        except (ValueError, KeyError, TypeError):
            raise ChangelogError(
                "the table at _pgrepl/changelog was not written by this product",
                "choose another lake root for this pipeline",
            ) from None


@dataclass(frozen=True)
class CommitRecord:
    """The record in a changelog commit's metadata. `bytes` is the size of the uncompressed values.

    `kind`: `data`, `gap` (a transaction was skipped), `fence`, `keepalive`, `epoch`, or `marker` (increments
    the version, so that the applier checks its tables again). `wanted_lsn`: of a marker whose writer waits
    until the changelog is durable past this LSN.
    """

    kind: str
    epoch: Epoch
    durable_lsn: LSN
    first_commit_lsn: LSN = _NONE
    last_commit_lsn: LSN = _NONE
    last_commit_us: int = 0
    relations: tuple[int, ...] = ()
    bytes: int = 0
    rows: int = 0
    wanted_lsn: LSN = _NONE

    def to_metadata(self) -> dict[str, str]:
        fields = asdict(self)
        if not self.wanted_lsn:
            del fields["wanted_lsn"]
        return {METADATA_KEY: json.dumps(fields)}

    @classmethod
    def from_json(cls, text: str) -> CommitRecord:
        fields = json.loads(text)
        for name in {"durable_lsn", "first_commit_lsn", "last_commit_lsn", "wanted_lsn"} & fields.keys():
            fields[name] = LSN(fields[name])
        return cls(**{**fields, "epoch": Epoch(fields["epoch"]), "relations": tuple(fields["relations"])})
