"""app/ownership.py: a receiver that runs commits while another program holds the lock of replication."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from airflow_provider_pgrepl.errors import RewoundError
from airflow_provider_pgrepl.replication.app.ownership import check_no_receiver
from airflow_provider_pgrepl.replication.changelog.layout import changelog_uri
from airflow_provider_pgrepl.replication.changelog.writer import ChangelogWriter, create_changelog, mark
from airflow_provider_pgrepl.replication.receiver.changelog_feed import RENEW_S, KeepaliveRule
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from tests.support.changelogs import epoch_record


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    pipeline = Pipeline(name="p", lake=str(tmp_path), tables=("public.t",))
    create_changelog(changelog_uri(pipeline.lake_root), epoch_record())
    return pipeline


def test_receiver_that_ended_by_itself_is_not_waited_for(pipeline: Pipeline) -> None:
    waited: list[float] = []
    check_no_receiver(pipeline, waited.append)
    ChangelogWriter(changelog_uri(pipeline.lake_root)).rest()
    check_no_receiver(pipeline, waited.append)
    assert waited == []


def test_killed_receiver_is_waited_for_longer_than_one_that_runs_is_silent(pipeline: Pipeline) -> None:
    waited: list[float] = []
    ChangelogWriter(changelog_uri(pipeline.lake_root))

    def wait(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 1:
            mark(changelog_uri(pipeline.lake_root))

    check_no_receiver(pipeline, wait)
    assert sum(waited) > RENEW_S
    assert KeepaliveRule().renew_s == RENEW_S


def test_receiver_that_commits_meanwhile_is_named(pipeline: Pipeline) -> None:
    writer = ChangelogWriter(changelog_uri(pipeline.lake_root))
    acts: tuple[Callable[[float], None], ...] = (
        lambda _: writer.give_sign_of_life(0, writer.durable_lsn),
        lambda _: writer.rest(),
    )
    for act in acts:
        with pytest.raises(RewoundError, match="receives changes into the lake"):
            check_no_receiver(pipeline, act)
