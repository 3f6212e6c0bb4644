"""Lake tables in Unity Catalog: what is registered is true, also after DDL; other tables stay untouched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from deltalake import Field
from deltalake.schema import PrimitiveType

from airflow_provider_pgrepl.__main__ import main
from airflow_provider_pgrepl.errors import LakeError
from airflow_provider_pgrepl.replication.catalogs import unity as unity_catalog
from airflow_provider_pgrepl.replication.catalogs.unity import changes, register_in_unity
from airflow_provider_pgrepl.replication.catalogs.unity_client import UnityServer
from airflow_provider_pgrepl.replication.delta.table import create_delta, open_delta
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoint, ConsistentPoints
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from tests.support.landed import Landed
from tests.support.replicated import execute
from tests.support.unity import Unity, running_unity, stand_in

TABLE = "public.orders"
NAME = "shop.public_orders"
STATE = Field("state", PrimitiveType("string"))
KEY = pa.field("id", pa.int64(), nullable=False)


@pytest.fixture
def unity() -> Iterator[Unity]:
    with running_unity() as server:
        yield server


def register(unity: Unity, pipeline: Pipeline) -> dict[str, str]:
    return register_in_unity(pipeline, unity.url, unity.catalog, unity.token)


def made(lake: Path, *tables: str, schema: pa.Schema | None = None, **options: Any) -> Pipeline:
    """A pipeline with empty lake tables, and a point that holds them."""
    pipeline = Pipeline(name="shop", lake=str(lake), tables=("public.*",), **options)
    for table in tables:
        create_delta(f"{pipeline.lake_root}/{table.replace('.', '/')}", schema or pa.schema([KEY]), {})
    point = ConsistentPoint(Epoch(1), LSN(1), datetime.now(UTC), dict.fromkeys(tables, 0))
    ConsistentPoints(pipeline.lake_root).append(point)
    return pipeline


def columns(table: dict[str, Any]) -> list[tuple[str, str, bool]]:
    return [(one["name"], one["type_text"], one["nullable"]) for one in table["columns"]]


def test_a_registration_follows_the_table_and_leaves_its_files(unity, dsn, tmp_path):
    execute(dsn, "create table orders (id bigint primary key, state text, total int)")
    landed = Landed(dsn, tmp_path, (TABLE,), name="shop", history=True)
    landed.begin()
    change(landed, "insert into orders values (1, 'new', 2)")
    lake = landed.lake_path(TABLE)
    names = register(unity, landed.pipeline)
    full = f"{unity.catalog}.{NAME}"
    assert names == {lake: full, f"{lake}~history": f"{full}_history"}
    first = unity.table(NAME)
    assert (first["table_type"], first["data_source_format"]) == ("EXTERNAL", "DELTA")
    assert first["storage_location"] == f"file://{lake}"
    kept = [("id", "bigint"), ("state", "string"), ("total", "int")]
    assert [one[:2] for one in columns(first)][:3] == kept
    before = open_delta(lake).version()
    assert register(unity, landed.pipeline) == names
    assert unity.table(NAME)["table_id"] == first["table_id"], "what is true was registered anew"
    change(landed, "alter table orders alter column total type bigint", "update orders set total = 3")
    change(landed, "alter table orders add column paid date", "update orders set paid = '2026-01-31'")
    register(unity, landed.pipeline)
    second = unity.table(NAME)
    assert ("paid", "date", True) in columns(second)
    assert second["table_id"] == first["table_id"], "what hangs on the table, as grants, would be gone"
    assert ("total", "bigint", True) in columns(second)
    assert open_delta(lake).version() > before
    assert open_delta(lake).to_pyarrow_table()["id"].to_pylist() == [1]
    assert ("paid", "date", True) in columns(unity.table(f"{NAME}_history"))


@pytest.mark.parametrize("server", [running_unity, partial(stand_in, has_delta_api=False)])
def test_a_server_without_the_delta_api_has_the_table_anew(tmp_path, monkeypatch, server):
    if server is running_unity:
        monkeypatch.setattr(UnityServer, "has_delta_api", lambda *_: False)
    with server() as unity:
        pipeline = made(tmp_path / "lake", TABLE)
        register(unity, pipeline)
        first = unity.table(NAME)
        first["columns"][0]["comment"], lake = "mine", open_delta(f"{pipeline.lake_root}/public/orders")
        unity.ask("DELETE", f"tables/{unity.catalog}.{NAME}")
        unity.ask("POST", "tables", first)
        lake.alter.add_columns(STATE)
        register(unity, pipeline)
        second = unity.table(NAME)
        assert columns(second) == [("id", "bigint", False), ("state", "string", True)]
        assert [one.get("comment") for one in second["columns"]] == ["mine", None]
        assert open_delta(f"{pipeline.lake_root}/public/orders").version() == 1


def test_a_change_that_is_refused_leaves_what_is_registered(unity, tmp_path, monkeypatch):
    pipeline = made(tmp_path / "lake", TABLE)
    register(unity, pipeline)
    first = unity.table(NAME)
    open_delta(f"{pipeline.lake_root}/public/orders").alter.add_columns(STATE)
    monkeypatch.setattr(unity_catalog, "changes", lambda _, table: changes(str(UUID(int=1)), table))
    with pytest.raises(LakeError, match=r"public_orders: .*rejects the request with status 409"):
        register(unity, pipeline)
    assert unity.table(NAME) == first


def change(landed: Landed, *statements: str) -> None:
    execute(landed.dsn, *statements)
    landed.receive()
    assert [result.error for result in landed.apply()] == [None]


def test_every_type_of_a_lake_table_is_one_of_the_catalogs(unity, tmp_path):
    nested = pa.struct([pa.field("Inner", pa.list_(pa.int16())), pa.field("at", pa.timestamp("us", "UTC"))])
    kinds = {
        "flag": (pa.bool_(), "BOOLEAN", "boolean"),
        "small": (pa.int16(), "SHORT", "smallint"),
        "number": (pa.int32(), "INT", "int"),
        "large": (pa.int64(), "LONG", "bigint"),
        "share": (pa.float32(), "FLOAT", "float"),
        "rate": (pa.float64(), "DOUBLE", "double"),
        "price": (pa.decimal128(12, 2), "DECIMAL", "decimal(12,2)"),
        "text": (pa.string(), "STRING", "string"),
        "bytes": (pa.binary(), "BINARY", "binary"),
        "day": (pa.date32(), "DATE", "date"),
        "at": (pa.timestamp("us", "UTC"), "TIMESTAMP", "timestamp"),
        "wall": (pa.timestamp("us"), "TIMESTAMP_NTZ", "timestamp_ntz"),
        "list": (pa.list_(pa.decimal128(5, 1)), "ARRAY", "array<decimal(5,1)>"),
        "map": (pa.map_(pa.string(), pa.int64()), "MAP", "map<string,bigint>"),
        "pair": (nested, "STRUCT", "struct<inner:array<smallint>,at:timestamp>"),
    }
    schema = pa.schema([KEY, *(pa.field(name, kind) for name, (kind, _, _) in kinds.items())])
    pipeline = made(tmp_path / "lake", TABLE, schema=schema)
    register(unity, pipeline)
    found = unity.table(NAME)
    named = {one["name"]: (one["type_name"], one["type_text"]) for one in found["columns"]}
    assert named == {"id": ("LONG", "bigint")} | {name: kind[1:] for name, kind in kinds.items()}
    assert json.loads(found["columns"][-1]["type_json"])["type"]["fields"][0]["name"] == "Inner"
    register(unity, pipeline)
    assert unity.table(NAME) == found
    open_delta(f"{pipeline.lake_root}/public/orders").alter.add_columns(STATE)
    register(unity, pipeline)
    changed = unity.table(NAME)
    texts = [one[:2] for one in columns(changed)]
    assert texts == [
        *((one["name"], one["type_text"]) for one in found["columns"][:-1]),
        texts[-2],
        texts[-1],
    ]
    assert (texts[-1], changed["table_id"]) == (("state", "string"), found["table_id"])
    register(unity, pipeline)
    assert unity.table(NAME) == changed, "what is true was changed again"


def test_comments_and_partitions_are_the_tables_and_a_readers_comment_stays(unity, tmp_path):
    pipeline = made(tmp_path / "lake", TABLE)
    schema = pa.schema([KEY, pa.field("state", pa.string(), metadata={"comment": "where it stands"})])
    uri = f"{pipeline.lake_root}/public/items"
    create_delta(uri, schema, {}, partition_by=["state"], description="What is sold")
    both = dict.fromkeys((TABLE, "public.items"), 0)
    ConsistentPoints(pipeline.lake_root).append(ConsistentPoint(Epoch(1), LSN(2), datetime.now(UTC), both))
    unity.ask("POST", "schemas", {"name": "shop", "catalog_name": unity.catalog})
    plain = {"name": "id", "type_name": "LONG", "type_text": "BIGINT", "nullable": False, "position": 0}
    plain["type_json"] = json.dumps({"name": "id", "type": "long", "nullable": False, "metadata": {}})
    place = f"{pipeline.lake_root}/public/orders"
    unity.ask("POST", "tables", body(unity, place, plain | {"comment": "mine"}, comment="mine, too"))
    mine = unity.table(NAME)
    register(unity, pipeline)
    items = unity.table("shop.public_items")
    assert items["comment"] == "What is sold"
    assert [one.get("comment") for one in items["columns"]] == [None, "where it stands"]
    assert [one.get("partition_index") for one in items["columns"]] == [None, 0]
    assert unity.table(NAME) == mine


def body(unity: Unity, place: str, column: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "name": "public_orders",
        "catalog_name": unity.catalog,
        "schema_name": "shop",
        "table_type": "EXTERNAL",
        "data_source_format": "DELTA",
        "storage_location": place,
        "columns": [column],
        **more,
    }


@pytest.mark.parametrize(
    ("place", "table_format", "said"),
    [
        ("other", "DELTA", "stands for another place: file://"),
        ("public/orders", "PARQUET", "is no external Delta table: EXTERNAL PARQUET"),
    ],
)
def test_register_keeps_conflicting_catalog_entry_and_adds_all_other_tables(
    unity, tmp_path, place, table_format, said
):
    pipeline = made(tmp_path / "lake", TABLE, "public.zebras", "public.ants")
    unity.ask("POST", "schemas", {"name": "shop", "catalog_name": unity.catalog})
    column = {"name": "x", "type_name": "STRING", "type_text": "string", "nullable": True, "position": 0}
    column["type_json"] = json.dumps({"name": "x", "type": "string", "nullable": True, "metadata": {}})
    wanted = body(unity, f"{pipeline.lake_root}/{place}", column, data_source_format=table_format)
    theirs = unity.ask("POST", "tables", wanted)
    with pytest.raises(LakeError) as refused:
        register(unity, pipeline)
    assert f"{unity.catalog}.{NAME} {said}" in refused.value.message
    assert unity.table(NAME)["table_id"] == theirs["table_id"]
    assert unity.tables("shop") == {"public_ants", "public_orders", "public_zebras"}


def test_a_name_that_the_server_refuses_stops_no_other(unity, tmp_path):
    pipeline = made(tmp_path / "lake", TABLE, "public.zebras", target_tables={TABLE: "o" * 300})
    with pytest.raises(LakeError, match="Name cannot "):
        register(unity, pipeline)
    assert unity.tables("shop") == {"public_zebras"}


def test_a_folder_that_no_url_can_spell_is_registered_and_known_again(unity, tmp_path):
    pipeline = made(tmp_path / "Our lake of 2026", TABLE)
    register(unity, pipeline)
    first = unity.table(NAME)
    assert first["storage_location"].endswith("/Our%20lake%20of%202026/public/orders")
    register(unity, pipeline)
    assert unity.table(NAME)["table_id"] == first["table_id"]


def test_a_table_that_was_dropped_since_the_point_stops_no_other(unity, tmp_path):
    pipeline = made(tmp_path / "lake", TABLE, "public.zebras")
    point = ConsistentPoint(Epoch(1), LSN(2), datetime.now(UTC), {TABLE: 0, "public.gone": 0})
    ConsistentPoints(pipeline.lake_root).append(point)
    with pytest.raises(LakeError, match="public_gone: there is no lake table any more"):
        register(unity, pipeline)
    assert unity.tables("shop") == {"public_orders"}


def test_a_catalog_is_not_made(unity, tmp_path):
    pipeline = made(tmp_path / "lake", TABLE)
    with pytest.raises(LakeError, match="has no catalog mian"):
        register_in_unity(pipeline, unity.url, "mian", unity.token)


def test_a_token_is_asked_for_and_never_shown(unity, tmp_path):
    if unity.token is None:
        pytest.skip("the server has no logins")
    pipeline = made(tmp_path / "lake", TABLE)
    with pytest.raises(LakeError, match="asks for a token") as without:
        register_in_unity(pipeline, unity.url, unity.catalog)
    assert "UNITY_CATALOG_TOKEN" in without.value.hint
    with pytest.raises(LakeError, match="does not know the token") as wrong:
        register_in_unity(pipeline, unity.url, unity.catalog, "a-wrong-secret")
    assert "secret" not in str(wrong.value)


def test_the_command_registers_and_prints_the_names(unity, tmp_path, monkeypatch, capsys):
    pipeline = made(tmp_path / "lake", TABLE, "public.ants")
    file = tmp_path / "shop.json"
    file.write_text(json.dumps({"name": "shop", "lake": pipeline.lake, "tables": ["public.*"]}))
    monkeypatch.setenv("UNITY_CATALOG_TOKEN", unity.token or "any")
    line = ["catalog", str(file), "--unity", unity.url + "/"]
    assert main([*line, "--unity-catalog", unity.catalog]) == 0
    named = "".join(f"{unity.catalog}.shop.{name}\n" for name in ("public_ants", "public_orders"))
    assert capsys.readouterr().out == named
    assert unity.tables("shop") == {"public_ants", "public_orders"}
    assert main(line) == 78
    assert "--unity-catalog NAME" in capsys.readouterr().err
