from contextlib import closing

import psycopg2
import pytest
from psycopg2.extensions import make_dsn, parse_dsn

from airflow_provider_pgrepl.errors import (
    ConfigError,
    LoginError,
    PrivilegeError,
    Retry,
    SourceConnectionError,
)
from airflow_provider_pgrepl.replication.source.catalog.relations import read_relations
from airflow_provider_pgrepl.replication.source.connection import (
    PINNED_SETTINGS,
    address,
    connect,
    connect_replication,
    pin_statement,
    stream_conninfo,
)
from airflow_provider_pgrepl.replication.source.server_errors import source_errors
from demo.postgres import free_port

HOSTILE = {
    "standard_conforming_strings": "off",
    "default_transaction_read_only": "on",
    "default_transaction_isolation": "serializable",
    "datestyle": "'German, DMY'",
    "intervalstyle": "sql_standard",
    "timezone": "'Asia/Tokyo'",
    "extra_float_digits": "-15",
    "bytea_output": "escape",
    "statement_timeout": "'77s'",
    "lock_timeout": "'77s'",
    "idle_in_transaction_session_timeout": "'77s'",
    "idle_session_timeout": "'77s'",
    "search_path": "'public'",
    "work_mem": "'64kB'",
}


def settings(connection):
    with connection.cursor() as cursor:
        cursor.execute("select lower(name), setting from pg_settings")
        return dict(cursor.fetchall())


@pytest.mark.parametrize("open_connection", [connect, connect_replication])
def test_settings_are_pinned_whatever_the_database_says(pg, dsn, open_connection):
    with pg.cursor() as cursor:
        cursor.execute("select current_database()")
        database = cursor.fetchone()[0]
        for name, value in HOSTILE.items():
            cursor.execute(f"alter database {database} set {name} = {value}")
    connection = open_connection(dsn, "test")
    found = settings(connection)
    connection.close()
    for name, value in PINNED_SETTINGS.items():
        if name.lower() in found:
            assert found[name.lower()].strip('"') == value, name


def test_catalog_of_many_tables_is_sorted_without_temporary_files(pg, dsn, run):
    run(
        "do $$begin for n in 1..1000 loop"
        " execute format('create table %s_%s (one int, two int, three int)', repeat('t', 50), n);"
        " end loop; end$$"
    )
    oids = [oid for (oid,) in run("select oid::bigint from pg_class where relname like 'tttt%'")]
    for setting in ("temp_file_limit = 0", "work_mem = '64kB'"):
        run(f"alter database {pg.info.dbname} set {setting}")
    with closing(connect(dsn, "test")) as connection:
        assert len(read_relations(connection, oids, None)) == 1000


def test_a_setting_that_the_server_does_not_know_is_passed_over(pg, monkeypatch):
    monkeypatch.setitem(PINNED_SETTINGS, "setting_of_the_future", "0")
    with pg.cursor() as cursor:
        cursor.execute(pin_statement())
        names = len(cursor.fetchall())
    assert 10 < names < len(PINNED_SETTINGS)


def test_a_connection_says_who_it_is_and_commits_by_itself(dsn):
    connection = connect(dsn + " application_name=other", "keeper")
    with connection.cursor() as cursor:
        cursor.execute("show application_name")
        assert cursor.fetchone() == ("pgrepl keeper",)
    assert connection.autocommit
    connection.close()


def test_a_uri_is_as_good_as_keywords(server):
    uri = f"postgresql://postgres@127.0.0.1:{server.port}/postgres"
    connect(uri, "test").close()
    assert "replication=database" in stream_conninfo(uri, "stream")


def test_no_server_says_where_it_looked_but_not_the_password():
    with pytest.raises(SourceConnectionError, match=r"postgres@127.0.0.1:\d+/shop") as caught:
        connect(f"host=127.0.0.1 port={free_port()} user=postgres dbname=shop password=hunter2", "test")
    assert "hunter2" not in str(caught.value)


def test_an_unreadable_dsn_is_not_repeated():
    with pytest.raises(ConfigError) as caught:
        connect("host=h password=abc hunter2", "test")
    assert "hunter2" not in str(caught.value)


def test_an_unknown_database_is_named(server):
    with pytest.raises(SourceConnectionError, match='database "no_such" does not exist'):
        connect(server.dsn("no_such"), "test")


def test_a_role_without_replication_is_told_how_to_get_it(server, pg, dsn):
    with pg.cursor() as cursor:
        cursor.execute("drop role if exists plain; create role plain login")
    with pytest.raises(PrivilegeError, match="ALTER ROLE"):
        connect_replication(dsn.replace("user=postgres", "user=plain"), "test")
    connect(dsn.replace("user=postgres", "user=plain"), "test").close()
    with pg.cursor() as cursor:
        cursor.execute("drop role plain")


def test_errors_of_data_do_not_carry_the_value(pg):
    with pytest.raises(Exception, match=r"reading: .*SQLSTATE 22P02") as caught, source_errors("reading"):
        pg.cursor().execute("select 'secret'::int")
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_lost_connection_is_worth_another_try(pg, dsn):
    connection = connect(dsn, "test")
    with pg.cursor() as cursor:
        cursor.execute("select pg_terminate_backend(%s)", (connection.info.backend_pid,))
    with pytest.raises(SourceConnectionError), source_errors("asking"):
        while True:
            connection.cursor().execute("select 1")
    assert isinstance(connection, psycopg2.extensions.connection)


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://replicator:hush1/hush2@127.0.0.1:54320/events",
        "postgresql://replicator:12/hush2@127.0.0.1:54320/events",
        "postgres://replicator:hush1@hush2@127.0.0.1:54320/events",
        "postgresql://re@pl:hush1@127.0.0.1/events",
        "host=127.0.0.1 port=hush1 user=replicator",
    ],
)
def test_a_password_that_libpq_takes_for_something_else_is_not_shown(dsn):
    with pytest.raises(ConfigError, match="not percent-encoded, or a port is no number") as caught:
        connect(dsn, "test")
    assert "hush" not in f"{caught.value}{caught.value.hint}"


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://me:p%40s%2Fs@[::1]:5432/shop?application_name=a@b/c",
        "postgresql://me@h1:5432,h2:5433,h3/shop",
        "postgresql://%2Ftmp%2Fx/shop",
        "host=/tmp port='' dbname=a@b password=x/y@z",
        "postgresql:///shop",
    ],
)
def test_address_parses_valid_dsn_and_omits_percent_encoded_password(dsn):
    assert "p@s" not in address(dsn)


def test_rejected_login_with_given_password_is_not_retried(dsn):
    """Retries would repeat for days what cannot succeed before a person corrects the connection."""
    with pytest.raises(LoginError, match='role "nobody_here" does not exist') as caught:
        connect(make_dsn(dsn, user="nobody_here", password="open sesame"), "test")
    assert caught.value.retry is Retry.NEVER
    assert "open sesame" not in str(caught.value)


def test_rejected_login_without_given_password_is_retried(dsn, monkeypatch):
    """A passfile or a service file may be rewritten by the program that rotates the password."""
    monkeypatch.delenv("PGPASSWORD", raising=False)
    parts = {name: value for name, value in parse_dsn(dsn).items() if name != "password"}
    with pytest.raises(SourceConnectionError) as caught:
        connect(make_dsn(**{**parts, "user": "nobody_here"}), "test")
    assert caught.value.retry is Retry.TIMED


def test_login_that_worked_before_in_this_process_is_retried(dsn, pg):
    """The password was rotated: the next try of the task reads the connection again."""
    pg.cursor().execute("create role rotated_login login")
    given = make_dsn(dsn, user="rotated_login", password="open sesame")
    connect(given, "test").close()
    pg.cursor().execute("drop role rotated_login")
    with pytest.raises(SourceConnectionError) as caught:
        connect(given, "test")
    assert caught.value.retry is Retry.TIMED
