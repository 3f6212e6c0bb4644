"""check_drift: DDL that no row has followed, found in the catalog."""

import json
import uuid
from dataclasses import replace

import psycopg2.extensions
import pytest

from airflow_provider_pgrepl.errors import PublicationError, SourceConnectionError, StateError
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.drift_check import check
from airflow_provider_pgrepl.replication.app.drift_check.check import check_drift
from airflow_provider_pgrepl.replication.app.drift_check.report import DriftReport
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog.relations import read_relations
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableState
from tests.support.recorded import Recorded


@pytest.fixture
def shop(dsn, run):
    run(
        "create table a (id int primary key, x int, note varchar(10))",
        "create table b (id int primary key, x int)",
        "create table c (id int primary key, x int) partition by range (id)",
        "create table c1 partition of c for values from (0) to (10)",
    )
    return Recorded(dsn)


def kinds(report):
    return {table.table: (table.kind, table.marked_errored) for table in report.tables}


def test_check_drift_lists_no_table_without_drift(shop):
    report = check_drift(shop.access)
    assert (report.checked, report.tables, report.found_anything) == (3, (), False)
    assert shop.record("public.a").state is TableState.STREAMING


@pytest.mark.parametrize(
    ("ddl", "says"),
    [
        ("alter table a rename column x to y", "x"),
        ("alter table a alter x type text", "x"),
        ("alter table a rename to z", "z"),
        ("alter table a drop column id", "the key changed: column id was dropped"),
        ("drop table a", "dropped"),
        ("drop table a; create table a (id int primary key, x int, note varchar(10))", "another"),
        ("alter table a replica identity full", "replica identity"),
        ("alter publication pgrepl_shop drop table a", "publication"),
    ],
)
@pytest.mark.thorough(
    "the same test, of a column that is renamed; unit/test_drift: each change",
    "alter table a alter x type text-x",
    "alter table a rename to z-z",
    "alter table a drop column id-the key changed: column id was dropped",
    "drop table a; create table a (id int primary key, x int, note varchar(10))-another",
    "alter table a replica identity full-replica identity",
)
def test_a_table_that_cannot_go_on_is_marked_errored_and_the_others_go_on(shop, run, ddl, says):
    run(ddl)
    report = check_drift(shop.access)
    assert kinds(report) == {"public.a": ("unsafe", True)}
    record = shop.record("public.a")
    assert (record.state, record.error) == (TableState.ERRORED, "DriftError")
    assert says in record.reason
    assert record.hint
    assert record.lsn is not None
    assert shop.record("public.b").state is TableState.STREAMING


def test_an_enum_that_was_replaced_stops_the_table_whichever_expression_cast_its_values(dsn, run):
    """The catalog is the same after a cast by way of text and after an expression that changes values."""
    by_text, by_case = "m::text::mood", "case m when 'sad' then 'ok'::mood else 'sad' end"
    run(
        "create type mood as enum ('sad', 'ok')",
        *(f"create table {name} (id int primary key, m mood)" for name in "ab"),
        *(f"insert into {name} values (1, 'sad')" for name in "ab"),
    )
    shop = Recorded(dsn)
    run(
        "alter type mood rename to mood_old",
        "create type mood as enum ('sad', 'ok', 'happy')",
        f"alter table a alter m type mood using {by_text}",
        f"alter table b alter m type mood using {by_case}",
        "drop type mood_old",
    )
    assert run("select a.m, b.m from a, b") == [("sad", "ok")]
    of_a, of_b = check_drift(shop.access).tables
    assert of_a.kind == of_b.kind == "unsafe"
    assert of_a.reason == of_b.reason
    another, rewritten = of_a.reason.rsplit("; ", 1)
    assert another.startswith("another type took the name public.mood, that of the type of column m: its oid")
    assert another.endswith("; labels added: 'happy'")
    assert rewritten.startswith("the table was rewritten and column m altered")
    assert "resnapshot it: pgrepl snapshot FILE.json --tables 'public.a'" in of_a.hint


def test_children_by_inheritance_that_the_pipeline_lacks_are_named_and_stop_nothing(shop, run):
    run(
        "create schema _timescaledb_internal",
        "create table child (id int primary key) inherits (a)",
        "create table _timescaledb_internal.chunk (id int primary key) inherits (b)",
    )
    report = check_drift(shop.access)
    assert not report.is_unsafe
    plain, hypertable = report.warnings
    assert plain.startswith(
        "public.a: 1 of the tables that inherit from it is not in the pipeline (public.child)"
    )
    assert "hypertable of TimescaleDB: its rows are in 1 chunks" in hypertable
    assert plain in report.to_text()


def test_told_to_look_only_it_changes_nothing(shop, run):
    run("drop table a")
    report = check_drift(shop.access, mark_errored=False)
    assert kinds(report) == {"public.a": ("unsafe", False)}
    assert shop.record("public.a").state is TableState.STREAMING


def test_paused_tables_are_looked_at_and_those_not_in_the_lake_are_not(shop, run):
    shop.set_state("public.a", TableState.PAUSED)
    shop.set_state("public.b", TableState.REMOVED)
    run("drop table a", "drop table b")
    assert kinds(check_drift(shop.access)) == {"public.a": ("unsafe", True)}


def test_a_table_in_error_for_drift_is_said_again_whoever_found_it_first(shop, run):
    run("alter table a rename column x to y")
    first, second = check_drift(shop.access), check_drift(shop.access)
    assert first.is_unsafe
    assert second.is_unsafe
    assert kinds(second) == {"public.a": ("unsafe", False)}
    assert "errored already" in second.to_text()
    run("alter table a rename column y to x")
    (third,) = check_drift(shop.access).tables
    assert "retry" in third.hint


def test_check_drift_keeps_recorded_reason_and_hint_when_catalog_matches(shop):
    shop.set_state(
        "public.a",
        TableState.ERRORED,
        error="DriftError",
        reason="column x was renamed to y",
        hint="resnapshot it",
    )
    (found,) = check_drift(shop.access).tables
    assert (found.reason, found.hint) == ("column x was renamed to y", "resnapshot it")


def test_a_table_in_error_for_another_reason_is_not_drift(shop):
    shop.set_state("public.a", TableState.ERRORED, error="ValueRangeError", reason="too large")
    assert not check_drift(shop.access).found_anything


def test_a_table_taken_anew_while_the_check_ran_is_left_alone(shop, run, monkeypatch):
    from airflow_provider_pgrepl.replication.app.drift_check import check as drift

    found = drift.find_drift

    def and_meanwhile_retaken(*arguments):
        findings = found(*arguments)
        shop.set_state("public.a", TableState.SNAPSHOTTING)
        return findings

    monkeypatch.setattr(drift, "find_drift", and_meanwhile_retaken)
    run("drop table a")
    assert not check_drift(shop.access).found_anything
    assert shop.record("public.a").state is TableState.SNAPSHOTTING


@pytest.fixture
def role(pg, run, dsn, shop):
    """The shop as a role sees it that owns nothing; and the role's name."""
    name = f"r_{uuid.uuid4().hex[:10]}"
    database = psycopg2.extensions.parse_dsn(dsn)["dbname"]
    run(
        f"create role {name} login replication",
        f"grant create on database {database} to {name}",
        f"grant select on a, b, c, c1 to {name}",
        f"grant all on schema _pgrepl to {name}",
        f"grant all on all tables in schema _pgrepl to {name}",
    )
    yield name
    run(f"drop owned by {name}", f"drop role {name}")


def access_of(shop, role):
    dsn = psycopg2.extensions.make_dsn(shop.access.dsn, user=role)
    return Access(shop.pipeline, dsn, shop.access.state_dsn)


@pytest.mark.parametrize(
    ("take", "give", "says", "wanted"),
    [
        ("revoke select on a from {}", "grant select on a to {}", "lacks SELECT on public.a", "GRANT SELECT"),
        ("alter table a enable row level security", "alter table a disable row level security", "row-", ""),
    ],
)
@pytest.mark.thorough(
    "the same test, of SELECT",
    "alter table a enable row level security-alter table a disable row level security-row--",
)
def test_a_right_that_was_lost_stops_its_table_alone_until_it_is_back(
    shop, role, run, take, give, says, wanted
):
    access = access_of(shop, role)
    assert not check_drift(access).found_anything
    run(take.format(role))
    assert kinds(check_drift(access)) == {"public.a": ("unsafe", True)}
    record = shop.record("public.a")
    assert (record.state, record.error) == (TableState.ERRORED, "PrivilegeError")
    assert says in record.reason
    assert wanted in record.hint
    assert "retry" in record.hint
    run(give.format(role))
    (after,) = check_drift(access).tables
    assert "cause is gone" in after.hint


def test_partition_that_came_since_and_may_not_be_read_stops_its_table(shop, role, run):
    run("create table c2 partition of c for values from (10) to (20)")
    assert kinds(check_drift(access_of(shop, role))) == {"public.c": ("unsafe", True)}
    assert "lacks SELECT on public.c2" in shop.record("public.c").reason


@pytest.mark.thorough("test_a_right_that_was_lost_stops_its_table_alone_until_it_is_back")
def test_a_schema_that_is_closed_stops_its_tables(shop, role, run):
    run("revoke usage on schema public from public")
    report = check_drift(access_of(shop, role))
    assert len(report.unsafe) == 3
    assert "USAGE on schema public" in report.to_text()


@pytest.mark.parametrize("remake", ["", "create publication pgrepl_shop for table a, b, c"])
@pytest.mark.thorough(
    "the same test, of one that is gone", "create publication pgrepl_shop for table a, b, c"
)
def test_a_publication_gone_or_made_anew_is_the_pipelines_error(shop, run, remake):
    run("drop publication pgrepl_shop", *filter(None, [remake]))
    with pytest.raises(PublicationError, match="pgrepl_shop"):
        check_drift(shop.access)
    assert shop.record("public.a").state is TableState.STREAMING


def test_a_pipeline_that_is_not_set_up_is_said(dsn):
    nobody = Pipeline(name="nobody", lake="/nowhere", tables=("public.*",))
    with pytest.raises(StateError, match="nobody"):
        check_drift(Access(nobody, dsn, dsn))


def test_a_source_that_does_not_answer_may_be_asked_again(shop):
    dead = psycopg2.extensions.make_dsn(shop.access.dsn, port=1)
    with pytest.raises(SourceConnectionError):
        check_drift(replace(shop.access, dsn=dead))


def test_a_report_survives_json_and_reads_well(shop, run):
    run("alter table b rename column x to y")
    report = check_drift(shop.access)
    assert DriftReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    text = report.to_text()
    assert "pipeline shop: 3 tables checked, 1 drifted, 1 of them unsafely" in text
    assert "public.b: unsafe, now errored: " in text
    assert "hint: " in text


@pytest.mark.parametrize(
    ("policy", "listed", "unsafe"), [("add", 1, False), ("error", 1, True), ("ignore", 0, False)]
)
@pytest.mark.thorough("the same test, of the policy error", "add-1-False", "ignore-0-False")
def test_tables_that_a_pattern_matches_since_are_reported_by_policy(dsn, run, policy, listed, unsafe):
    run("create table a (id int primary key)")
    shop = Recorded(dsn, new_tables=policy)
    run("create table fresh (id int primary key)", "create table keyless (x int)")
    report = check_drift(shop.access)
    assert report.new_tables == ("public.fresh",) * listed
    assert report.is_unsafe is unsafe
    assert ("new: public.fresh" in report.to_text()) is bool(listed)


@pytest.mark.parametrize(("row", "kind"), [("", "safe"), ("; insert into p2 values (15)", "unsafe")])
@pytest.mark.thorough("the same test, with rows; test_attached_partitions: without", "-safe")
def test_a_partition_that_held_rows_when_it_was_attached_stops_the_table(dsn, run, row, kind):
    run(
        "create table p (id int primary key) partition by range (id)",
        "create table p1 partition of p for values from (0) to (10)",
    )
    shop = Recorded(dsn)
    run(
        f"create table p2 (id int primary key){row}",
        "alter table p attach partition p2 for values from (10) to (20)",
    )
    assert kinds(check_drift(shop.access)).get("public.p", ("safe",))[0] == kind


@pytest.fixture
def halves(dsn, run):
    run(
        "create table p (id int primary key) partition by range (id)",
        "create table p1 partition of p for values from (0) to (10)",
        "create table p2 partition of p for values from (10) to (20)",
    )
    return Recorded(dsn)


def test_a_partition_that_was_truncated_by_itself_stops_the_table(halves, run):
    run("truncate p1")
    report = check_drift(halves.access)
    assert kinds(report) == {"public.p": ("unsafe", True)}
    assert "public.p1 was truncated by itself" in report.to_text()


def test_a_truncated_table_of_which_the_stream_has_not_told_is_left_alone(halves, run):
    run("truncate p")
    assert kinds(check_drift(halves.access)) == {"public.p": ("safe", False)}


def test_a_truncate_is_awaited_until_it_is_applied(halves):
    """Not only until it is durable in the changelog."""
    with halves.access.state_db("test") as state_db:
        state_db.write_progress("shop", received_lsn=LSN(200), durable_lsn=LSN(200), applied_lsn=LSN(99))
        assert not check.wait_until_applied(state_db, "shop", LSN(100), timeout_s=0.2)
        state_db.write_progress("shop", applied_lsn=LSN(100))
        assert check.wait_until_applied(state_db, "shop", LSN(100))


@pytest.mark.parametrize("again", ["", "truncate p"])
def test_tables_that_change_while_a_truncate_is_awaited_are_left_alone(halves, run, monkeypatch, again):
    """The stream's DDL is applied meanwhile: the records are then newer than the catalog that was read."""
    run("truncate p")

    def applied(state_db: StateDatabase, *_: object) -> bool:
        run("create table p3 partition of p for values from (20) to (30)", "alter table p add x int")
        with halves.access.source("test") as source:
            found = read_relations(source, [halves.record("public.p").relation.oid], "pgrepl_shop")
        (relation,) = found.values()
        xids = {xid for _, xid in relation.files.values()}
        state_db.record_relation("shop", replace(relation, truncated_by=max(xids)), LSN(1))
        run(*filter(None, [again]))
        return True

    monkeypatch.setattr(check, "wait_until_applied", applied)
    report = check_drift(halves.access)
    assert kinds(report) == ({"public.p": ("safe", False)} if again else {})
    assert halves.record("public.p").state is TableState.STREAMING


def test_nor_is_one_whose_partitions_came_since(dsn, run):
    run("create table p (id int primary key) partition by range (id)")
    bare = Recorded(dsn)
    run("create table p1 partition of p for values from (0) to (10)", "truncate p")
    assert kinds(check_drift(bare.access)) == {"public.p": ("safe", False)}
    run("truncate p1")
    run("create table p2 partition of p for values from (10) to (20)")
    assert kinds(check_drift(bare.access)) == {"public.p": ("unsafe", True)}


def test_check_drift_reports_safe_change_and_table_stays_streaming(shop, run):
    run("alter table a add extra text")
    report = check_drift(shop.access)
    assert kinds(report) == {"public.a": ("safe", False)}
    assert not report.is_unsafe
    assert report.found_anything
    assert shop.record("public.a").state is TableState.STREAMING
    assert "public.a: safe: " in report.to_text()
