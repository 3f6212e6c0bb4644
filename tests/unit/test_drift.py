"""drift/judge.py: what counts as a change of shape, and how it is said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.drift import DriftKind
from airflow_provider_pgrepl.replication.drift.judge import MADE_AGAIN, NO_IDENTITY, compare_catalog, judge
from airflow_provider_pgrepl.replication.pgoutput.messages import RelationMessage, WireColumn
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import (
    Column,
    PgType,
    PublicationStatus,
    Relation,
)
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline

RECORDED = Relation(
    oid=7,
    table=TableName("public", "orders"),
    columns=(
        Column("id", 1, 20, -1, "bigint", is_key=True, not_null=True, xmin=10),
        Column("Total", 3, 1700, 786438, "numeric(12,2)", xmin=10),
    ),
    relfilenode=70,
    publication_oid=5,
    membership_oid=50,
    membership_xmin=11,
)
ID, TOTAL = RECORDED.columns


PIPELINE = Pipeline(name="p", lake="/lake", tables=("public.*",))


def find_drift(recorded: Relation, record: RelationRecord, pipeline: Pipeline = PIPELINE) -> str | None:
    """Return why the table cannot continue, or None if it can. Asserts that a reason comes with a hint."""
    verdict = judge(recorded, record, pipeline.options(recorded.table))
    if verdict.kind is not DriftKind.UNSAFE:
        assert verdict.relation is not None
        return None
    assert verdict.hint
    assert verdict.relation is None
    return verdict.reason


def announced(current: Relation, **message: object) -> RelationRecord:
    """Return a record whose message agrees with the catalog, apart from the fields in `message`."""
    columns = tuple(WireColumn(c.name, c.type_oid, c.typmod, c.is_key) for c in current.columns)
    name = current.table
    fields = {
        "schema": name.schema,
        "name": name.name,
        "replica_identity": current.replica_identity,
        "columns": columns,
        **message,
    }
    return RelationRecord(RelationMessage(oid=current.oid, **fields), current)


def columns(*shape: Column) -> Relation:
    return replace(RECORDED, columns=shape)


def test_the_same_shape_is_no_drift() -> None:
    assert find_drift(RECORDED, announced(RECORDED)) is None


@pytest.mark.parametrize(
    ("current", "says"),
    [
        (
            replace(RECORDED, oid=8),
            MADE_AGAIN,
        ),
        (
            replace(RECORDED, table=TableName("public", "Orders")),
            'the table was renamed or moved to public."Orders"',
        ),
        (columns(ID, replace(TOTAL, attnum=4)), 'column "Total" was dropped and added again'),
        (columns(ID, replace(TOTAL, name="sum")), 'column "Total" was renamed to sum'),
        (
            columns(replace(ID, type_oid=23, type_name="integer"), TOTAL),
            "the type of column id changed from bigint to integer",
        ),
        (
            columns(ID, replace(TOTAL, typmod=786439, type_name="numeric(12,3)")),
            'the type of column "Total" changed from numeric(12,2) to numeric(12,3)',
        ),
        (columns(replace(ID, is_key=False), TOTAL), f"the key changed: column id left it; {NO_IDENTITY}"),
        (columns(ID, replace(TOTAL, is_key=True)), 'the key changed: column "Total" joined it'),
        (replace(RECORDED, replica_identity="f"), "the replica identity changed"),
        (
            replace(RECORDED, membership_oid=51),
            "the table was removed from the publication and added again: changes are missing",
        ),
        (replace(RECORDED, membership_oid=0), "the table was taken out of the publication"),
        (
            replace(RECORDED, publication_oid=6, membership_oid=51),
            "the publication was dropped, or created again: changes between are missing",
        ),
        (
            replace(RECORDED, membership_xmin=12),
            "the column list, row filter or schema of the table in the publication changed",
        ),
        (
            replace(RECORDED, relfilenode=71, columns=(ID, replace(TOTAL, xmin=12))),
            'the table was rewritten and column "Total" altered, which may have changed its values',
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_change_is_said_in_a_sentence(current: Relation, says: str) -> None:
    assert find_drift(RECORDED, announced(current)) == says


def test_a_table_that_is_gone_is_drift() -> None:
    assert find_drift(RECORDED, replace(announced(RECORDED), catalog=None)) == "the table was dropped"
    verdict = compare_catalog(RECORDED, None, PIPELINE.options(RECORDED.table))
    assert (verdict.kind, verdict.reason) == (DriftKind.UNSAFE, "the table was dropped")
    assert "pgrepl remove FILE.json 'public.orders'" in verdict.hint


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (RECORDED.publication_status, None),
        (PublicationStatus(0), "the table was dropped"),
        (
            PublicationStatus(9),
            MADE_AGAIN,
        ),
        (PublicationStatus(7, 5, 0, 0, 0), "the table was taken out of the publication"),
        (
            PublicationStatus(7, 6, 0, 50, 11),
            "the publication was dropped, or created again: changes between are missing",
        ),
    ],
)
def test_changed_publication_status_is_reported_as_drift(status: PublicationStatus, says: str | None) -> None:
    record = RelationRecord.of_publication_status(7, status)
    assert RelationRecord.from_json(record.to_json()) == record
    assert find_drift(RECORDED, record) == says


@pytest.mark.parametrize(
    "change",
    [
        lambda r: replace(r, relfilenode=71),
        lambda r: replace(r, columns=(ID, replace(TOTAL, xmin=99))),
        lambda r: replace(r, columns=(ID, replace(TOTAL, not_null=True))),
    ],
    ids=["VACUUM FULL, CLUSTER or TRUNCATE", "SET STATISTICS", "SET NOT NULL"],
)
def test_ddl_without_effect_on_values_is_not_drift(change: Callable[[Relation], Relation]) -> None:
    assert find_drift(RECORDED, announced(change(RECORDED))) is None


def test_names_that_swap_places_are_drift_although_the_set_of_names_is_the_same() -> None:
    swapped = columns(replace(ID, name="Total"), replace(TOTAL, name="id"))
    assert find_drift(RECORDED, announced(swapped)) == (
        'column id was renamed to "Total"; column "Total" was renamed to id'
    )


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (
            {"columns": (WireColumn("id", 20, -1, True),)},
            "the stream and the catalog disagree about columns: they were changed more than once since the"
            " stream sent them",
        ),
        (
            {"columns": (WireColumn("id", 20, -1, True), WireColumn("Total", 1700, 786439, False))},
            "the stream and the catalog disagree about columns: they were changed more than once since the"
            " stream sent them",
        ),
        (
            {"columns": (WireColumn("id", 20, -1, True), WireColumn("sum", 1700, 786438, False))},
            'column "Total" was renamed to sum',
        ),
        (
            {"columns": (WireColumn("id", 20, -1, False), WireColumn("Total", 1700, 786438, True))},
            'the key changed: column id left it; the key changed: column "Total" joined it',
        ),
        ({"replica_identity": "f"}, "the replica identity changed"),
    ],
    ids=["a column less", "another type", "another name", "another key", "another identity"],
)
def test_change_reverted_in_catalog_is_detected_from_stream(message: dict[str, object], says: str) -> None:
    record = announced(RECORDED, **message)
    assert find_drift(RECORDED, record) == says


def test_with_full_identity_the_stream_marks_all_columns() -> None:
    full = replace(RECORDED, replica_identity="f")
    marked = tuple(WireColumn(c.name, c.type_oid, c.typmod, True) for c in full.columns)
    assert find_drift(full, announced(full, columns=marked)) is None


def test_a_key_published_in_part_is_no_disagreement() -> None:
    keyless = columns(replace(ID, is_key=False), TOTAL)
    sent = (WireColumn("id", 20, -1, True), WireColumn("Total", 1700, 786438, False))
    assert find_drift(keyless, announced(keyless, columns=sent)) is None


def test_a_key_whose_column_was_dropped_has_changed() -> None:
    rest = tuple(column for column in RECORDED.columns if not column.is_key)
    assert find_drift(RECORDED, announced(replace(RECORDED, columns=rest))) == (
        f"the key changed: column id was dropped; {NO_IDENTITY}"
    )


def test_a_record_survives_its_json_with_and_without_a_catalog() -> None:
    for record in (announced(RECORDED), replace(announced(RECORDED), catalog=None)):
        again = RelationRecord.from_json(record.to_json())
        assert again == record
        assert again.version == record.version
        assert 0 < record.version < 2**63
    assert announced(RECORDED).version == RECORDED.version


INT, TEXT = PgType(23, name="int4"), PgType(25, name="text")


def with_type(pg_type: PgType) -> Relation:
    return columns(ID, replace(TOTAL, type_oid=pg_type.oid, typmod=-1, type_name="public.t", type=pg_type))


def composite(*fields: tuple[str, PgType], name: str = "t") -> PgType:
    return PgType(20000, name=name, kind="c", parts=fields)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (composite(("a", INT)), composite(("a", INT), ("b", TEXT))),
        (composite(("a", INT), ("b", TEXT)), composite(("a", INT))),
        (composite(("a", INT)), composite(("b", INT))),
        (composite(("a", INT)), composite(("a", TEXT))),
        (composite(("a", composite(("x", INT)))), composite(("a", composite(("y", INT))))),
    ],
    ids=["attribute added", "attribute dropped", "attribute renamed", "attribute's type", "deeper down"],
)
def test_a_type_made_of_something_else_is_drift(before: PgType, now: PgType) -> None:
    drift = find_drift(with_type(before), announced(with_type(now)))
    assert drift == 'what the type of column "Total" (public.t) is made of changed'


def test_a_renamed_type_is_no_drift() -> None:
    now = with_type(composite(("a", replace(INT, name="other")), name="renamed"))
    assert find_drift(with_type(composite(("a", INT))), announced(now)) is None


def test_a_type_that_took_the_name_of_another_is_told_by_oid_and_labels() -> None:
    mood, other = (
        PgType(oid, name="mood", kind="e", labels=labels)
        for oid, labels in ((9000, ((1, "sad"), (2, "ok"))), (9100, ((3, "sad"), (4, "happy"))))
    )
    before, now = (
        columns(ID, Column("m", 2, type_.oid, -1, "public.mood", "e", type=type_)) for type_ in (mood, other)
    )
    assert find_drift(before, announced(now)) == (
        "another type took the name public.mood, that of the type of column m: its oid was 9000 and is 9100;"
        " labels added: 'happy'; labels removed: 'ok'"
    )


GENERATED = Column("g", 4, 25, -1, "text")
UNCHANGED_VALUE = replace(RECORDED, unpublished=(GENERATED,))


@pytest.mark.parametrize(
    ("before", "now", "says"),
    [
        (
            UNCHANGED_VALUE,
            columns(ID, TOTAL, GENERATED),
            "column g, which was generated, is now published: it is"
            " no longer generated (DROP EXPRESSION), or the publication publishes generated columns",
        ),
        (columns(ID, TOTAL, GENERATED), UNCHANGED_VALUE, "generated column g is no longer published"),
        (
            UNCHANGED_VALUE,
            replace(UNCHANGED_VALUE, unpublished=(replace(GENERATED, name="h"),)),
            "column g was renamed to h",
        ),
        (
            UNCHANGED_VALUE,
            replace(UNCHANGED_VALUE, unpublished=(replace(GENERATED, type_oid=23, type_name="integer"),)),
            "the type of column g changed from text to integer",
        ),
    ],
)
def test_columns_that_are_not_sent_drift_too(before: Relation, now: Relation, says: str) -> None:
    assert find_drift(before, announced(now)) == says


def test_another_expression_of_a_column_that_is_not_sent_is_no_drift() -> None:
    now = replace(UNCHANGED_VALUE, relfilenode=71, unpublished=(replace(GENERATED, xmin=99),))
    assert find_drift(UNCHANGED_VALUE, announced(now)) is None
