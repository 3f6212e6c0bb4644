"""ownership.py: what a connection, a lake and a record say of each other decides, and no name or path."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import ConfigError, LakeError, PgReplError, RewoundError, StateError
from airflow_provider_pgrepl.replication.app.ownership import (
    Answer,
    Evidence,
    check_acceptable,
    check_lake_may_be_lost,
    check_new_epoch,
    check_ours,
    check_teardown,
    compare,
)
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.server import Server, known_source
from airflow_provider_pgrepl.replication.source.slot import Slot
from airflow_provider_pgrepl.replication.state.database import PipelineRecord
from airflow_provider_pgrepl.replication.storage.probe import doubt_of_absence

SERVER = Server(180000, "7", 1, "logical", False, "shop", 16_384)
STAGING = replace(SERVER, system_identifier="8")
OTHER_DATABASE = replace(SERVER, database="crm", database_oid=16_999)
SLOT = Slot("pgrepl_shop", "pgoutput", "shop", False, None, LSN(1), LSN(1), "reserved", None)
LOST = replace(SLOT, wal_status="lost", invalidation="wal_removed")
AHEAD = replace(SLOT, confirmed_flush_lsn=LSN(10))
EPOCH = EpochRecord(
    "shop",
    Epoch(1),
    "7",
    1,
    "pgrepl_shop",
    "pgrepl_shop",
    16_500,
    LSN(9),
    database="shop",
    database_oid=16_384,
    pipeline_id="p",
)
RECORD = PipelineRecord(
    "shop",
    "7",
    "pgrepl_shop",
    "pgrepl_shop",
    True,
    True,
    "/lake",
    "{}",
    datetime.now(UTC),
    id="p",
    database="shop",
    database_oid=16_384,
    lake_id="l",
)
OLD_EPOCH = replace(EPOCH, layout=1, database="", database_oid=0, pipeline_id="")
OLD_RECORD = replace(RECORD, id="q", database="", database_oid=0, lake_id="")


def evidence(**changed: Any) -> Evidence:
    """Return the evidence of a pipeline, which agrees apart from the fields in `changed`."""
    whole = Evidence(
        Pipeline(name="shop", lake="/lake", tables=("public.t",)),
        SERVER,
        {SLOT.name: SLOT},
        EPOCH,
        "l",
        RECORD,
        durable_lsn=LSN(9),
        written_lsn=LSN(9),
    )
    return replace(whole, **changed)


def moved(**changed: Any) -> Evidence:
    """Return evidence in which the pipeline file names another lake than the state."""
    return evidence(pipeline=Pipeline(name="shop", lake="/other", tables=("public.t",)), **changed)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"epoch": None, "lake_id": "", "recorded": None},
        {"server": None, "slots": {}},
        {"slots": {}, "recorded": None, "torn_down": True},
        {"slots": {}, "recorded": replace(RECORD, id="q", lake_id=""), "torn_down": True},
        {"epoch": OLD_EPOCH, "recorded": OLD_RECORD},
        {"slots": {SLOT.name: LOST}},
        {
            "server": replace(SERVER, database="renamed"),
            "slots": {SLOT.name: replace(SLOT, database="renamed")},
        },
        {"slots": {SLOT.name: AHEAD}, "recorded": replace(RECORD, lake_id="")},
    ],
    ids=[
        "all",
        "nothing yet",
        "source away",
        "torn down",
        "begins after a teardown",
        "earlier version",
        "slot invalidated",
        "renamed",
        "an epoch begins",
    ],
)
def test_evidence_that_agrees_is_ours(changed: dict[str, Any]) -> None:
    assert compare(evidence(**changed)) == (Answer.OURS, None)


def test_moved_lake_is_ours() -> None:
    assert compare(moved()) == (Answer.OURS, None)


def test_lake_counts_as_moved_only_if_its_former_folder_is_certainly_absent(tmp_path: Path) -> None:
    """The folder of a disk that is not mounted is empty, or lacks the folders below it."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "damaged").mkdir()
    assert doubt_of_absence(str(tmp_path / "moved" / "lake")) == ""
    assert "disk is empty" in doubt_of_absence(str(tmp_path / "disk" / "lake"))
    assert "no table in it can be opened" in doubt_of_absence(str(tmp_path / "damaged"))
    assert "cannot be looked at" in doubt_of_absence(str(tmp_path / ("x" * 3000)))
    assert doubt_of_absence("s3://bucket/lake") == ""


NEVER_BEGUN = evidence(epoch=None, lake_id="", recorded=None, lake_at_source="/lake")


@pytest.mark.parametrize(
    ("found", "answer", "kind", "says"),
    [
        (evidence(server=STAGING), Answer.NOT_OURS, RewoundError, "another server: database shop of .* 8"),
        (evidence(server=OTHER_DATABASE), Answer.NOT_OURS, RewoundError, "of that server: database crm"),
        (evidence(server=OTHER_DATABASE, epoch=OLD_EPOCH), Answer.NOT_OURS, RewoundError, "database crm"),
        (evidence(server=STAGING, epoch=None), Answer.NOT_OURS, StateError, "recorded with database shop"),
        (
            evidence(server=OTHER_DATABASE, epoch=None, recorded=OLD_RECORD),
            Answer.NOT_OURS,
            StateError,
            "of that server: database crm",
        ),
        (
            evidence(epoch=replace(EPOCH, pipeline="other")),
            Answer.NOT_OURS,
            LakeError,
            "belongs to the pipeline 'other'",
        ),
        (evidence(lake_id="m"), Answer.NOT_OURS, ConfigError, "that path now holds another lake"),
        (moved(lake_id="m"), Answer.NOT_OURS, ConfigError, "names /other, which is another lake"),
        (moved(epoch=None), Answer.UNDETERMINED, ConfigError, "names /other, which has no changelog"),
        (moved(recorded=OLD_RECORD), Answer.UNDETERMINED, ConfigError, "recorded with the lake /lake"),
        (moved(recorded_lake_id="l"), Answer.UNDETERMINED, ConfigError, "a copy of it"),
        (
            moved(recorded_lake_doubt="the storage is away"),
            Answer.UNDETERMINED,
            ConfigError,
            "may still be there: the storage is away",
        ),
        (evidence(recorded=None), Answer.UNDETERMINED, StateError, "knows nothing of the pipeline"),
        (
            evidence(recorded=None, slots={}),
            Answer.UNDETERMINED,
            StateError,
            "knows nothing of the pipeline",
        ),
        (
            evidence(recorded=None, lake_at_source="/lake"),
            Answer.UNDETERMINED,
            StateError,
            "database shop of the source has one, with slot pgrepl_shop and lake /lake",
        ),
        (NEVER_BEGUN, Answer.UNDETERMINED, StateError, "database shop of the source has one"),
        (evidence(recorded=None, torn_down=True), Answer.UNDETERMINED, StateError, "knows nothing"),
        (
            evidence(recorded=None, epoch=OLD_EPOCH, slots={}),
            Answer.UNDETERMINED,
            StateError,
            "knows nothing of the pipeline",
        ),
        (
            evidence(recorded=replace(RECORD, id="q")),
            Answer.NOT_OURS,
            StateError,
            "begun with another state database",
        ),
    ],
)
def test_contradiction_is_said_with_both_sides(
    found: Evidence, answer: Answer, kind: type[PgReplError], says: str
) -> None:
    assert compare(found)[0] is answer
    with pytest.raises(kind, match=says) as caught:
        check_ours(found)
    assert "--new-epoch" not in caught.value.hint
    # The record may be another pipeline's, which runs.
    assert "delete" not in caught.value.hint


def test_lake_of_a_first_snapshot_that_failed_can_be_left_by_teardown() -> None:
    begun, unbegun = moved(epoch=None), moved(epoch=None, recorded=replace(RECORD, lake_id=""))
    with pytest.raises(ConfigError) as caught:
        check_ours(unbegun)
    assert "set `lake` back to /lake" in caught.value.hint
    assert "run pgrepl teardown FILE.json --yes" in caught.value.hint
    with pytest.raises(ConfigError) as caught:
        check_ours(begun)
    assert "teardown" not in caught.value.hint


PROMOTED = evidence(server=replace(SERVER, timeline=2))
BEHIND = evidence(written_lsn=LSN(8))
MOVED_SLOT = evidence(slots={SLOT.name: AHEAD})
NO_SLOT = evidence(slots={})
ELSEWHERE = evidence(slots={SLOT.name: replace(SLOT, database="crm")})


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (PROMOTED, "is on timeline 2, the changelog's is 1"),
        (BEHIND, r"WAL position of the source \(0/8\) is before 0/9"),
        (replace(BEHIND, epoch=None, lake_id=""), r"\(0/8\) is before 0/9"),
        (
            replace(BEHIND, server=replace(SERVER, in_recovery=True)),
            "or it has not yet replayed its primary's WAL",
        ),
        (MOVED_SLOT, "slot pgrepl_shop has confirmed 0/A, beyond 0/9"),
        (NO_SLOT, "no replication slot pgrepl_shop in database shop .* or this server is a copy"),
        (ELSEWHERE, "no replication slot pgrepl_shop in database shop"),
        (
            replace(NO_SLOT, epoch=replace(OLD_EPOCH, database="shop"), recorded=OLD_RECORD),
            "no replication slot",
        ),
    ],
    ids=[
        "promoted",
        "behind",
        "behind the state",
        "standby behind",
        "slot moved",
        "no slot",
        "slot of another database",
        "no slot, earlier version",
    ],
)
def test_source_with_another_history_may_be_a_copy(found: Evidence, says: str) -> None:
    """A copy that was made since the last start has the token."""
    answer, error = compare(found)
    assert answer is Answer.UNDETERMINED
    assert error is not None
    assert re.search(says, error.message)
    with pytest.raises(type(error), match=says) as caught:
        check_teardown(found, frozenset())
    assert "--give-up 7/shop," in caught.value.hint
    check_teardown(found, frozenset({"7/shop"}))
    assert "--new-epoch" not in error.hint
    with pytest.raises(ConfigError, match="would abandon") as refused:
        check_new_epoch(found, frozenset())
    assert "--give-up 7/shop," in refused.value.hint
    check_new_epoch(found, frozenset({"7/shop"}))


def test_teardown_gives_up_no_other_server() -> None:
    with pytest.raises(RewoundError, match="another server"):
        # Empty, as a name from a template that gave nothing.
        check_teardown(evidence(server=STAGING), frozenset({"7/shop", ""}))


def test_source_that_lacks_only_the_token_is_accepted_by_its_name() -> None:
    copy = evidence(missing_token=RewoundError("it lacks the token", "check it"))
    assert check_acceptable(evidence(), "7/shop") is False
    assert check_acceptable(copy, "7/shop") is True
    with pytest.raises(ConfigError, match=r"7/other is not the name .*: 7/shop"):
        check_acceptable(copy, "7/other")
    for other in ({"written_lsn": LSN(8)}, {"server": STAGING}, {"recorded": None}):
        with pytest.raises(PgReplError):
            check_acceptable(replace(copy, **other), "7/shop")


def test_teardown_without_state_takes_the_name_of_the_source() -> None:
    """The pipeline's apps may run with another state database."""
    lost = evidence(recorded=None)
    with pytest.raises(StateError, match="knows nothing") as caught:
        check_teardown(lost, frozenset())
    assert "--give-up 7/shop," in caught.value.hint
    check_teardown(lost, frozenset({"7/shop"}))
    with pytest.raises(RewoundError):
        check_teardown(evidence(recorded=None, server=STAGING), frozenset({"7/shop"}))


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (evidence(server=STAGING), "7/shop"),
        (evidence(server=STAGING, epoch=None, recorded=OLD_RECORD, slots={}), "7"),
        (moved(epoch=None), "/lake"),
        (moved(recorded_lake_doubt="the storage is away"), "/lake"),
        (evidence(recorded=replace(RECORD, id="q")), "p"),
        (NEVER_BEGUN, "7/shop"),
        (evidence(recorded=None), "7/shop"),
        (evidence(recorded=None, slots={}), "7/shop"),
    ],
)
def test_new_epoch_asks_for_the_name_of_the_source_or_lake_that_it_gives_up(
    found: Evidence, name: str
) -> None:
    with pytest.raises(ConfigError, match="would abandon") as caught:
        check_new_epoch(found, frozenset())
    assert f"--give-up {name}," in caught.value.hint
    check_new_epoch(found, frozenset({name}))


def test_new_epoch_in_a_missing_lake_needs_its_name() -> None:
    """The lake may only be not mounted, and the new epoch drops the slot that it needs."""
    missing = evidence(epoch=None, lake_id="")
    with pytest.raises(ConfigError, match="no changelog in the lake /lake: it is not mounted") as caught:
        check_lake_may_be_lost(missing, frozenset({"/other"}))
    assert "pgrepl snapshot FILE.json --new-epoch --give-up /lake," in caught.value.hint
    check_lake_may_be_lost(missing, frozenset({"/lake"}))


@pytest.mark.parametrize(
    "found",
    [
        evidence(),
        evidence(epoch=None, lake_id="", recorded=None),
        evidence(epoch=None, lake_id="", recorded=replace(RECORD, lake_id="")),
    ],
    ids=["present", "not recorded", "never begun"],
)
def test_new_epoch_needs_no_name_of_a_lake_that_holds_nothing_or_is_there(found: Evidence) -> None:
    check_lake_may_be_lost(found, frozenset())


@pytest.mark.parametrize("found", [evidence(lake_id="m"), moved(lake_id="m"), moved(recorded_lake_id="l")])
def test_new_epoch_never_replaces_a_lake_of_others(found: Evidence) -> None:
    with pytest.raises(ConfigError, match="is recorded with the lake"):
        check_new_epoch(found, frozenset({"/lake", "/other", "l", "m"}))


def test_new_epoch_needs_no_name_where_it_is_the_remedy() -> None:
    check_new_epoch(evidence(slots={SLOT.name: LOST}), frozenset())


@pytest.mark.parametrize(
    ("last", "is_same"),
    [
        (EPOCH, True),
        (OLD_EPOCH, True),
        (replace(EPOCH, system_identifier="8"), False),
        (replace(EPOCH, database_oid=16_999), False),
    ],
)
def test_epoch_of_another_server_or_database_is_of_another_source(last: EpochRecord, is_same: bool) -> None:
    assert known_source(last, SERVER).differs(SERVER) is not is_same
