"""Pause, resume and retry of single tables, against a real server, changelog and lake, without Spark."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from airflow_provider_pgrepl.errors import (
    ChangelogError,
    ConfigError,
    DriftError,
    LakeTableError,
    PrivilegeError,
    PublicationError,
    Remedy,
    StateError,
)
from airflow_provider_pgrepl.replication.app import snapshot, snapshot_tables
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.operations.removal import remove_tables
from airflow_provider_pgrepl.replication.app.operations.tables import (
    pause_tables,
    resume_tables,
    retry_tables,
)
from airflow_provider_pgrepl.replication.app.snapshot import begin_new_epoch, take_tables
from airflow_provider_pgrepl.replication.app.snapshot_tables import TableSnapshotter
from airflow_provider_pgrepl.replication.app.source_ownership import SourceOwnership
from airflow_provider_pgrepl.replication.changelog.layout import floor_app
from airflow_provider_pgrepl.replication.changelog.writer import ChangelogWriter
from airflow_provider_pgrepl.replication.lake.snapshot.table_queue import CopyResult
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.copy.snapshot_holder import SnapshotHolder
from airflow_provider_pgrepl.replication.source.publication import read_publication
from airflow_provider_pgrepl.replication.state.tables import TableState
from tests.support.kept import Kept
from tests.support.replicated import execute

pytestmark = pytest.mark.slow

A, B = "public.a", "public.b"


@pytest.fixture
def kept(dsn, tmp_path):
    execute(
        dsn,
        "create table a (id int primary key, t text)",
        "create table b (id int primary key, at timestamptz)",
        "insert into a values (1, 'one')",
        "insert into b values (1, now())",
    )
    found = Kept(dsn, tmp_path, ("public.*",))
    found.take(A, B)
    return found


def marks(kept: Kept) -> int:
    return DeltaTable(kept.changelog).version()


def test_a_paused_table_goes_on_when_it_is_resumed_and_the_app_is_woken(kept):
    pause_tables(kept.access, [A])
    pause_tables(kept.access, [A, B])
    assert kept.states() == {A: "paused", B: "paused"}
    before = marks(kept)
    resume_tables(kept.access, [A])
    assert kept.states() == {A: "catching_up", B: "paused"}
    resume_tables(kept.access, [A, B])
    assert kept.states() == {A: "catching_up", B: "catching_up"}
    assert marks(kept) == before + 2


@pytest.mark.parametrize("operation", [pause_tables, resume_tables, retry_tables])
@pytest.mark.thorough("the same test, of other operations", "pause_tables")
def test_all_unknown_tables_are_listed_and_none_is_changed(kept, operation):
    kept.fail(A)
    before = kept.states()
    with pytest.raises(ConfigError, match=r'public.nope, "Odd".x') as caught:
        operation(kept.access, [A, "public.nope", '"Odd".x'])
    assert "its tables: public.a, public.b" in caught.value.hint
    with pytest.raises(ConfigError) as caught:
        operation(kept.access, ["public.aa"])
    assert caught.value.hint == "did you mean public.a? its tables: public.a, public.b"
    with pytest.raises(ConfigError, match="not a schema-qualified"):
        operation(kept.access, ["orders"])
    with pytest.raises(ConfigError, match="no table was named"):
        operation(kept.access, [])
    assert kept.states() == before


def test_one_table_that_cannot_be_paused_keeps_all_as_they_are(kept):
    kept.fail(B)
    with pytest.raises(StateError, match=r"public.b: is errored, and cannot be paused") as caught:
        pause_tables(kept.access, [A, B])
    assert caught.value.hint.startswith("retry the table: pgrepl retry FILE.json 'public.b', or ")
    with pytest.raises(StateError, match=r"public.b: is errored, and cannot be resumed"):
        resume_tables(kept.access, [A, B])
    assert kept.states() == {A: "streaming", B: "errored"}


def test_a_pipeline_that_is_not_recorded_is_said(kept):
    stranger = replace(kept.access, pipeline=replace(kept.pipeline, name="other", lake="/nowhere"))
    for operation in (pause_tables, resume_tables, retry_tables):
        with pytest.raises(StateError, match="other is not recorded"):
            operation(stranger, [A])
    with pytest.raises(StateError, match="other is not recorded"):
        retry_tables(stranger)


def test_a_table_that_is_tried_again_goes_on_without_a_new_copy(kept):
    execute(kept.dsn, "insert into a values (2, 'two')")
    kept.fail(A)
    (retried,) = retry_tables(kept.access, [A])
    assert (str(retried.table), retried.refused) == (A, None)
    record = kept.record(A)
    assert (record.state, record.error, record.reason, record.hint) == (TableState.CATCHING_UP, "", "", "")
    copied = DeltaTable(kept.lake_path(A)).history()[-1]
    assert kept.bring_forward(A).error is None
    kept.assert_equal(A)
    assert DeltaTable(kept.lake_path(A)).history()[-1] == copied
    assert retry_tables(kept.access, [A]) == ()


@pytest.mark.thorough("test_one_table_that_cannot_be_paused_keeps_all_as_they_are")
def test_tables_that_are_not_in_error_are_not_tried_again(kept):
    pause_tables(kept.access, [B])
    with pytest.raises(StateError, match=r"public.b: is paused, and cannot be retried") as caught:
        retry_tables(kept.access, [A, B])
    resume = f"pgrepl resume FILE.json '{B}'"
    assert caught.value.hint == f"resume the table: {resume}, or PgResumeTablesOperator"
    assert retry_tables(kept.access) == ()
    assert kept.states() == {A: "streaming", B: "paused"}


def test_without_names_each_table_goes_its_own_way(kept):
    kept.fail(A)
    kept.fail(B, "DriftError")
    execute(kept.dsn, "alter table b alter at type text")
    found = {str(one.table): one.refused for one in retry_tables(kept.access)}
    assert found[A] is None
    assert isinstance(found[B], DriftError)
    assert "public.b: the type of column at changed" in found[B].message
    assert kept.states() == {A: "catching_up", B: "errored"}
    assert kept.record(B).reason == "it failed"


def test_a_renamed_column_is_told_to_be_set_back_only_where_that_helps(kept):
    execute(kept.dsn, "alter table b rename column at to since")
    for known, hint in (
        (Remedy.UNDO, "set it back at the source, then retry the table"),
        (Remedy.RESNAPSHOT, "resnapshot it"),
    ):
        kept.fail(B, "DriftError", hint, known)
        with pytest.raises(DriftError, match="column at was renamed to since") as caught:
            retry_tables(kept.access, [B])
        assert caught.value.remedy is known
        assert caught.value.hint.startswith(hint)
        kept.set_states(B, TableState.CATCHING_UP)


def test_the_words_of_a_hint_decide_nothing(kept):
    misleading = "say nothing; never then retry the table"
    kept.fail(A, "DriftError", misleading, Remedy.RESNAPSHOT)
    with pytest.raises(DriftError) as caught:
        retry_tables(kept.access, [A])
    assert (caught.value.hint, caught.value.remedy) == (misleading, Remedy.RESNAPSHOT)
    kept.fail(B, "DriftError", "anything else", Remedy.POLICY)
    retry_tables(kept.access, [B])
    record = kept.record(B)
    assert (record.state, record.remedy) == (TableState.CATCHING_UP, None)


def test_a_table_that_was_sent_what_it_cannot_follow_is_not_tried_again_in_vain(kept):
    """The changelog still has what the stream sent, though the source was restored to an earlier state."""
    kept.fail(A, "DriftError", "resnapshot it: pgrepl snapshot FILE.json", Remedy.RESNAPSHOT)
    with pytest.raises(DriftError, match=r"public.a: it failed") as caught:
        retry_tables(kept.access, [A])
    assert caught.value.hint == "resnapshot it: pgrepl snapshot FILE.json"
    assert kept.states()[A] == "errored"


def test_named_tables_are_tried_again_all_or_none(kept):
    kept.fail(A)
    kept.fail(B)
    execute(kept.dsn, "drop table b")
    with pytest.raises(DriftError, match=r"public.b: the table was dropped"):
        retry_tables(kept.access, [A, B])
    assert kept.states() == {A: "errored", B: "errored"}


def test_a_table_without_a_copy_must_be_taken_anew(kept):
    execute(kept.dsn, "create table c (id int primary key)")
    kept.set_states("public.c", TableState.PENDING)
    kept.fail("public.c")
    with pytest.raises(LakeTableError, match=r"public.c: was never copied") as caught:
        retry_tables(kept.access, ["public.c"])
    assert "--tables 'public.c'" in caught.value.hint


def test_a_lake_table_that_is_gone_or_not_of_this_epoch_must_be_taken_anew(kept, tmp_path):
    kept.fail(A)
    place = tmp_path / "lake" / "public" / "a"
    place.rename(tmp_path / "away")
    with pytest.raises(LakeTableError, match="there is no lake table"):
        retry_tables(kept.access, [A])
    write_deltalake(place, pa.table({"id": [1], "t": ["one"]}))
    with pytest.raises(LakeTableError, match="was not made in this epoch"):
        retry_tables(kept.access, [A])
    assert kept.states()[A] == "errored"


def raise_floor(kept: Kept, floor: LSN) -> None:
    table = DeltaTable(kept.changelog)
    table.create_write_transaction(
        [],
        "append",
        table.schema(),
        partition_by=["received_hour"],
        commit_properties=CommitProperties(app_transactions=[Transaction(floor_app(1), floor)]),
    )


def test_changes_that_are_no_longer_kept_are_missed_unless_a_point_shows_that_there_were_none(kept):
    kept.fail(A)
    kept.fail(B)
    lsn = kept.source_lsn()
    raise_floor(kept, lsn)
    execute(kept.dsn, "create table elsewhere ()")
    ChangelogWriter(kept.changelog).record_keepalive(LSN(lsn + 2))
    kept.write_point(LSN(lsn + 1), B)
    found = {str(one.table): one.refused for one in retry_tables(kept.access)}
    assert isinstance(found[A], ChangelogError)
    assert f"but the changelog holds changes above {lsn} only" in found[A].message
    assert "--tables 'public.a'" in found[A].hint
    assert found[B] is None


def test_a_table_that_was_out_of_the_publication_has_a_gap(kept):
    kept.fail(A)
    name = kept.pipeline.publication
    execute(kept.dsn, f"alter publication {name} drop table a", f"alter publication {name} add table a")
    with pytest.raises(DriftError, match=r"public.a: .*publication"):
        retry_tables(kept.access, [A])
    execute(kept.dsn, f"drop publication {name}")
    with pytest.raises(PublicationError, match="no longer exists"):
        retry_tables(kept.access, [A])


def test_a_table_that_may_not_be_read_stays_in_error_until_it_may(pg, kept):
    execute(kept.dsn, f"create role {kept.pipeline.name} login", "revoke all on a from public")
    try:
        poor = kept.dsn.replace("user=postgres", f"user={kept.pipeline.name}")
        access = Access(kept.pipeline, poor, kept.dsn)
        kept.fail(A, "PrivilegeError")
        with pytest.raises(PrivilegeError, match=r"lacks SELECT on public.a") as caught:
            retry_tables(access, [A])
        assert "GRANT SELECT ON public.a" in caught.value.hint
        execute(kept.dsn, f"grant select on a to {kept.pipeline.name}")
        retry_tables(access, [A])
        assert kept.states()[A] == "catching_up"
    finally:
        execute(kept.dsn, f"drop owned by {kept.pipeline.name}", f"drop role {kept.pipeline.name}")


def test_a_value_that_did_not_fit_does_under_another_choice_without_a_new_copy(kept):
    execute(kept.dsn, "insert into b values (2, 'infinity')")
    failed = kept.bring_forward(B)
    assert failed.error_kind == "ValueRangeError"
    kept.fail(B)
    kept.configure(infinity="null")
    retry_tables(kept.access, [B])
    config = kept.record(B).config
    assert config is not None
    assert Pipeline.from_json(config).infinity == "null"
    assert kept.bring_forward(B).error is None
    assert sorted(pair["id"] for pair in pa.table(kept.lake_rows(B)).to_pylist()) == [1, 2]


@pytest.mark.parametrize(
    "options",
    [
        {"types": {"public.b.at": "string"}},
        {"per_table": {B: {"deletes": "soft"}}},
        {"per_table": {B: {"partition_by": "id"}}},
        {"history": True},
    ],
)
@pytest.mark.thorough("the same test, with history", "options0", "options1", "options2")
def test_choices_that_want_another_lake_table_do_not_hold_before_a_new_copy(kept, options):
    kept.fail(B)
    before = kept.record(B).config
    kept.configure(**options)
    retry_tables(kept.access, [B])
    assert (kept.states()[B], kept.record(B).config) == ("catching_up", before)


def test_no_table_goes_on_without_its_lake_table_by_being_tried_again(kept):
    kept.fail(A)
    without = replace(kept.pipeline, lake_tables="none")
    for tables in ([A], None):
        with pytest.raises(ConfigError, match="which would not be kept"):
            retry_tables(Access(without, kept.dsn, kept.dsn), tables)
    assert kept.states()[A] == "errored"


def test_retry_accepts_safe_drift_only_with_on_drift_evolve(kept):
    kept.configure(on_drift="error")
    kept.fail(A, "DriftError")
    execute(kept.dsn, "alter table a add note text")
    with pytest.raises(DriftError, match=r"public.a: .*note was added"):
        retry_tables(kept.access, [A])
    kept.configure(on_drift="evolve")
    retry_tables(kept.access, [A])
    assert kept.states()[A] == "catching_up"


def removing(kept: Kept, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
    """Let `pgrepl remove` of A come and end right before the first call of a function."""
    original, removals = getattr(owner, name), iter([A])

    def call(*arguments: object, **options: object) -> object:
        for table in removals:
            remove_tables(kept.access, [table])
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, call)


def published(kept: Kept) -> set[str]:
    with kept.source() as source:
        found = read_publication(source, kept.pipeline.publication)
    assert found is not None
    return {str(table) for table in found.tables}


def test_a_running_snapshot_leaves_out_a_table_that_is_removed_meanwhile(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.fail(A)
    removing(kept, monkeypatch, snapshot, "_prepare_executors")
    outcome = take_tables(kept.access)
    assert (outcome.copied, outcome.failed) == ((), {})
    assert kept.states() == {A: "removed", B: "streaming"}
    assert kept.record(A).membership == "removed"
    assert published(kept) == {B}


@pytest.mark.parametrize("moment", ["drop_slot", "create_slot", "keep"])
def test_a_new_epoch_leaves_out_a_table_that_is_removed_while_it_begins(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    owners = {"drop_slot": SourceOwnership, "create_slot": snapshot_tables, "keep": TableSnapshotter}
    removing(kept, monkeypatch, owners[moment], moment)
    taken: list[str] = []

    def copied(_: TableSnapshotter, keeper: SnapshotHolder, *__: object, **___: object) -> CopyResult:
        taken.extend(str(relation.table) for relation in keeper.relations)
        return CopyResult({relation.table: 0 for relation in keeper.relations})

    monkeypatch.setattr(TableSnapshotter, "_copy_rows", copied)
    begin_new_epoch(kept.access, [kept.pipeline.lake_root])
    assert taken == [B]
    assert kept.record(A).membership == "removed"
    assert kept.states()[A] == "removed"
    assert published(kept) == {B}


def test_a_new_epoch_of_new_tables_that_are_ignored_changes_nothing(kept: Kept) -> None:
    execute(kept.dsn, "create schema other", "create table other.t (id int primary key)")
    kept.configure(tables=("other.*",), new_tables="ignore")
    slot, states = kept.slot(), kept.states()
    with pytest.raises(ConfigError, match="no table is left to copy"):
        begin_new_epoch(kept.access)
    assert (kept.slot(), kept.states(), published(kept)) == (slot, states, {A, B})
