"""Where the changelog lies, its columns, and the record of its epoch (a public contract with a version)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache

import pyarrow as pa

from airflow_provider_pgrepl.errors import ChangelogError
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch

LAYOUT_VERSION = 2
"""2 adds to the epoch's record which database it is of, and which record in the state is the pipeline's."""

RECEIVER_APP = "pgrepl-receiver"
"""Delta app id of whoever may append changes; its version counts commits. A fence is a commit under it."""
EPOCH_APP = "pgrepl-epoch"
DURABLE_APP = "pgrepl-durable-lsn"
PUBLISHED_APP = "pgrepl-published"
"""Delta app id whose version is a hash of what decides what is published, as far as the rows tell of it."""
SHARED_APP = "pgrepl-shared-token"
"""Delta app id whose version is the random token that the source has as well; 0 or none where it has none."""
LAKE_APP = "pgrepl-lake:"
"""Begins a Delta app id that goes on with the id of a lake: its tables have it, and a changelog that took the
place of a lost one has that of the lake as it was."""
AT_REST_APP = "pgrepl-at-rest"
"""Delta app id whose version is that of RECEIVER_APP once the last receiver has ended by itself, or none has
been there. It is less while one runs, and if it was killed."""
TORN_DOWN_APP = "pgrepl-torn-down"
"""Delta app id whose version is that of RECEIVER_APP once a teardown has given up the epoch. Whoever goes on
leaves it behind."""
UPKEEP_APP = "pgrepl-upkeep"
"""Delta app id of whoever takes files out of the list; its version counts commits. Of two at a time one is
refused, which Delta does not do by itself where no row changes."""

STANDING_ORDINAL = -2
"""Of an op `R` that no transaction brought: it stands right before the one at its commit LSN."""

CHANGES = "IUDT"
"""The ops of rows that change a table."""

_NONE = LSN(0)


@cache
def letters(ops: str) -> pa.Array:
    """Return ops as an Arrow array, to look for.

    Made when it is needed: the first array that a process makes of Python's objects imports pandas.
    """
    return pa.array(list(ops))


def floor_app(epoch: int) -> str:
    """Delta app id whose version is the epoch's floor: the highest commit LSN that retention has dropped."""
    return f"pgrepl-floor-lsn:{epoch}"


def hour_of(moment: datetime) -> str:
    """The partition of what is received at a moment, which is one of UTC: as `2026-01-31T23`."""
    return moment.strftime(_HOUR)


def start_of_hour(partition: str) -> datetime:
    """The moment, one of UTC, at which a partition begins."""
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
    """Where in a lake everything lies that is no table of the source."""
    return f"{lake_root}/_pgrepl"


def changelog_uri(lake_root: str) -> str:
    """The Delta table of all changes."""
    return f"{system_folder(lake_root)}/changelog"


POINTS = "consistent_points"
RELATIONS = "relations"


def own_table_uri(lake_root: str, name: str) -> str:
    """One of the two Delta tables beside the changelog."""
    return f"{system_folder(lake_root)}/{name}"


@dataclass(frozen=True)
class EpochRecord:
    """The history of a database that the changelog holds, kept as the Delta table's description.

    `database`, `database_oid` and `pipeline_id` (of the record in the state) are empty in a lake of layout 1
    until its next writer records them. They do not tell one history from another.
    """

    pipeline: str
    epoch: Epoch
    system_identifier: str
    timeline: int
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
        """Raises ChangelogError when it is not ours or of a newer layout."""
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
    """What a changelog commit says of itself, in its commit metadata; `bytes` are the values, uncompressed.

    `kind`: `data`, `gap` (a transaction was skipped), `fence`, `keepalive`, `epoch`, or `marker` (moves the
    version so that the applier looks up).
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

    def to_metadata(self) -> dict[str, str]:
        return {METADATA_KEY: json.dumps(asdict(self))}

    @classmethod
    def from_json(cls, text: str) -> CommitRecord:
        fields = json.loads(text)
        for name in ("durable_lsn", "first_commit_lsn", "last_commit_lsn"):
            fields[name] = LSN(fields[name])
        return cls(**{**fields, "epoch": Epoch(fields["epoch"]), "relations": tuple(fields["relations"])})
