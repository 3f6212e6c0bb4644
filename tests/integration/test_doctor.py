"""`pgrepl doctor` against a real server. Nothing is created, and no Spark is started."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psycopg2
import psycopg2.extensions
import pytest

from airflow_provider_pgrepl.__main__ import main
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.doctor.diagnosis import diagnose
from airflow_provider_pgrepl.replication.app.doctor.source_script import PROVIDERS, source_script
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.spark.connectors import JARS_VARIABLE
from tests.support.recorded import Recorded


class Patient:
    """A pipeline that was not begun yet, of a table with a key."""

    def __init__(self, dsn: str, pg: Any, folder: Path, patch: pytest.MonkeyPatch, capsys: Any) -> None:
        pg.cursor().execute("create table orders (id int primary key)")
        self.pg, self.capsys, self.patch = pg, capsys, patch
        self.fields: dict[str, Any] = {
            "name": f"p_{os.urandom(4).hex()}",
            "lake": str(folder / "lake"),
            "tables": ["public.orders"],
            "trust_table_owners": True,
        }
        self.file = folder / "pipeline.json"
        patch.setenv("PGREPL_DSN", dsn)
        patch.delenv("PGREPL_STATE_DSN", raising=False)

    def doctor(self, *options: str, **changed: Any) -> tuple[int, str]:
        self.file.write_text(json.dumps({**self.fields, **changed}), encoding="utf-8")
        code = main(["doctor", str(self.file), *options])
        return code, self.capsys.readouterr().out

    def findings(self, **changed: Any) -> tuple[int, set[tuple[str, str]], str]:
        """Return the exit code, level and check of each finding, and all texts."""
        code, out = self.doctor("--json", **changed)
        found = json.loads(out)["findings"]
        return code, {(one["level"], one["check"]) for one in found}, out


@pytest.fixture
def patient(
    dsn: str, pg: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Patient:
    return Patient(dsn, pg, tmp_path, monkeypatch, capsys)


def test_prepared_source_has_no_problems_and_nothing_is_created(patient: Patient) -> None:
    code, found, out = patient.findings()
    assert code == 0, out
    checks = ("packages", "spark", "jars", "lake", "source", "pooler", "settings", "clock", "tables", "state")
    assert {("ok", check) for check in checks} <= found
    with patient.pg.cursor() as cursor:
        cursor.execute("select count(*) from pg_namespace where nspname = '_pgrepl'")
        assert cursor.fetchone() == (0,)
    assert not Path(patient.fields["lake"]).exists()
    code, out = patient.doctor()
    assert code == 0
    assert out.splitlines()[-1].startswith(f"pipeline {patient.fields['name']}: 0 problems, ")


def test_each_fault_is_problem_with_hint_and_exit_code_1(patient: Patient, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    faults = {
        "trust_table_owners": False,
        "tables": ["public.missing"],
        "lake": str(tmp_path / "file" / "lake"),
    }
    code, found, out = patient.findings(**faults)
    assert code == 1
    assert {("problem", check) for check in ("lake", "role", "tables")} <= found
    assert ("ok", "source") in found, out


def test_delta_jars_missing_in_the_named_folder_are_a_warning(patient: Patient, tmp_path: Path) -> None:
    patient.patch.setenv(JARS_VARIABLE, str(tmp_path))
    code, found, out = patient.findings()
    assert code == 0, out
    assert {("warning", "jars"), ("ok", "spark")} <= found


def test_delta_jars_which_no_app_needs_may_be_missing(patient: Patient, tmp_path: Path) -> None:
    patient.patch.delenv(JARS_VARIABLE, raising=False)
    patient.patch.chdir(tmp_path)
    _, found, out = patient.findings()
    assert ("ok", "jars") in found, out


def test_unreachable_source_is_problem_and_host_is_checked_all_the_same(patient: Patient) -> None:
    patient.patch.setenv("PGREPL_DSN", "host=127.0.0.1 port=1 dbname=x user=y")
    code, found, _ = patient.findings()
    assert code == 1
    assert {("problem", "source"), ("problem", "state"), ("ok", "packages"), ("ok", "lake")} <= found


def test_inactive_slot_of_another_pipeline_is_reported(patient: Patient) -> None:
    slot = f"pgrepl_left_{os.urandom(4).hex()}"
    patient.pg.cursor().execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (slot,))
    try:
        _, found, out = patient.findings()
        assert ("warning", "slot") in found
        assert f"slot {slot} is not read by any process" in out
    finally:
        patient.pg.cursor().execute("select pg_drop_replication_slot(%s)", (slot,))


def test_pooler_is_found_by_pid_of_login(patient: Patient, dsn: str) -> None:
    """A pooler answers the login itself, with a pid of its own, as PgBouncer does."""
    with closing(pooler(dsn)) as listening:
        parts = psycopg2.extensions.parse_dsn(dsn)
        host, port = listening.getsockname()
        through = {**parts, "host": host, "port": str(port), "sslmode": "disable", "gssencmode": "disable"}
        patient.patch.setenv("PGREPL_DSN", psycopg2.extensions.make_dsn(**through))
        _, found, _ = patient.findings()
    assert ("warning", "pooler") in found


def pooler(dsn: str) -> socket.socket:
    """Forward connections to the server, and change the pid in its BackendKeyData."""
    parts = psycopg2.extensions.parse_dsn(dsn)
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):
            while True:
                client, _ = listening.accept()
                server = socket.create_connection((parts["host"], int(parts["port"])))
                threading.Thread(target=forward, args=(client, server, False), daemon=True).start()
                threading.Thread(target=forward, args=(server, client, True), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return listening


def forward(source: socket.socket, target: socket.socket, changes_pid: bool) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            at = data.find(b"K\x00\x00\x00\x0c") if changes_pid else -1
            if at >= 0:
                data = data[: at + 5] + struct.pack("!I", 4_000_000) + data[at + 9 :]
                changes_pid = False
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_script_of_provider_names_role_and_tables(patient: Patient, provider: str) -> None:
    code, out = patient.doctor("--script", provider, tables=["public.orders", '"My Schema".*'])
    assert code == 0
    assert "CREATE ROLE replicator LOGIN" in out
    assert 'GRANT SELECT ON "public"."orders" TO replicator;' in out
    assert 'GRANT SELECT ON ALL TABLES IN SCHEMA "My Schema" TO replicator;' in out
    statements = [line for line in out.splitlines() if line and not line.startswith("--")]
    # Run unread, it neither creates a known password nor limits the slots of other programs.
    assert not [line for line in statements if "PASSWORD" in line or "max_slot_wal_keep_size" in line]


def test_sequence_that_may_not_be_read_is_said_once_of_a_pipeline_that_runs(pg: Any, dsn: str) -> None:
    role = f"r_{os.urandom(4).hex()}"
    pg.cursor().execute(f"create table a (id int primary key); create sequence s; create role {role} login")
    pg.cursor().execute(f"grant pg_monitor to {role}; alter role {role} replication")
    try:
        recorded = Recorded(dsn, sequences=True)
        login = psycopg2.extensions.make_dsn(dsn, user=role)
        diagnosis = diagnose(Access(recorded.pipeline, login, dsn))
        said = [one for one in diagnosis.findings if one.text.startswith("sequence public.s: role")]
        assert [one.level for one in said] == ["warning"], diagnosis.to_text()
    finally:
        pg.cursor().execute(f"drop owned by {role}; drop role {role}")


def test_rights_of_script_let_role_replicate(patient: Patient, dsn: str) -> None:
    """The statements are run as they are printed, except for the placeholders."""
    role, pg = f"r_{os.urandom(4).hex()}", patient.pg
    pg.cursor().execute("create sequence invoice_numbers")
    fields = {**patient.fields, "tables": ("public.orders",), "sequences": True}
    script = source_script(Pipeline(**fields), "self-hosted")
    statements = script.replace("replicator", role)
    statements = statements.replace("OWNER_OF_TABLES", f"{role}_owner")
    statements = statements.replace("DATABASE_NAME", psycopg2.extensions.parse_dsn(dsn)["dbname"])
    lines = [line for line in statements.splitlines() if line.startswith(("CREATE", "GRANT"))]
    with pg.cursor() as cursor:
        cursor.execute(f"create role {role}_owner")
        cursor.execute(f"alter table orders owner to {role}_owner")
        for line in lines:
            cursor.execute(line)
        cursor.execute(f"alter role {role} password 'sesame'")
    try:
        login = psycopg2.extensions.make_dsn(dsn, user=role, password="sesame")
        patient.patch.setenv("PGREPL_DSN", login)
        code, found, out = patient.findings(trust_table_owners=False, sequences=True)
        assert code == 0, out
        assert ("ok", "sequences") in found, out
        pg.cursor().execute(f"revoke select on sequence invoice_numbers from {role}")
        code, found, out = patient.findings(trust_table_owners=False, sequences=True)
        assert (code, ("warning", "sequences") in found) == (0, True), out
        assert "sequence public.invoice_numbers: role" in out
    finally:
        with pg.cursor() as cursor:
            cursor.execute(
                f"alter table orders owner to current_user; drop owned by {role}; drop role {role}"
            )
            cursor.execute(f"drop role {role}_owner")
