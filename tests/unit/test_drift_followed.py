"""judge(): what a lake table follows by itself, and what it is for from there on."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.drift import DriftKind
from airflow_provider_pgrepl.replication.drift.judge import DriftResult, compare_catalog, judge
from airflow_provider_pgrepl.replication.pgoutput.messages import WireColumn
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column, Partition, PgType, Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.tables import TableOptions
from airflow_provider_pgrepl.replication.state.recorded_events import schema_changes

PIPELINE = Pipeline(name="p", lake="/lake", tables=("public.*",))
ID = Column("id", 1, 23, -1, "integer", is_key=True, not_null=True, xmin=10)
NAME = Column("name", 2, 1043, 14, "character varying(10)", xmin=10)
PRICE = Column("price", 3, 1700, 327686, "numeric(5,2)", xmin=10)
BEFORE = Relation(
    oid=7,
    table=TableName("public", "goods"),
    columns=(ID, NAME, PRICE),
    relfilenode=70,
    publication_oid=5,
    membership_oid=50,
    membership_xmin=11,
    publication_xmin=9,
    natts=3,
)
SINCE = Column("since", 4, 1082, -1, "date", xmin=20)


def now(*columns: Column, natts: int = 3, **other: object) -> Relation:
    return replace(BEFORE, columns=columns, natts=max(natts, *(c.attnum for c in columns)), **other)


def judged(relation: Relation, pipeline: Pipeline = PIPELINE, before: Relation = BEFORE) -> DriftResult:
    return judge(before, RelationRecord.of_catalog(relation), pipeline.options(before.table))


def with_policy(on_drift: str) -> Pipeline:
    return replace(PIPELINE, on_drift=on_drift)  # type: ignore[arg-type]


def test_an_added_column_is_followed_with_what_older_rows_have_in_it() -> None:
    relation = now(ID, NAME, PRICE, replace(SINCE, missing="2026-01-01"))
    assert judged(relation) == DriftResult(DriftKind.SAFE, ("column since was added",), relation=relation)


def test_a_dropped_column_is_kept() -> None:
    relation = now(ID, PRICE)
    verdict = judged(relation)
    assert (verdict.kind, verdict.changes) == (DriftKind.SAFE, ("column name was dropped",))
    assert verdict.relation == replace(relation, dropped=(NAME,))
    again = judged(relation, before=verdict.relation)
    assert again == DriftResult(DriftKind.UNCHANGED, relation=verdict.relation)


@pytest.mark.parametrize("natts", [4, 5])
def test_a_name_that_the_lake_keeps_cannot_come_again(natts: int) -> None:
    kept = replace(now(ID, PRICE), dropped=(NAME,), natts=natts - 1)
    verdict = judged(now(ID, PRICE, replace(NAME, attnum=natts)), with_policy("ignore"), kept)
    assert verdict.reason == "column name was dropped and added again"


@pytest.mark.parametrize(
    ("before", "after", "relfilenode"),
    [
        (ID, replace(ID, type_oid=20, type_name="bigint", xmin=12), 71),
        (NAME, replace(NAME, typmod=24, type_name="character varying(20)", xmin=12), 70),
        (NAME, replace(NAME, type_oid=25, typmod=-1, type_name="text", xmin=12), 70),
        (PRICE, replace(PRICE, typmod=458758, type_name="numeric(7,2)", xmin=12), 70),
        (PRICE, replace(PRICE, typmod=458759, type_name="numeric(7,3)", xmin=12), 71),
    ],
    ids=["a key of integer", "varchar longer", "varchar to text", "numeric precision", "numeric scale"],
)
def test_a_wider_type_is_followed(before: Column, after: Column, relfilenode: int) -> None:
    columns = [after if column is before else column for column in BEFORE.columns]
    relation = now(*columns, relfilenode=relfilenode)
    change = f"the type of column {before.name} changed from {before.type_name} to {after.type_name}"
    assert judged(relation) == DriftResult(DriftKind.SAFE, (change,), relation=relation)
    assert judged(relation, with_policy("error")).reason == change


@pytest.mark.parametrize(
    "after",
    [
        replace(ID, type_oid=21, type_name="smallint"),
        replace(ID, type_oid=25, type_name="text"),
        replace(NAME, typmod=9, type_name="character varying(5)"),
        replace(PRICE, typmod=393224, type_name="numeric(6,4)"),
        replace(PRICE, typmod=-1, type_name="numeric"),
    ],
    ids=[
        "narrower",
        "another type",
        "shorter",
        "numeric with another lake type",
        "numeric without precision",
    ],
)
def test_another_type_is_not_followed(after: Column) -> None:
    columns = [after if column.attnum == after.attnum else column for column in BEFORE.columns]
    assert f"the type of column {after.name} changed" in judged(now(*columns)).reason


def test_numeric_that_is_text_in_the_lake_may_not_read_otherwise() -> None:
    pipeline = replace(PIPELINE, types={"public.goods.price": "string"})
    wider = replace(PRICE, typmod=458758, type_name="numeric(7,2)")
    assert judged(now(ID, NAME, wider), pipeline).kind is DriftKind.SAFE
    assert judged(now(ID, NAME, replace(wider, typmod=458759)), pipeline).kind is DriftKind.UNSAFE


VARCHAR = PgType(1043, 14, "varchar")
EMAIL = replace(
    NAME,
    type_oid=9001,
    typmod=-1,
    type_name="public.email",
    type_kind="d",
    xmin=12,
    type=PgType(9001, name="email", kind="d", parts=(("base", VARCHAR),)),
)


def test_a_domain_and_what_it_is_made_of_replace_each_other() -> None:
    """PostgreSQL keeps the file, so that no expression has changed a value."""
    both = PgType(9002, name="short", kind="d", parts=(("base", EMAIL.pg_type),))
    short = replace(EMAIL, type_oid=9002, type_name="public.short", type=both)
    text = replace(NAME, type_oid=25, typmod=-1, type_name="text", xmin=13)
    over = "(a domain over varchar(10))"
    for before, after, change in (
        (NAME, EMAIL, f"from character varying(10) to public.email {over}"),
        (EMAIL, NAME, f"from public.email {over} to character varying(10)"),
        (EMAIL, short, f"from public.email {over} to public.short {over}"),
        (EMAIL, text, f"from public.email {over} to text"),
    ):
        relation = now(ID, after, PRICE)
        verdict = judged(relation, before=now(ID, before, PRICE))
        assert verdict == DriftResult(
            DriftKind.SAFE, (f"the type of column name changed {change}",), relation=relation
        )


def test_a_domain_whose_values_may_be_others_is_not_followed() -> None:
    shorter = replace(NAME, typmod=9, type_name="character varying(5)", xmin=13)
    reason = judged(now(ID, shorter, PRICE), before=now(ID, EMAIL, PRICE)).reason
    assert reason == (
        "the type of column name changed from public.email (a domain over varchar(10)) to character"
        " varying(5)"
    )
    assert judged(now(ID, EMAIL, PRICE, relfilenode=71)).reason == (
        "the table was rewritten when the type of column name changed from character varying(10) to"
        " public.email (a domain over varchar(10)), as it is for constraints of a domain and for a limit of"
        " its base type; it cannot be determined whether an expression (USING) changed values"
    )
    cents = PgType(9003, name="cents", kind="d", parts=(("base", PgType(1700, 327686, "numeric")),))
    price = replace(PRICE, type_oid=9003, typmod=-1, type_name="public.cents", type_kind="d", type=cents)
    wider = replace(PRICE, typmod=458759, type_name="numeric(7,3)", xmin=13)
    assert judged(now(ID, NAME, wider), before=now(ID, NAME, price)).reason == (
        "the type of column price changed from public.cents (a domain over numeric(5,2)) to numeric(7,3)"
    )


def test_arrays_are_followed_where_every_element_reads_as_before() -> None:
    def array(oid: int, element: int, typmod: int = -1) -> Column:
        part = PgType(element, typmod)
        return Column(
            "l", 2, oid, typmod, "list", type=PgType(oid, typmod, kind="a", parts=(("element", part),))
        )

    def follows(before: Column, after: Column) -> bool:
        return judged(now(ID, after), before=now(ID, before)).kind is DriftKind.SAFE

    assert follows(array(1007, 23), array(1016, 20))
    assert follows(array(1015, 1043, 14), array(1009, 25))
    assert not follows(array(1021, 700), array(1022, 701))
    assert not follows(array(1016, 20), array(1007, 23))


def test_with_ignore_an_added_column_is_left_out_and_the_rest_is_followed() -> None:
    wider = replace(ID, type_oid=20, type_name="bigint", xmin=20)
    relation = now(wider, NAME, PRICE, SINCE, relfilenode=71)
    verdict = judged(relation, with_policy("ignore"))
    assert verdict.relation == replace(relation, ignored=(4,))
    assert verdict.changes[-1] == "column since was added and is left out"
    # A column that the lake does not have may change in any way.
    other = now(wider, NAME, PRICE, replace(SINCE, name="until", type_oid=25, xmin=30), relfilenode=72)
    assert judged(other, before=verdict.relation).relation == replace(other, ignored=(4,))
    gone = now(wider, NAME, PRICE, natts=4, relfilenode=72)
    assert judged(gone, before=verdict.relation).relation == gone


def test_with_error_every_other_column_stops_the_table_and_nothing_else_does() -> None:
    for relation in (now(ID, NAME, PRICE, SINCE), now(ID, NAME)):
        verdict = judged(relation, with_policy("error"))
        assert verdict.kind is DriftKind.UNSAFE
        assert verdict.hint.startswith(
            "set on_drift to evolve for it, restart the replication app, then retry the table: pgrepl retry"
        )
    relation = now(replace(ID, not_null=False), NAME, PRICE, relfilenode=71)
    assert judged(relation, with_policy("error")) == DriftResult(DriftKind.UNCHANGED, relation=relation)


@pytest.mark.parametrize(
    ("relation", "says"),
    [
        (
            now(ID, NAME, PRICE, SINCE, relfilenode=71),
            "column since was added and the table rewritten: what older rows have in it is not known",
        ),
        (
            now(ID, replace(NAME, type_oid=25, typmod=-1, xmin=12), PRICE, relfilenode=71),
            "the table was rewritten and column name altered, which may have changed its values",
        ),
        (
            now(replace(ID, type_oid=20, xmin=12), replace(NAME, xmin=12), PRICE, relfilenode=71),
            "the table was rewritten and column name altered, which may have changed its values",
        ),
        (
            now(ID, NAME, PRICE, replace(SINCE, attnum=5)),
            "column since may have been dropped and added again",
        ),
        (
            replace(BEFORE, publication_xmin=10),
            "the publication was altered: changes of some kind may be missing",
        ),
        (
            now(ID, NAME, PRICE, replace(SINCE, name="Name")),
            'public.goods: the lake cannot tell the columns "name", "Name" apart (rename one, or leave it'
            " out with exclude_columns)",
        ),
    ],
)
def test_possibly_value_changing_ddl_is_not_followed_and_names_reason(relation: Relation, says: str) -> None:
    verdict = judged(relation)
    assert verdict.reason == says
    assert "--tables 'public.goods'" in verdict.hint


def test_a_column_that_came_and_went_unseen_is_harmless_and_remembered() -> None:
    """The rows of a later message may be of that column, when the catalog has moved on: its attnum stays."""
    verdict = judged(now(ID, NAME, PRICE, natts=4))
    assert verdict == DriftResult(DriftKind.UNCHANGED, relation=BEFORE)
    assert verdict.relation is not None
    later = judged(now(ID, NAME, PRICE, replace(SINCE, attnum=5)), before=verdict.relation)
    assert later.kind is DriftKind.UNSAFE


def test_columns_known_to_the_lake_leave_no_gap() -> None:
    unchanged = replace(BEFORE, unpublished=(SINCE,), natts=4)
    relation = replace(unchanged, columns=(*BEFORE.columns, replace(NAME, name="nick", attnum=5)), natts=5)
    assert judged(relation, before=unchanged).relation == relation


def test_using_is_known_where_the_event_trigger_tells() -> None:
    relation = now(replace(ID, type_oid=20, type_name="bigint", xmin=12), NAME, PRICE, relfilenode=71)
    record = replace(RelationRecord.of_catalog(relation), using=True)
    reason = "the type of column id changed from integer to bigint by an expression of its own (USING)"
    assert judge(BEFORE, record, PIPELINE.options(BEFORE.table)).reason == reason


MOOD = PgType(9000, name="mood", kind="e", labels=((1, "sad"), (2, "ok")))


def test_labels_of_enums_may_come_but_not_change() -> None:
    def of(pg_type: PgType) -> Relation:
        return now(ID, Column("mood", 2, 9000, -1, "public.mood", "e", type=pg_type))

    more = of(replace(MOOD, labels=(*MOOD.labels, (3, "happy"))))
    assert judged(more, before=of(MOOD)) == DriftResult(DriftKind.UNCHANGED, relation=more)
    renamed = of(replace(MOOD, labels=((1, "sad"), (2, "fine"))))
    verdict = compare_catalog(of(MOOD), renamed, TableOptions())
    assert verdict.reason == "an enum label of column mood (public.mood) was renamed"
    assert verdict.hint.startswith("set it back at the source, then retry the table")
    assert judged(renamed, before=of(replace(MOOD, labels=()))).kind is DriftKind.UNCHANGED


PART = Partition(71, TableName("public", "goods_1"), 700)
MADE = Partition(72, TableName("public", "goods_2"), 72, xmin=8, links=(8,))


@pytest.mark.parametrize(
    ("partitions", "says"),
    [
        ((PART, MADE), ""),
        (
            (PART, replace(MADE, had_rows=True)),
            "partition public.goods_2 was attached and may have held rows",
        ),
        (
            (PART, replace(MADE, relfilenode=701, xmin=9)),
            "partition public.goods_2 was truncated by itself, or rewritten as VACUUM FULL does",
        ),
        ((PART, replace(MADE, relfilenode=701, xmin=8)), ""),
        ((), "partition public.goods_1 was detached or dropped"),
        (
            (replace(PART, relfilenode=702),),
            "partition public.goods_1 was truncated by itself, or rewritten as VACUUM FULL does",
        ),
    ],
)
def test_rows_that_come_and_go_with_a_partition_are_not_in_the_stream(
    partitions: tuple[Partition, ...], says: str
) -> None:
    before = replace(BEFORE, relkind="p", relfilenode=0, partitions=(PART,))
    verdict = judged(replace(before, partitions=partitions), before=before)
    assert verdict.reason == says


def test_a_wider_type_does_not_explain_all_that_may_have_happened_to_partitions() -> None:
    before = replace(BEFORE, relkind="p", relfilenode=0, partitions=(PART,))
    wider = (replace(ID, type_oid=20, type_name="bigint", xmin=12), NAME, PRICE)
    after = replace(before, columns=wider, partitions=(replace(PART, relfilenode=702),))
    assert judged(after, before=before).reason == (
        "the type of column id became wider, for which all partitions were rewritten: it cannot be"
        " determined whether one of them was also truncated"
    )
    longer = (ID, replace(NAME, typmod=24, type_name="character varying(20)", xmin=12), PRICE)
    assert judged(replace(before, columns=longer), before=before).kind is DriftKind.SAFE


LINKED = replace(PART, links=(5, 6), relkind="r", persistence="p")


@pytest.mark.parametrize(
    ("now", "says"),
    [
        (replace(LINKED, links=(5, 8)), "was detached and attached again: changes between are missing"),
        (replace(LINKED, links=(8, 6)), "was detached and attached again: changes between are missing"),
        (replace(LINKED, links=(5, 6, 6)), "was detached and attached again: changes between are missing"),
        (replace(LINKED, persistence="u"), "partition public.goods_1 is unlogged: its changes are not in"),
        (replace(LINKED, oid=72, persistence="u"), "partition public.goods_1 is unlogged"),
        (replace(LINKED, oid=72, relkind="f"), "partition public.goods_1 is a foreign table"),
    ],
)
def test_a_partition_that_is_another_or_sends_nothing_stops_the_table(now: Partition, says: str) -> None:
    before = replace(BEFORE, relkind="p", relfilenode=0, partitions=(LINKED,))
    assert says in judged(replace(before, partitions=(now,)), before=before).reason


def test_partition_details_missing_from_earlier_record_are_adopted_without_drift() -> None:
    before = replace(BEFORE, relkind="p", relfilenode=0, partitions=(PART,))
    verdict = judged(replace(before, partitions=(LINKED,)), before=before)
    assert (verdict.kind, verdict.relation.partitions) == (DriftKind.UNCHANGED, (LINKED,))


def sent(*columns: Column) -> tuple[WireColumn, ...]:
    return tuple(WireColumn(c.name, c.type_oid, c.typmod, c.is_key) for c in columns)


def read_late(catalog: Relation, *columns: Column) -> RelationRecord:
    record = RelationRecord.of_catalog(catalog)
    return replace(record, message=replace(record.message, columns=sent(*columns)))


def test_catalog_change_not_yet_in_stream_is_deferred() -> None:
    wider = replace(ID, type_oid=20, type_name="bigint", xmin=20)
    catalog = now(wider, NAME, replace(PRICE, xmin=20), replace(SINCE, missing="x"))
    verdict = judge(BEFORE, read_late(catalog, ID, NAME, PRICE), PIPELINE.options(BEFORE.table))
    seen = replace(BEFORE, columns=(ID, NAME, replace(PRICE, xmin=20)))
    assert verdict == DriftResult(DriftKind.UNCHANGED, relation=seen)


def test_partially_streamed_ddl_is_followed_step_by_step() -> None:
    wider = replace(ID, type_oid=20, type_name="bigint", xmin=20)
    catalog = now(wider, PRICE, SINCE, relfilenode=71)
    verdict = judge(BEFORE, read_late(now(wider, PRICE), wider, NAME, PRICE), TableOptions())
    assert verdict.relation is not None
    assert verdict.relation.columns == (wider, NAME, PRICE)
    last = judge(
        verdict.relation, RelationRecord.of_catalog(replace(catalog, relfilenode=70)), TableOptions()
    )
    assert last.kind is DriftKind.SAFE
    assert last.changes == ("column name was dropped", "column since was added")


def test_ambiguous_column_history_is_unsafe() -> None:
    """`name` dropped and `nick` added later, or before, as `name`, and renamed since."""
    catalog = now(ID, PRICE, replace(NAME, name="nick", attnum=4))
    verdict = judge(BEFORE, read_late(catalog, ID, PRICE, NAME), PIPELINE.options(BEFORE.table))
    assert verdict.kind is DriftKind.UNSAFE
    before = now(ID, NAME)
    late = read_late(now(ID, replace(NAME, name="nick", attnum=4)), ID, NAME)
    assert (
        "it cannot be determined which of them name was then"
        in judge(before, late, PIPELINE.options(before.table)).reason
    )


def test_choices_that_name_a_dropped_column_stand() -> None:
    pipeline = replace(PIPELINE, types={"public.goods.price": "string"})
    verdict = judged(now(ID, NAME), pipeline)
    assert verdict.kind is DriftKind.SAFE
    history = replace(PIPELINE, history=True)
    column = replace(SINCE, name="_pgrepl_from_lsn")
    assert "has a name that history uses itself" in judged(now(ID, NAME, PRICE, column), history).reason


def test_a_way_back_is_offered_only_while_no_row_was_sent() -> None:
    renamed = now(ID, replace(NAME, name="nick"), PRICE)
    assert (
        "set it back at the source" in compare_catalog(BEFORE, renamed, PIPELINE.options(BEFORE.table)).hint
    )
    assert judged(renamed).hint.startswith("resnapshot it")


def test_a_renamed_table_is_taken_under_its_new_name() -> None:
    moved = replace(BEFORE, table=TableName("sales", "Orders"), replica_identity="f")
    added = (
        'change public.goods to sales."Orders" in every setting of the pipeline file that names it or a'
        " column of it (exclude_columns, per_table and so on), remove public.goods from the pipeline,"
        """ then add sales."Orders": pgrepl snapshot FILE.json --add"""
        """ 'sales."Orders"', or PgAddTablesOperator; but if the two swapped names, """
    ) + errors.swapped(BEFORE.table, moved.table)
    verdict = compare_catalog(BEFORE, moved, PIPELINE.options(BEFORE.table))
    follow = (
        "to keep its name in the pipeline, set on_rename to follow for it, restart the replication app, and"
        f" {errors.resnapshot(BEFORE.table)}"
    )
    assert verdict.hint == f"name it back, then {errors.retry(BEFORE.table)}; or, {follow}; or {added}"
    assert judged(moved).hint == f"{follow}; or {added}"


def test_a_renamed_table_is_followed_by_choice() -> None:
    follow = replace(PIPELINE, on_rename="follow")
    moved = replace(BEFORE, table=TableName("sales", "goods"))
    sent = moved.followed_as(BEFORE.table)
    verdict = judged(sent, follow)
    assert (verdict.kind, verdict.changes) == (
        DriftKind.SAFE,
        ("the table was renamed or moved to sales.goods",),
    )
    assert verdict.relation == replace(BEFORE, renamed_to=moved.table)
    assert schema_changes(BEFORE, verdict.relation) == {"table_renamed": ["public.goods", "sales.goods"]}
    again = judged(sent, follow, verdict.relation)
    assert again == DriftResult(DriftKind.UNCHANGED, relation=verdict.relation)
    assert judged(BEFORE, follow, verdict.relation).relation == BEFORE
    options = follow.options(BEFORE.table)
    assert compare_catalog(BEFORE, sent, options).kind is DriftKind.SAFE
    # Catalog and stream show the new name if another table has the old one, or if nothing is followed.
    assert compare_catalog(BEFORE, moved, options).kind is DriftKind.UNSAFE
    assert judged(moved, follow).kind is DriftKind.UNSAFE
    assert judged(moved, PIPELINE, verdict.relation).kind is DriftKind.UNSAFE
    assert "on_rename" not in judged(moved, follow).hint
    assert errors.swapped(BEFORE.table, moved.table) in judged(moved, follow).hint


def test_name_that_the_stream_has_not_sent_yet_is_not_recorded() -> None:
    moved = replace(BEFORE, table=TableName("sales", "goods"))
    received = RelationRecord(RelationRecord.of_catalog(BEFORE).message, moved)
    verdict = judge(BEFORE, received, PIPELINE.options(BEFORE.table))
    assert verdict == DriftResult(DriftKind.UNCHANGED, relation=BEFORE)


def test_name_at_source_is_recorded_and_versions_of_other_relations_stay() -> None:
    moved = replace(BEFORE, renamed_to=TableName("sales", "goods"))
    assert Relation.from_json(moved.to_json()) == moved
    assert moved.version != BEFORE.version
    assert "renamed_to" not in BEFORE.to_json()
    assert moved.followed_as(moved.renamed_to) == replace(BEFORE, table=TableName("sales", "goods"))


def test_a_verdict_survives_pickling() -> None:
    verdict = judged(now(ID, PRICE))
    assert pickle.loads(pickle.dumps(verdict)) == verdict
