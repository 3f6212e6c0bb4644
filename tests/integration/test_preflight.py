import socket
import struct
import tempfile
import threading
import uuid
from pathlib import Path

import psycopg2
import pytest

from airflow_provider_pgrepl.errors import (
    PgReplError,
    PrivilegeError,
    PublicationError,
    ServerSettingError,
    SlotError,
    SourceConnectionError,
    TableError,
)
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.connection import connect_replication
from airflow_provider_pgrepl.replication.source.preflight.check import check_server, check_source
from airflow_provider_pgrepl.replication.source.slot_creation import create_slot, export_snapshot
from demo.postgres import Server
from tests.conftest import closing_connection, fresh_database
from tests.support.replicated import has_no_sender, wait_until


@pytest.fixture
def role(pg, run):
    """A login with REPLICATION and no other right."""
    name = f"r_{uuid.uuid4().hex[:10]}"
    run(f"create role {name} login replication")
    yield name
    run(f"drop owned by {name}", f"drop role {name}")


def pipeline(*tables, **more):
    more = {"trust_table_owners": True, **more}  # the tests connect as a superuser
    return Pipeline(name="shop", lake="/nowhere", tables=tables or ("public.*",), **more)


def as_role(dsn, role):
    return dsn.replace("user=postgres", f"user={role}")


def test_a_source_that_is_ready_passes_and_nothing_is_created(pg, dsn, run):
    run("create table t (a int primary key)")
    count = "select (select count(*) from pg_publication), (select count(*) from pg_class)"
    before = run(count)
    assert [str(relation.table) for relation in check_source(dsn, pipeline())] == ["public.t"]
    assert check_server(dsn).wal_level == "logical"
    assert run(count) == before


def test_children_by_inheritance_outside_of_the_pipeline_are_warned_of(dsn, run, caplog):
    run(
        "create table parent (a int primary key)",
        "create table child (primary key (a)) inherits (parent)",
        "create table grandchild (primary key (a)) inherits (child)",
    )
    check_source(dsn, pipeline())
    assert not caplog.messages
    check_source(dsn, pipeline("public.parent"))
    (warning,) = caplog.messages
    assert warning.startswith(
        "public.parent: 2 of the tables that inherit from it are not in the pipeline (public.child,"
        " public.grandchild). Its lake table has the rows of ONLY public.parent"
    )


def test_missing_rights_are_listed_exactly(pg, dsn, run, role):
    run(
        'create schema "My S"',
        'create table "My S".a (a int primary key)',
        "create table open (a int primary key)",
        "create table closed (a int primary key)",
        'create table "order" (a int primary key) partition by list (a)',
        'create table leaf partition of "order" for values in (1)',
        f"grant select on open to {role}",
        f"grant create on database {pg.info.dbname} to {role}",
        'create publication pgrepl_shop for table open, closed, "order" with (publish_via_partition_root)',
        'alter publication pgrepl_shop add table "My S".a',
    )
    with pytest.raises(PrivilegeError) as caught:
        check_source(as_role(dsn, role), pipeline("My S.*", "public.*"))
    assert caught.value.message.splitlines() == [
        f'role {role} lacks USAGE on schema "My S"',
        f'role {role} lacks SELECT on "My S".a, public."order", public.closed, public.leaf',
    ]
    assert f'GRANT USAGE ON SCHEMA "My S" TO {role}' in caught.value.hint
    for line in caught.value.hint.split("\n  hint: "):
        run(line)
    check_source(as_role(dsn, role), pipeline("My S.*", "public.*"))


def test_a_login_that_acts_as_another_role_is_told_of_its_own_setting(dsn, run, role):
    run(
        "create table t (a int primary key)",
        f"alter role {role} set role = 'pg_read_all_settings'",
        f"grant pg_read_all_settings to {role}",
    )
    with pytest.raises(PrivilegeError, match="role pg_read_all_settings may not create") as caught:
        check_source(as_role(dsn, role), pipeline())
    assert f"ALTER ROLE {role} RESET role; or GRANT" in caught.value.hint


def test_publishing_needs_ownership_and_create(pg, dsn, run, role):
    run("create table t (a int primary key)", f"grant select on t to {role}")
    with pytest.raises(PrivilegeError) as caught:
        check_source(as_role(dsn, role), pipeline())
    first, second = caught.value.message.splitlines()
    assert f"lacks CREATE on database {pg.info.dbname}" in first
    assert "may not publish public.t: only a table's owner may" in second
    run("create publication pgrepl_shop for table t")
    check_source(as_role(dsn, role), pipeline(publication_mode="use"))
    check_source(as_role(dsn, role), pipeline())


def test_row_level_security_that_would_hide_rows_is_refused(pg, dsn, run, role):
    run(
        "create table t (a int primary key)",
        "create publication pgrepl_shop for table t",
        f"grant select on t to {role}",
        "alter table t enable row level security",
    )
    with pytest.raises(PrivilegeError, match=rf"hide rows of public\.t from role {role}"):
        check_source(as_role(dsn, role), pipeline())
    check_source(dsn, pipeline())
    run(f"alter role {role} bypassrls")
    check_source(as_role(dsn, role), pipeline())


def test_a_role_without_replication_is_told_so_with_all_the_rest(pg, dsn, run, role):
    run(f"alter role {role} noreplication", "create table t (a int)")
    with pytest.raises(PrivilegeError) as caught:
        check_source(as_role(dsn, role), pipeline("public.t", "public.missing"))
    text = str(caught.value)
    for part in ("WAL sender", "rds_replication", "public.missing: does not exist", "ADD PRIMARY KEY"):
        assert part in text


def test_one_problem_keeps_its_own_kind(dsn, run):
    with pytest.raises(TableError, match=r"public\.missing: does not exist"):
        check_source(dsn, pipeline("public.missing"))


def test_a_publication_to_be_used_must_fit(pg, dsn, run):
    run(
        "create table t (a int primary key)",
        "create table part (a int primary key) partition by list (a)",
        "create table part_1 partition of part for values in (1)",
    )
    use = pipeline("public.t", "public.part", publication="p", publication_mode="use")
    with pytest.raises(PublicationError, match="there is no publication p"):
        check_source(dsn, use)
    run("create publication p for table part with (publish = 'insert')")
    with pytest.raises(PublicationError) as caught:
        check_source(dsn, use)
    assert "does not publish update, delete, truncate" in caught.value.message
    assert "partitions under their own names" in caught.value.message
    run(
        "alter publication p set"
        " (publish = 'insert, update, delete, truncate', publish_via_partition_root = true)"
    )
    with pytest.raises(PublicationError, match=r"does not hold public\.t"):
        check_source(dsn, use)
    run("alter publication p add table t")
    check_source(dsn, use)


def test_a_slot_of_somebody_else_is_refused(server, pg, dsn, run):
    run("create table t (a int primary key)")
    name = f"s_{uuid.uuid4().hex[:10]}"
    run(f"select pg_create_physical_replication_slot('{name}')")
    with pytest.raises(SlotError, match="belongs to another program: plugin None, database None"):
        check_source(dsn, pipeline(slot=name))
    run(f"select pg_drop_replication_slot('{name}')")
    create_slot(server.dsn(), name, timeout_s=30).close()
    with pytest.raises(SlotError, match="is of database postgres, and the connection leads"):
        check_source(dsn, pipeline(slot=name))
    run(f"select pg_drop_replication_slot('{name}')")
    create_slot(dsn, name, timeout_s=30).close()
    check_source(dsn, pipeline(slot=name))


@pytest.fixture(scope="module")
def strict_server():
    """A server with wal_level=replica, two slots, two senders, and passwords for role `secret`."""
    with tempfile.TemporaryDirectory(prefix="pgrepl-test-strict-") as folder:
        Path(folder).chmod(0o755)
        server = Server(
            Path(folder) / "data",
            settings={
                "fsync": "off",
                "wal_level": "replica",
                "max_replication_slots": "2",
                "max_wal_senders": "2",
                "max_connections": "20",
                "max_locks_per_transaction": "10",
            },
        )
        server.create()
        rules = server.data / "pg_hba.conf"
        rules.write_text("host all secret 127.0.0.1/32 scram-sha-256\n" + rules.read_text())
        server.start()
        connection = psycopg2.connect(server.dsn())
        connection.autocommit = True
        connection.cursor().execute("create role secret login replication password 'right'")
        connection.cursor().execute("create table t (a int primary key)")
        connection.close()
        yield server
        server.stop(immediate=True)


def test_a_wrong_password_says_what_to_check_and_keeps_the_secret(strict_server):
    with pytest.raises(SourceConnectionError, match="check user and password") as caught:
        check_source(strict_server.dsn(user="secret", password="wrong-pass"), pipeline())
    assert "wrong-pass" not in str(caught.value)
    with pytest.raises(SourceConnectionError, match="check user and password"):
        check_server(strict_server.dsn(user="secret"))


def test_partitions_that_the_servers_lock_table_has_no_room_for_are_counted(strict_server):
    many = "do $$ begin for n in 1..200 loop execute format('create table p%s partition of p for values in"
    with fresh_database(strict_server) as dsn, closing_connection(dsn) as own, own.cursor() as cursor:
        cursor.execute("create table p (a int primary key) partition by list (a)")
        for begin in range(0, 2000, 200):
            cursor.execute(f"{many} (%s)', {begin} + n, {begin} + n); end loop; end $$")
        with pytest.raises(ServerSettingError, match=r"locks 2001 tables .* is 10"):
            check_source(dsn, pipeline())


def test_wal_level_slots_and_senders_are_reported_together(strict_server):
    with pytest.raises(ServerSettingError) as caught:
        check_server(strict_server.dsn())
    assert caught.value.message == "wal_level is replica, and must be logical"
    connection = psycopg2.connect(strict_server.dsn())
    connection.autocommit = True
    connection.cursor().execute("select pg_create_physical_replication_slot('only')")
    wait_until(lambda: has_no_sender(strict_server), 30, "senders of other tests to end")
    held = [connect_replication(strict_server.dsn(), "test") for _ in range(2)]
    with pytest.raises(ServerSettingError) as caught:
        check_source(strict_server.dsn(), pipeline())
    assert [line.split(":")[0] for line in caught.value.message.splitlines()] == [
        "wal_level is replica, and must be logical",
        "too few replication slots are free",
        "no WAL sender is free",
    ]
    assert "max_replication_slots = 2" in caught.value.message
    assert "max_wal_senders = 2" in caught.value.message
    for sender in held:
        sender.close()
    connection.cursor().execute("select pg_drop_replication_slot('only')")
    connection.close()


class ForgetfulPooler(threading.Thread):
    """A proxy before the real server that leaves `replication` out of what the client asks at its start."""

    def __init__(self, port):
        super().__init__(daemon=True)
        self._server_port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]

    def run(self):
        while True:
            client, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        while True:
            (length,) = struct.unpack("!I", client.recv(4, socket.MSG_WAITALL))
            asked = client.recv(length - 4, socket.MSG_WAITALL)
            if struct.unpack("!I", asked[:4])[0] == 196608:
                break
            client.sendall(b"N")  # neither TLS nor GSS
        words = asked[4:].rstrip(b"\0").split(b"\0")
        pairs = [pair for pair in zip(words[::2], words[1::2], strict=True) if pair[0] != b"replication"]
        start = asked[:4] + b"".join(key + b"\0" + value + b"\0" for key, value in pairs) + b"\0"
        upstream = socket.create_connection(("127.0.0.1", self._server_port))
        upstream.sendall(struct.pack("!I", len(start) + 4) + start)
        threading.Thread(target=_pump, args=(client, upstream), daemon=True).start()
        _pump(upstream, client)


def _pump(source, sink):
    try:
        while data := source.recv(65536):
            sink.sendall(data)
    except OSError:
        pass
    finally:
        sink.close()


def test_a_pooler_that_ignores_replication_is_found_out(server, dsn, run):
    run("create table t (a int primary key)")
    pooler = ForgetfulPooler(server.port)
    pooler.start()
    through = dsn.replace(f"port={server.port}", f"port={pooler.port}")
    for check in (lambda: check_server(through), lambda: check_source(through, pipeline())):
        with pytest.raises(SourceConnectionError, match="use the server's direct address"):
            check()
    with pytest.raises(PgReplError):
        export_snapshot(through, "never", timeout_s=30)
