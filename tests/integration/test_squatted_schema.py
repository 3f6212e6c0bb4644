"""Schema `_pgrepl`, if another role made or prepared it, is not used: no code of that role runs as us."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import StateError
from airflow_provider_pgrepl.replication.state.database import StateDatabase

Run = Callable[..., Any]


@pytest.fixture
def other(run: Run) -> Iterator[str]:
    name = f"other_{uuid.uuid4().hex[:10]}"
    run(f"create role {name} login")
    yield name
    run("reset role", f"drop owned by {name} cascade", f"drop role {name}")


def as_other(run: Run, other: str, *statements: str) -> None:
    run(f"set role {other}", *statements, "reset role")


SPY = (
    "create function {0}.spy() returns text language plpgsql as"
    " $$ begin insert into public.ran values (current_user); return ''; end $$"
)


def test_a_schema_that_somebody_else_has_made_is_refused_before_anything_in_it_is_read(dsn, run, other):
    run("create table public.ran (who text)", "grant all on public.ran to public")
    run(f"create schema _pgrepl authorization {other}")
    as_other(
        run,
        other,
        SPY.format("_pgrepl"),
        "create view _pgrepl.migrations as select 3 as version, _pgrepl.spy()",
        "create view _pgrepl.pipelines as select _pgrepl.spy() as name",
        "grant all on schema _pgrepl to public",
        "grant all on all tables in schema _pgrepl to public",
    )
    with pytest.raises(StateError) as caught:
        StateDatabase(dsn, "test")
    assert f"the schema belongs to role {other}" in caught.value.message
    assert f"relation migrations belongs to role {other}" in caught.value.message
    assert "state_conn_id" in caught.value.hint
    assert run("select * from public.ran") == []


FOREIGN = {
    "a table": ("create table _pgrepl.more (a int)", "relation more belongs to role"),
    "a function": (SPY.format("_pgrepl"), "function spy belongs to role"),
    "a trigger": (
        "create trigger t before insert on _pgrepl.progress execute function elsewhere.fire()",
        "the function of trigger t on progress belongs to role",
    ),
}


@pytest.mark.parametrize(("statement", "said"), FOREIGN.values(), ids=FOREIGN)
def test_object_owned_by_another_role_in_state_schema_is_rejected(dsn, run, other, statement, said):
    with StateDatabase(dsn, "test") as state_db:
        state_db.migrate()
    run(
        f"create schema elsewhere authorization {other}",
        f"grant usage, create on schema _pgrepl to {other}",
        f"grant trigger on all tables in schema _pgrepl to {other}",
    )
    as_other(
        run,
        other,
        "create function elsewhere.fire() returns trigger language plpgsql as $$ begin return null; end $$",
        statement,
    )
    with pytest.raises(StateError, match=said):
        StateDatabase(dsn, "test")


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        (
            "alter table _pgrepl.tables alter reason set default public.spy()",
            "depends on function public.spy()",
        ),
        ("create rule r as on insert to _pgrepl.tables do also select 1", "table tables has rule r"),
        ("alter table _pgrepl.tables enable row level security", "table tables has row-level security"),
        ("create index on _pgrepl.tables (public.calm(reason))", "depends on function public.calm"),
    ],
)
def test_nor_is_what_would_run_in_ours_because_of_its_owner(dsn, run, statement, said):
    with StateDatabase(dsn, "test") as state_db:
        state_db.migrate()
    run(
        SPY.format("public"),
        "create function public.calm(text) returns text language sql immutable as 'select $1'",
        statement,
    )
    with pytest.raises(StateError, match=said.replace("(", r"\(").replace(")", r"\)")):
        StateDatabase(dsn, "test")


def test_state_schema_owned_by_superuser_or_granted_role_is_accepted(dsn, run, other):
    member = f"{other}_m"
    run(f"create role {member} login in role {other}", f"create schema _pgrepl authorization {other}")
    try:
        with StateDatabase(dsn.replace("user=postgres", f"user={member}"), "test") as state_db:
            state_db.migrate()
            state_db.migrate()
        run("alter schema _pgrepl owner to postgres")
        StateDatabase(dsn.replace("user=postgres", f"user={member}"), "test").close()
        with pytest.raises(StateError, match=f"belongs to role {member}"):
            StateDatabase(dsn, "test")
    finally:
        run(f"drop owned by {member} cascade", f"drop role {member}")
