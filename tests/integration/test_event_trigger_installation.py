"""The event trigger is installed and removed, by whom it may, without harm to DDL that runs."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from airflow_provider_pgrepl.errors import BusyError, PrivilegeError, SourceError
from airflow_provider_pgrepl.replication.source.connection import Connection, row
from airflow_provider_pgrepl.replication.source.event_trigger import trigger
from airflow_provider_pgrepl.replication.source.event_trigger.sql import (
    body_of,
    install_statements,
    removal_script,
)
from airflow_provider_pgrepl.replication.source.preflight.check import server_warnings
from demo.postgres import Server, binaries
from tests.conftest import closing_connection
from tests.support.application import Application, waits
from tests.support.replicated import execute, wait_until
from tests.support.watched import SHAPE, Watched, function, weak_role


def test_a_role_without_rights_is_told_what_it_takes_to_install(watched, dsn):
    with watched.source() as source:
        trigger.uninstall(source, watched.pipeline)
    with weak_role(watched) as role, watched.source() as source, source.cursor() as cursor:
        cursor.execute(f"set role {role}")
        with pytest.raises(PrivilegeError, match=f"role {role} may not create the event trigger") as raised:
            trigger.install(source, watched.pipeline)
        assert "superuser" in raised.value.hint
        assert not trigger.is_installed(source, watched.pipeline.name)


def test_the_key_outlives_another_version_of_the_function(watched, dsn):
    with watched.source() as source:
        key = trigger.read_key(source, watched.pipeline.name)
        execute(dsn, f"alter function {function(watched)} rename to old")
        trigger.install(source, watched.pipeline)
        assert trigger.read_key(source, watched.pipeline.name) == key


def test_a_key_that_somebody_else_has_laid_there_is_none(watched, dsn):
    table = f"_pgrepl.ddl_key_{watched.pipeline.name}"
    with weak_role(watched) as role, watched.source() as source:
        assert trigger.read_key(source, watched.pipeline.name) is not None
        execute(dsn, f"alter table {table} owner to {role}")
        assert trigger.read_key(source, watched.pipeline.name) is None
        with pytest.raises(SourceError):
            trigger.install(source, watched.pipeline)


def test_a_superuser_runs_the_script_once_and_the_replicating_role_uses_what_it_made(watched, dsn, tmp_path):
    name = watched.pipeline.name
    with watched.source() as source:
        trigger.uninstall(source, watched.pipeline)
    execute(dsn, "drop schema if exists _pgrepl")
    file = tmp_path / "script.sql"
    with weak_role(watched) as role, watched.source() as source:
        source.cursor().execute(f"set role {role}")
        file.write_text(trigger.install_sql(source, watched.pipeline))
        for _ in range(2):
            psql(watched, file)
        trigger.install(source, watched.pipeline)
        assert len(trigger.read_key(source, name)) == 32
        with pytest.raises(PrivilegeError, match="cannot be removed") as caught:
            trigger.uninstall(source, watched.pipeline)
        assert "event-trigger-sql FILE.json --remove" in caught.value.hint
        source.cursor().execute("reset role")
        with source.cursor() as cursor:
            cursor.execute(
                "select has_schema_privilege(%s, '_pgrepl', 'create'),"
                " has_table_privilege('public', oid, 'select') from pg_class where relname = %s",
                (role, f"ddl_key_{name}"),
            )
            assert cursor.fetchone() == (True, False)
    file.write_text(removal_script(name))
    psql(watched, file)
    with watched.source() as source:
        assert not trigger.is_present(source, watched.pipeline)


def test_the_script_is_not_run_into_a_schema_that_somebody_else_has_made(watched, dsn, tmp_path):
    with watched.source() as source:
        trigger.uninstall(source, watched.pipeline)
    execute(dsn, "drop schema if exists _pgrepl")
    file = tmp_path / "script.sql"
    with weak_role(watched) as role, watched.source() as source:
        execute(dsn, f"create schema _pgrepl authorization {role}")
        file.write_text(trigger.install_sql(source, watched.pipeline))
        with pytest.raises(subprocess.CalledProcessError):
            psql(watched, file)
        assert not trigger.is_present(source, watched.pipeline)


def psql(watched: Watched, file: Path) -> None:
    program = shutil.which("psql") or str(binaries() / "psql")
    command = [program, "-q", "-v", "ON_ERROR_STOP=1", "-f", str(file), watched.dsn]
    subprocess.run(command, check=True, capture_output=True)


def test_installing_again_changes_nothing_and_uninstalling_leaves_nothing(watched, dsn):
    with watched.source() as source:
        watching = trigger.read_watching(source, watched.pipeline)
        trigger.install(source, watched.pipeline)
        assert trigger.read_watching(source, watched.pipeline) == watching
        for _ in range(2):
            trigger.uninstall(source, watched.pipeline)
        assert trigger.read_watching(source, watched.pipeline) is None
        with source.cursor() as cursor:
            cursor.execute("select 1 from pg_namespace where nspname = '_pgrepl'")
            assert cursor.fetchall() == []


def test_function_of_other_settings_is_renewed(watched, dsn):
    """A function of an earlier version may have other settings and the same text."""
    with watched.source() as source:
        trigger.install(source, watched.pipeline)
        made = settings_of(source, watched)
        execute(dsn, f"alter function {function(watched)} reset standard_conforming_strings")
        assert settings_of(source, watched) != made
        trigger.install(source, watched.pipeline)
        assert settings_of(source, watched) == made


def settings_of(source: Connection, watched: Watched) -> list[str]:
    query = "select proconfig from pg_proc where oid = %s::regprocedure"
    return sorted(row(source, query, (function(watched),))[0])


@pytest.mark.parametrize("how", ["by the program", "by psql", "as one text"])
def test_function_is_whole_in_a_database_whose_strings_have_escapes(dsn, tmp_path, how):
    database = dsn.split("dbname=")[1].split()[0]
    execute(dsn, f"alter database {database} set standard_conforming_strings = off", *SHAPE)
    watched = Watched(dsn, tmp_path, ("public.t",), flush_interval_s=0.05, event_trigger=True)
    with watched.source() as source:
        script = trigger.install_sql(source, watched.pipeline)
        (tmp_path / "script.sql").write_text(script)
        if how == "by the program":
            trigger.install(source, watched.pipeline)
        elif how == "by psql":
            psql(watched, tmp_path / "script.sql")
        else:
            execute(dsn, script)
        assert source_text(source, watched) == body_of(watched.pipeline, source.server_version)


def source_text(source: Connection, watched: Watched) -> str:
    text: str = row(source, "select prosrc from pg_proc where oid = %s::regprocedure", (function(watched),))[
        0
    ]
    return text


def test_a_dump_is_restored_with_the_trigger_and_without_harm(watched, server: Server, dsn):
    name = dsn.split("dbname=")[1].split()[0]
    dumped = subprocess.run(
        [binaries() / "pg_dump", "-d", dsn, "--no-publications"], check=True, capture_output=True, text=True
    ).stdout
    with closing_connection(server.dsn()) as admin, admin.cursor() as cursor:
        cursor.execute(f"create database {name}_restored")
    try:
        subprocess.run(
            [server.bin / "psql", "-v", "ON_ERROR_STOP=1", "-qd", server.dsn(f"{name}_restored")],
            check=True,
            capture_output=True,
            input=dumped,
            text=True,
        )
        with closing_connection(server.dsn(f"{name}_restored")) as restored:
            assert trigger.is_installed(restored, watched.pipeline.name)
        execute(server.dsn(f"{name}_restored"), "alter table t drop v", "drop table t")
    finally:
        with closing_connection(server.dsn()) as admin, admin.cursor() as cursor:
            cursor.execute(f"drop database {name}_restored with (force)")


@pytest.mark.differs_by_major("which rights pg_dump needs")
def test_owner_whose_dump_fails_on_our_schema_is_told_what_to_leave_out(watched, server: Server, dsn):
    """A nightly backup is often taken by the role that owns the database, and no superuser."""
    name = dsn.split("dbname=")[1].split()[0]
    with watched.source() as source, weak_role(watched) as owner:
        execute(dsn, f"alter role {owner} login", f"alter database {name} owner to {owner}")
        execute(dsn, f"alter table t owner to {owner}", f"alter table other owner to {owner}")
        dump = [binaries() / "pg_dump", "-d", dsn.replace("user=postgres", f"user={owner}")]
        with pytest.raises(subprocess.CalledProcessError) as failed:
            subprocess.run(dump, check=True, capture_output=True, text=True)
        assert "permission denied for schema _pgrepl" in failed.value.stderr
        (said,) = (one for one in server_warnings(source, watched.pipeline.slot) if "pg_dump" in one)
        assert f"role {owner}, which owns the database, may not read schema _pgrepl" in said
        assert "--exclude-schema=_pgrepl" in said
        subprocess.run([*dump, "--exclude-schema=_pgrepl"], check=True, capture_output=True, text=True)
        execute(dsn, f"grant pg_read_all_data to {owner}")
        subprocess.run(dump, check=True, capture_output=True, text=True)
        assert not any("pg_dump" in one for one in server_warnings(source, watched.pipeline.slot))


GATE = (
    "create function hold() returns event_trigger language plpgsql as"
    " $$ begin perform pg_advisory_lock(1); perform pg_advisory_unlock(1); end $$",
    "create event trigger a_gate on ddl_command_end when tag in ('ALTER TABLE') execute function hold()",
    "alter event trigger a_gate enable always",
)
"""Event triggers fire by name: where it holds a statement up, ours has been looked up, and has not run."""


@contextmanager
def ddl_amid_its_triggers(dsn: str) -> Iterator[Application]:
    """A statement of a new session, which does not know our function yet. It goes on after the block."""
    execute(dsn, *GATE)
    with closing_connection(dsn) as gate, gate.cursor() as cursor:
        cursor.execute("select pg_advisory_lock(1)")
        application = Application(dsn, "alter table t add later int")
        wait_until(lambda: waits(gate, application.pid))
        yield application
        cursor.execute("select pg_advisory_unlock(1)")
        application.assert_done()


def test_ddl_whose_triggers_fire_while_the_function_is_replaced_does_not_fail(watched, dsn):
    with ddl_amid_its_triggers(dsn), watched.source() as source:
        watching = trigger.read_watching(source, watched.pipeline)
        execute(dsn, f"alter function {function(watched)} set work_mem = '4MB'")
        replace_body(watched)
        trigger.install(source, watched.pipeline)
        assert trigger.read_watching(source, watched.pipeline) not in (None, watching)
    watched.receive()
    assert watched.records()[-1].catalog == watched.now()


def test_ddl_whose_triggers_fire_while_they_are_removed_does_not_fail(watched, dsn):
    with watched.source() as source:
        removing = threading.Thread(target=trigger.uninstall, args=(source, watched.pipeline))
        with ddl_amid_its_triggers(dsn):
            removing.start()
            wait_until(lambda: not is_installed(watched))
        removing.join(60)
        assert not trigger.is_present(source, watched.pipeline)


@pytest.mark.thorough("test_ddl_whose_triggers_fire_while_they_are_removed_does_not_fail")
def test_script_removes_triggers_while_ddl_runs(watched, dsn, tmp_path):
    file = tmp_path / "script.sql"
    file.write_text(removal_script(watched.pipeline.name))
    removing = threading.Thread(target=psql, args=(watched, file))
    with ddl_amid_its_triggers(dsn):
        removing.start()
        wait_until(lambda: not is_installed(watched))
    removing.join(60)
    with watched.source() as source:
        assert not trigger.is_present(source, watched.pipeline)


def is_installed(watched: Watched) -> bool:
    with watched.source() as source:
        return trigger.is_installed(source, watched.pipeline.name)


def replace_body(watched: Watched) -> None:
    """Replace the function's body, as an earlier version of this package would have left it."""
    execute(
        watched.dsn,
        f"create or replace function {function(watched)} returns event_trigger language plpgsql as"
        " 'begin end'",
    )


def test_installation_waits_for_no_transaction_that_has_run_ddl_and_holds_none_up(watched, dsn):
    replace_body(watched)
    with closing_connection(dsn) as application, application.cursor() as cursor, watched.source() as source:
        cursor.execute("set lock_timeout = '10ms'; begin; alter table t add w int")
        source.cursor().execute("set statement_timeout = '20s'")
        trigger.install(source, watched.pipeline)
        replace_body(watched)
        with closing_connection(dsn) as installing, installing.cursor() as making:
            making.execute("begin")
            for statement in install_statements(watched.pipeline.name, "begin end", "postgres"):
                making.execute(statement)
            cursor.execute("alter table t add x int; commit; alter table t add y int; create table new ()")
            making.execute("rollback")


def test_removal_is_refused_while_a_transaction_that_has_run_ddl_is_open(watched, dsn, monkeypatch):
    monkeypatch.setattr(trigger, "_LOCK_WAIT_S", 0.1)
    monkeypatch.setattr(trigger, "AWAIT_DDL", "SELECT 1")
    with closing_connection(dsn) as application, application.cursor() as cursor, watched.source() as source:
        cursor.execute("begin; alter table t add w int")
        with pytest.raises(BusyError, match="a transaction that ran DDL is still open"):
            trigger.uninstall(source, watched.pipeline)
        execute(dsn, "set lock_timeout = '10ms'", "create table new ()")
        assert trigger.is_present(source, watched.pipeline)
        cursor.execute("commit")
        trigger.uninstall(source, watched.pipeline)
        assert not trigger.is_present(source, watched.pipeline)


def test_function_that_another_role_owned_is_the_installers(watched, dsn):
    with weak_role(watched) as role, watched.source() as source, source.cursor() as cursor:
        execute(dsn, f"alter function {function(watched)} owner to {role}")
        replace_body(watched)
        trigger.install(source, watched.pipeline)
        cursor.execute(
            "select pg_get_userbyid(proowner) from pg_proc where oid = %s::regprocedure", (function(watched),)
        )
        assert cursor.fetchone() == ("postgres",)
