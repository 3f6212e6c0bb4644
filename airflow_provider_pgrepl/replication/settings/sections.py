"""The settings of a pipeline file, by subject. To add a setting, add a field to its section.

The text below a field is its description in the reference and in the JSON Schema. The file itself is flat.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.postgres.names import TableName

from .lake import check_lake, check_template
from .mistakes import (
    Amount,
    Fields,
    Hours,
    Rule,
    Seconds,
    SecondsOrZero,
    Size,
    TablePattern,
    TableText,
    distinct,
    filled,
    matching,
)
from .publisher_sections import PUBLISHER_FIELDS
from .tables import SHAPES_COPY, NewTables, TablePolicy

MIB = 1 << 20
_NAME_BYTES = 63
_NAME = matching(
    r"[a-z0-9_]{1,55}",
    "may hold only a-z, 0-9 and _, and at most 55 of them",
    "it becomes part of the slot's name, and PostgreSQL allows no other characters there",
)
_SLOT = matching(r"[a-z0-9_]{0,63}", "may hold only a-z, 0-9 and _, and at most 63 of them")


def _check_publication(text: str) -> None:
    if len(text.encode()) > _NAME_BYTES:
        raise ConfigError(f"is longer than the {_NAME_BYTES} bytes that PostgreSQL allows")


_TABLES = filled('list tables or patterns, as ["public.orders", "sales.*"]')
CatalogName = Annotated[str, filled("give the name in the catalog")]
TABLE_FIELDS = Fields(TablePolicy, "policies")
OfTable = Annotated[dict[str, Any], TABLE_FIELDS]
PublisherName = Annotated[
    str,
    matching(
        r"[a-z0-9][a-z0-9_]{0,39}",
        "may hold only a-z, 0-9 and _, at most 40 of them, and not begin with _",
    ),
]
OfPublisher = Annotated[dict[str, Any], PUBLISHER_FIELDS]


@dataclass(frozen=True, kw_only=True)
class SourceSettings:
    """The source: its tables, connection, slot and publication."""

    name: Annotated[str, _NAME]
    """The pipeline's name: a-z, 0-9 and _, at most 55; part of slot, publication and lake bookkeeping."""
    tables: Annotated[tuple[TablePattern, ...], _TABLES]
    """Tables as `schema.table` (`"Quoted"."Names"` where needed), or all tables of a schema as `schema.*`."""
    insert_only: tuple[TableText, ...] = ()
    """Those of `tables` that have no key and receive inserts only; a pattern alone never adds such a
    table.
    """
    new_tables: NewTables = "add"
    """The effect of new tables that match a pattern in `tables`: `add`, `ignore`, `error`. No table is
    new while none is recorded.
    """
    conn_id: str = "pgrepl_default"
    """Airflow connection of the source; the apps themselves use `PGREPL_DSN`."""
    state_conn_id: str | None = None
    """Airflow connection of the database for schema `_pgrepl`; the source when null (apps:
    `PGREPL_STATE_DSN`).
    """
    primary_conn_id: str | None = None
    """Airflow connection of the primary, if the source is a standby (apps: `PGREPL_PRIMARY_DSN`): a slot is
    then created also while the primary is idle ([standby](../how-to/replicate-from-a-standby.md)).
    """
    slot: Annotated[str, _SLOT] = ""
    """The replication slot; empty: `pgrepl_<name>`."""
    publication: Annotated[str, Rule(_check_publication)] = ""
    """The publication; empty: `pgrepl_<name>`."""
    publication_mode: Literal["create", "use"] = "create"
    """`create`: the snapshot app makes and alters the publication. `use`: it is yours and is only checked,
    also if the file says `create` later.
    """
    event_trigger: bool = False
    """If true, an event trigger at the source marks the exact position of each DDL in the stream; [a
    superuser creates it once](event-trigger.md).
    """
    trust_table_owners: bool = False
    """If true, code of the tables' owners may run with the rights of the role that replicates, and that role
    may be a superuser, see [connection](connection.md#code-of-the-tables-owners).
    """
    failover: bool | Literal["auto"] = "auto"
    """If true, standbys can synchronize the slot, so that the pipeline continues from a promoted standby
    without a new copy ([fail over](../how-to/fail-over.md)). `auto`: true if the server is PostgreSQL 17 or
    later and has a physical standby when the slot is created or the replication app starts.
    """
    protect_source: bool = False
    """If true, a table whose UPDATE or DELETE the source rejects because the pipeline publishes it is removed
    from the pipeline's own publication and becomes `errored`. This takes up to 15 s while the replication
    app runs; the drift check does it, too; see [source statements](source-statements.md).
    """
    wal_budget: Size | None = None
    """Bytes of WAL that the slot may retain; `null`: only the server's `max_slot_wal_keep_size` limits it. A
    health check warns at half of the smaller limit, and fails at 80 % ([be
    alerted](../how-to/be-alerted.md)).
    """
    on_wal_budget: Literal["alert", "drop_slot"] = "alert"
    """Beyond `wal_budget`: `alert`, or `drop_slot`: a health check drops the slot if no process reads it; all
    tables need a new epoch then ([WAL](../how-to/be-alerted.md#keep-wal-from-filling-the-sources-disk)).
    """
    slot_timeout_s: Seconds = 60.0
    """How long the creation of a slot waits for transactions that are open at the source; at the start of an
    epoch two slots are created, one after the other.
    """
    reconnect_s: SecondsOrZero = 60.0
    """How long the replication app tries to reconnect to the source after it lost its connections, before it
    ends (exit code 75); `0` ends it at once. It takes its lock over from the lost session; if another
    process holds the lock by then, the app ends at once.
    """


@dataclass(frozen=True, kw_only=True)
class LakeLayout:
    """The lake, and the columns that this package adds to lake tables."""

    lake: Annotated[str, Rule(check_lake)]
    """The lake root, which only this pipeline may use. Either the absolute path of a directory, on this host
    or on a file system that all hosts share; or a path in an object store: `s3://bucket/path`
    ([S3](../how-to/keep-the-lake-on-s3.md) and compatible stores; `s3a://` is the same path),
    `gs://bucket/path` ([Google](../how-to/keep-the-lake-on-gcs.md)),
    `abfss://container@account.dfs.core.windows.net/path` ([Azure](../how-to/keep-the-lake-on-azure.md)).
    """
    lake_conn_id: str | None = None
    """Airflow connection with keys for the lake's store, of type `aws`, `google_cloud_platform`, or `wasb` or
    `adls`; when null, the hosts' environment and roles are used.
    """
    lake_tables: Literal["all", "none"] = "all"
    """`none`: no table gets a lake table; changes go into the changelog, and from there to
    [publishers](../how-to/publish-without-a-lake.md), without Spark. `lake` holds the changelog then.
    """
    commit_lsn_column: Annotated[bool, SHAPES_COPY] = True
    """If true, lake tables have `_pgrepl_commit_lsn`."""
    commit_ts_column: Annotated[bool, SHAPES_COPY] = True
    """If true, lake tables have `_pgrepl_commit_ts`."""


@dataclass(frozen=True, kw_only=True)
class PerTable:
    """Settings of single tables, which override the pipeline's."""

    per_table: Annotated[dict[TableText, OfTable], distinct(TableName.parse)] = field(default_factory=dict)
    """`truncate`, `deletes`, `history`, `on_drift`, `merge`, `merge_interval_s`, `max_staleness_s`,
    `max_write_amplification`, `cluster_by` of single tables: `{"public.t": {"deletes": "soft"}}`; and
    `partition_by`, which exists for single tables only:
    [partitions](policies.md#partitions-of-a-lake-table).
    """


@dataclass(frozen=True, kw_only=True)
class Receiving:
    """From the slot to the changelog."""

    flush_interval_s: Seconds = 1.0
    """The maximum time that a received transaction waits for its changelog commit; it does not wait while the
    walsender is a [synchronous standby](source-statements.md#synchronous-replication).
    """
    flush_bytes: Size = 64 * MIB
    """Received bytes at which the changelog is committed earlier."""
    part_bytes: Size = 32 * MIB
    """Size at which a part of a large transaction is written, before its commit message arrives; limits the
    receiver's memory.
    """
    receive_buffer_bytes: Size = 64 * MIB
    """Bytes that were received and not yet decoded; limits the receiver's memory."""
    stream_in_progress: bool = False
    """If true, large transactions are received [while they are in
    progress](source-statements.md#large-transactions), and so are in the lake sooner after their commit.
    """
    message_bytes: Size = 4 * MIB
    """Of a [logical message](messages.md) with more bytes only prefix and size are kept."""
    message_prefixes: tuple[str, ...] = ("*",)
    """The prefixes of the logical messages that are kept; `*` matches all, `[]` keeps none."""
    changelog_retention_h: Hours = 168.0
    """How long changes are kept. They are kept longer if a table still needs them, or if the server may send
    them again: those since the slot's `restart_lsn`, which an open or prepared transaction holds back.
    """


@dataclass(frozen=True, kw_only=True)
class Applying:
    """From the changelog to the lake tables."""

    trigger_interval_s: SecondsOrZero = 0.0
    """Time between the starts of two batches of the applier; 0: a batch starts when the previous one has
    ended.
    """
    batch_bytes: Size = 64 * MIB
    """Bytes of values at which a batch of the applier ends, always with a whole changelog commit; also the
    limit of one merge of a lagging table.
    """
    slice_bytes: Size = 64 * MIB
    """Bytes of values that one commit merges into a table, always whole transactions; limits a task's memory.
    A larger transaction is limited, too: from two slices on it is merged in parts of 32 MiB, which are
    stored in unnamed files on the local disk until then.
    """


@dataclass(frozen=True, kw_only=True)
class PointsAndMaintenance:
    """Consistent points, and the rounds of maintenance."""

    consistent_point_interval_s: Seconds = 60.0
    """Maximum time without a consistent point while tables are merged at different times. After it, all
    tables are merged up to the same position, so no table waits longer than this, whatever its
    `merge_interval_s`.
    """
    consistent_point_keep_all_h: Hours = 1.0
    """How long every consistent point is kept."""
    consistent_point_thinning_min: Amount = 10.0
    """After that, one point is kept for each such interval."""
    consistent_point_retention_h: Hours = 168.0
    """How long those are kept; not longer than `changelog_retention_h`."""
    consistent_point_bytes: Amount = 1.25
    """Maximum bytes of a table's older versions, as a multiple of its live bytes (at least 8 MiB). Above it,
    points are deleted at even intervals. The newest of the last minute, and two that divide
    `consistent_point_retention_h`, are never deleted. A table whose merges replace a third of this limit
    (and more than 16 MiB) in two and a half minutes is merged less often.
    """
    sequences: bool = False
    """If true, the values of the source's sequences are recorded in the lake after consistent points, for
    [`pgrepl sequences`](commands.md#sequences). These are the sequences that a column of `tables`, or of
    their partitions, owns (serial, identity) or uses in its default, and those that no column owns, which
    applications call by name. Left out: unlogged and temporary ones, those of extensions, and those of other
    tables. The role needs SELECT on each ([lake layout](lake-layout.md#sequences)).
    """
    maintenance_interval_s: Seconds = 600.0
    """Time between two rounds of maintenance: thinning, retention, compaction, vacuum."""


@dataclass(frozen=True, kw_only=True)
class Snapshotting:
    """Copies of tables."""

    snapshot_range_bytes: Size = 128 * MIB
    """Size of the ranges in which a table is copied, one Spark task each."""
    lock_timeout_s: Seconds = 10.0
    """How long a snapshot waits for its lock on a table, and `snapshot` and `remove` for the
    publication's.
    """


@dataclass(frozen=True, kw_only=True)
class Publishing:
    """Events for brokers."""

    publishers: dict[PublisherName, OfPublisher] = field(default_factory=dict)
    """The publishers that send the changes to a broker, by name: `{"events": {"target": "rabbitmq"}}`, see
    [publishers](publishers.md).
    """


@dataclass(frozen=True, kw_only=True)
class CatalogTemplates:
    """Names of lake tables in a catalog."""

    target_database: Annotated[str, Rule(check_template)] = "{pipeline}"
    """The database (in Unity Catalog the schema) of lake tables in a
    [catalog](../how-to/register-in-a-catalog.md): a template with `{pipeline}`, `{schema}`, `{table}`.
    """
    target_table: Annotated[str, Rule(partial(check_template, needed="table"))] = "{schema}_{table}"
    """Their names there, also a template; it must contain `{table}`."""
    target_schemas: dict[str, CatalogName] = field(default_factory=dict)
    """Other names of schemas in both templates: `{"public": "shop"}`."""
    target_tables: dict[TableText, CatalogName] = field(default_factory=dict)
    """The names there of single tables: `{"public.orders": "purchases"}`."""
