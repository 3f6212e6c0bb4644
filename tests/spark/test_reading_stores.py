"""Spark reads a lake in a store by Hadoop's connector: at a point, and as of a transaction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from airflow_provider_pgrepl.replication.lake.read import consistent_arrow
from airflow_provider_pgrepl.replication.lake.time_travel.as_of import arrow_view_as_of
from airflow_provider_pgrepl.replication.settings.stores import AZURE_KEY, AZURE_SAS
from tests.support.landed import Landed
from tests.support.replicated import execute
from tests.support.spark_program import JARS, said_by
from tests.support.stores import AzureServer, StoreServer, service_account_key, shared_access
from tests.support.tls_front import TOKEN_HOST, tls_front

PROGRAM = Path(__file__).with_name("reading_store.py")
TABLES = ("public.orders", "public.items")
# An account with folders speaks another language, which the emulator has not.
AZURES_LANGUAGE = "spark.hadoop.fs.azure.fns.account.service.type BLOB"


def landed(dsn: str, folder: Path, lake: str) -> Landed:
    """A lake whose durable changes are newer than its newest point, at which the tables are."""
    execute(
        dsn,
        "create table orders (id bigint primary key, state text, total numeric(12,2), at timestamptz)",
        "create table items (id uuid primary key default gen_random_uuid(), of bigint, tags text[])",
    )
    found = Landed(dsn, folder, TABLES, lake=lake, merge="merge_on_read")
    found.begin()
    execute(
        dsn,
        "insert into orders select g, 'new', g / 7.0, now() from generate_series(1, 500) g",
        "insert into items (of, tags) select g, array['a', null] from generate_series(1, 500) g",
    )
    found.receive()
    assert [result.error for result in found.apply()] == [None, None]
    execute(
        dsn,
        "update orders set state = 'paid' where id % 3 = 0",
        "delete from items where of % 5 = 0",
        "insert into orders values (1001, 'late', 1.5, now())",
    )
    found.receive()
    assert counted(consistent_arrow(found.pipeline).table(TABLES[0])) == (500, 0)
    assert counted(arrow_view_as_of(found.pipeline).table(TABLES[0])) == (501, 166)
    return found


def counted(orders: Any) -> tuple[int, int]:
    return orders.num_rows, orders.column("state").to_pylist().count("paid")


def check_spark_reads(replicated: Landed) -> None:
    """Check that Spark reads the rows that Arrow reads."""
    said = said_by(PROGRAM, str(replicated.file), *TABLES)
    assert [table.get("table") for table in said] == list(TABLES), said
    point, newest = consistent_arrow(replicated.pipeline), arrow_view_as_of(replicated.pipeline)
    for table in said:
        name = table["table"]
        assert keys(table["point"]) == sorted(map(str, point.table(name).column("id").to_pylist()))
        assert keys(table["newest"]) == sorted(map(str, newest.table(name).column("id").to_pylist()))
    assert sum('"state": "paid"' in row for row in said[0]["newest"]) == 166


def keys(rows: list[str]) -> list[str]:
    return sorted(str(json.loads(row)["id"]) for row in rows)


def test_spark_reads_at_a_point_and_as_of_the_newest_transaction(s3_lake, dsn, tmp_path):
    replicated = landed(dsn, tmp_path, s3_lake)
    check_spark_reads(replicated)


def test_spark_reads_other_stores_with_keys_that_are_no_settings(
    other_store: StoreServer, other_lake, dsn, tmp_path, monkeypatch
):
    """Hadoop's own connectors ask for hosts of Google's and Microsoft's, which are the emulators here."""
    replicated = landed(dsn, tmp_path, other_lake)
    with tls_front(tmp_path, other_store.hosts, other_store.port) as front:
        settings = [f"spark.driver.extraJavaOptions {front.java_options}", AZURES_LANGUAGE]
        (tmp_path / "spark-defaults.conf").write_text("\n".join(settings))
        monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
        if isinstance(other_store, AzureServer):
            check_spark_reads(replicated)
            monkeypatch.delenv(AZURE_KEY)
            monkeypatch.setenv(AZURE_SAS, shared_access("rl"))
        else:
            key = tmp_path / "key.json"
            key.write_text(service_account_key(f"https://{TOKEN_HOST}/token"))
            monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(key))
        check_spark_reads(replicated)
        assert front.asked & set(other_store.hosts)


def test_a_session_without_the_connector_says_what_to_do(s3_lake, dsn, tmp_path):
    replicated = landed(dsn, tmp_path, s3_lake)
    jars = tmp_path / "jars"
    jars.mkdir()
    for jar in JARS.glob("*.jar"):
        (jars / jar.name).symlink_to(jar)
    assert not (jars / "s3a").exists()
    said = said_by(PROGRAM, str(replicated.file), *TABLES, jars=jars)
    assert said[0]["error"] == "ToolError"
    assert "make s3a" in said[0]["said"]
