"""Names that are stored: a field or a class that gets another name makes records of earlier versions unknown.

The texts below are what a lake and a state database hold. A change of one of them needs a migration.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.replication.changelog.layout import (
    DURABLE_APP,
    RECEIVER_APP,
    CommitRecord,
    EpochRecord,
)
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.publish.record import PublisherRecord, StoppedTable
from airflow_provider_pgrepl.replication.lake.consistent_points import SCHEMA
from airflow_provider_pgrepl.replication.lake.delta.table import app_id
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column, Partition, PgType, Relation
from airflow_provider_pgrepl.replication.source.event_trigger.message import carried_format

TABLE = TableName("public", "orders")
MONEY = PgType(16400, -1, "money_amount", "d", parts=(("base", PgType(1700, 786438, "numeric(12,2)")),))
STATUS = PgType(16410, -1, "status", "e", extension="shop", labels=((16411, "open"), (16412, "paid")))
PART = Partition(16501, TableName("public", "orders_1"), 16502, True, 700, (701,), "r", "p")
RELATION = Relation(
    16500,
    TABLE,
    (
        Column("id", 1, 20, -1, "bigint", is_key=True, not_null=True, xmin=690),
        Column("amount", 2, 16400, -1, "money_amount", "d", type=MONEY),
        Column("status", 3, 16410, -1, "status", "e", type=STATUS, missing="open", default_oid=16520),
    ),
    "i",
    "p",
    publication_oid=16600,
    membership_oid=16601,
    membership_xmin=691,
    unpublished=(Column("total", 4, 1700, -1, "numeric"),),
    publication_xmin=692,
    natts=4,
    partitions=(PART,),
    dropped=(Column("old", 5, 25, -1, "text"),),
    ignored=(5,),
    truncated_by=693,
    persistence="p",
    xmin=694,
    links=(695,),
)
RECORD = replace(
    RelationRecord.of_catalog(RELATION),
    using=True,
    watched=True,
    hidden=(1,),
    publication_status=RELATION.publication_status,
)
POSITION = EventPosition(Epoch(3), LSN(20), 4)
STOPPED = StoppedTable("public.orders", ("public.orders",), POSITION, "TableError", "r", "h")

FORMATS = {"2269d13d651d", "5ac5266d0dfb"}
ERRORS = """
    BusyError ChangelogError ChangelogFileGoneError ConfigError DriftError FencedError GapError IdentityError
    LakeChangedError LakeError LakeTableError LakeUnavailableError MessageError NoChangelogError
    OvertakenError PrivilegeError PublicationError RewoundError ServerSettingError SlotError SnapshotError
    SourceConnectionError SourceError SparkError StateError TableError TableSnapshotError TargetError
    TargetUnavailableError ToolError TransformError TruncatedError UnsendableError ValueRangeError WireError
"""


def test_versions_of_relations_stay_what_they_are() -> None:
    # Both are hashes of the JSON, and so of the names of all fields.
    assert RELATION.version == 2049441780800736108
    assert RECORD.version == 6880882320887599068


def test_records_of_the_changelog_keep_their_fields() -> None:
    epoch = EpochRecord(
        "shop",
        Epoch(3),
        "7400000000000000001",
        2,
        "shop_slot",
        "shop_pub",
        16600,
        LSN(0x16B3748),
        database="shop",
        database_oid=16384,
        pipeline_id="p-1",
    )
    assert epoch.to_json() == (
        '{"pipeline": "shop", "epoch": 3, "system_identifier": "7400000000000000001", "timeline": 2,'
        ' "slot": "shop_slot", "publication": "shop_pub", "publication_oid": 16600,'
        ' "consistent_point": "0/16B3748", "layout": 2, "database": "shop", "database_oid": 16384,'
        ' "pipeline_id": "p-1"}'
    )
    commit = CommitRecord("data", Epoch(3), LSN(30), LSN(10), LSN(20), 5, (1, 2), 7, 8)
    assert commit.to_metadata() == {
        "pgrepl": '{"kind": "data", "epoch": 3, "durable_lsn": 30, "first_commit_lsn": 10,'
        ' "last_commit_lsn": 20, "last_commit_us": 5, "relations": [1, 2], "bytes": 7, "rows": 8}'
    }
    marker = CommitRecord("marker", Epoch(3), LSN(30), wanted_lsn=LSN(40))
    assert marker.to_metadata()["pgrepl"].endswith('"bytes": 0, "rows": 0, "wanted_lsn": 40}')
    assert CommitRecord.from_json(marker.to_metadata()["pgrepl"]) == marker


def test_records_beside_the_changelog_keep_their_fields() -> None:
    publisher = PublisherRecord(
        POSITION,
        1,
        2,
        3,
        4,
        "h",
        "nats://b",
        datetime(2026, 1, 2, tzinfo=UTC),
        {16500: STOPPED},
        {16500: frozenset({1, 2})},
        "e",
        "r",
        "h",
    )
    assert publisher.to_json() == (
        '{"generation": 1, "stamp": 2, "published": 3, "skipped": 4, "holder": "h", "place": "nats://b",'
        ' "error": "e", "reason": "r", "hint": "h", "layout": 2, "position": "3:0/14:4",'
        ' "saved_at": "2026-01-02T00:00:00+00:00", "stopped": {"16500": {"table": "public.orders",'
        ' "names": ["public.orders"], "after": "3:0/14:4", "error": "TableError", "reason": "r",'
        ' "hint": "h"}}, "columns": {"16500": "1-2"}}'
    )
    assert SCHEMA.names == ["epoch", "lsn", "commit_ts", "tables", "positions"]


def test_ids_of_applications_stay_what_they_are() -> None:
    assert (app_id("shop", Epoch(3)), RECEIVER_APP, DURABLE_APP) == (
        "shop:3",
        "pgrepl-receiver",
        "pgrepl-durable-lsn",
    )


def test_installed_event_triggers_stay_understood() -> None:
    # A hash of the texts of our queries: with another one, what a trigger carries is not read any more.
    assert {carried_format(version) for version in (140000, 150000, 180000)} == FORMATS


def test_classes_of_errors_that_tables_and_tasks_record_exist() -> None:
    known = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert known >= set(ERRORS.split())
