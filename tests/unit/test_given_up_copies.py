"""app/copy_states.py, app/snapshot_tables.py: the hints of copies that are not repeated any more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import PublicationError, SnapshotError, TableSnapshotError
from airflow_provider_pgrepl.replication.app.copy_states import CopyStates
from airflow_provider_pgrepl.replication.app.snapshot_tables import TableSnapshotter
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.copy import snapshot_holder
from airflow_provider_pgrepl.replication.source.copy.imported_snapshot import (
    CONFLICT_HINT,
    WAITER_HINT,
    given_up,
)

TABLE = TableName("public", "t")


class States:
    """A state database without tables, which keeps the hint of a table that is marked errored."""

    hint = ""

    def read_tables(self, _: str) -> dict[TableName, Any]:
        return {}

    def set_membership(self, *_: Any) -> None: ...

    def set_state(self, *_: Any, hint: str = "", **__: Any) -> None:
        self.hint = hint


def hint_of_errored_table(error: SnapshotError) -> str:
    states: Any = States()
    pipeline = Pipeline(name="p", lake="/lake", tables=(str(TABLE),))
    CopyStates("", pipeline, states).mark_errored(TABLE, error)
    return str(states.hint)


@pytest.mark.parametrize("hint", [CONFLICT_HINT, WAITER_HINT])
def test_errored_table_gets_the_command_that_copies_it_again(hint: str) -> None:
    assert "automatically" in hint
    found = hint_of_errored_table(TableSnapshotError("public.t: the copy was given up", hint))
    assert "automatically" not in found
    assert "pgrepl snapshot FILE.json --tables 'public.t'" in found


def test_hint_with_an_instruction_is_kept_for_the_errored_table() -> None:
    hint = "run the command again when these sessions have ended, or raise lock_timeout_s"
    assert hint_of_errored_table(TableSnapshotError("public.t: could not be locked", hint)) == hint


def test_run_that_ends_does_not_promise_another_try() -> None:
    error = given_up(SnapshotError("public.t: altered after the snapshot was exported", WAITER_HINT))
    assert (type(error), error.hint) == (
        SnapshotError,
        "run the command again when no DDL runs on the tables",
    )


@pytest.mark.parametrize(("mode", "kind"), [("create", SnapshotError), ("use", PublicationError)])
def test_table_that_left_the_publication_is_retried_only_if_the_run_adds_tables(
    monkeypatch: pytest.MonkeyPatch, mode: str, kind: type[Exception]
) -> None:
    def outside(*_: Any) -> None:
        raise PublicationError("not in publication p: public.t", "ask its owner")

    monkeypatch.setattr(snapshot_holder, "keep_for", outside)
    access: Any = SimpleNamespace(pipeline=SimpleNamespace(publication_mode=mode), dsn="")
    nothing: Any = None
    with pytest.raises(kind, match=r"not in publication p: public\.t") as caught:
        TableSnapshotter(access, nothing, nothing, nothing).keep(nothing, [])
    assert type(caught.value) is kind
