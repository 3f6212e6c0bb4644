"""Generated pipeline files: valid values of every setting, and values of a wrong type or out of range."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

_TABLES = ("public.orders", "sales.items", '"My Schema"."a.b"')
_COLUMNS = ("public.orders.id", "public.orders.total", 'sales.items."Odd.Name"')
_TEXT = st.text("abc-_.", max_size=8)
_TABLE = st.sampled_from(_TABLES)
_COLUMN = st.sampled_from(_COLUMNS)
_SIZE = st.integers(1, 2**40)
_SOME_COLUMNS = st.lists(_COLUMN, unique=True, max_size=2)


def _number(most: float) -> st.SearchStrategy[float]:
    return st.integers(1, int(most)) | st.floats(0.001, most)


_POLICIES: dict[str, st.SearchStrategy[Any]] = {
    "truncate": st.sampled_from(["apply", "ignore", "error"]),
    "deletes": st.sampled_from(["hard", "soft"]),
    "history": st.booleans(),
    "on_drift": st.sampled_from(["evolve", "ignore", "error"]),
    "merge": st.sampled_from(["auto", "rewrite", "merge_on_read"]),
    "merge_interval_s": st.just(0) | _number(60),
    "max_staleness_s": _number(1e9),
    "max_write_amplification": _number(1e6),
    "cluster_by": st.lists(_TEXT, max_size=2),
}
_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "infinity": st.sampled_from(["error", "null", "sentinel"]),
    "numeric_nan": st.sampled_from(["error", "null"]),
}
_PARTITION = st.sampled_from([None, "region", "month(placed_at)", 'day("Placed at")'])
_RABBITMQ: dict[str, st.SearchStrategy[Any]] = {
    "conn_id": _TEXT,
    "tables": st.none() | st.lists(_TABLE, min_size=1, max_size=2) | st.just(["public.*"]),
    "exchange": _TEXT,
    "unrouted": st.sampled_from(["error", "drop"]),
    "begin": st.sampled_from(["oldest", "newest"]),
    "on_error": st.sampled_from(["stop_table", "skip_and_record"]),
    "unchanged": st.sampled_from(["mark", "fill", "look_up"]),
    "max_event_bytes": _SIZE,
    "publish_retention_h": _number(876_000),
    "metrics": st.sampled_from(["", "127.0.0.1:9187"]),
    "hash_columns": st.lists(st.just(_COLUMNS[0]), max_size=1),
    "mask_columns": st.lists(st.just(_COLUMNS[1]), max_size=1),
    "rename_columns": st.dictionaries(_COLUMN, st.just("new"), max_size=1),
    "new_columns": st.sampled_from(["publish", "stop"]),
    "row_filter": st.dictionaries(
        _TABLE,
        st.dictionaries(
            st.just("state"),
            st.none() | st.booleans() | st.integers() | st.lists(_TEXT | st.none(), min_size=1, max_size=2),
            min_size=1,
        ),
        max_size=1,
    ),
    "messages": st.lists(_TEXT, max_size=2),
    "transform": st.dictionaries(
        st.just("public.orders"),
        st.just("shop.events:make") | st.just({"fields": {"a": "b"}, "ops": ["insert"], "key": "id"}),
        max_size=1,
    ),
    "outbox": st.just({})
    | st.just({"table": "sales.items", "event_id": None, "headers": {"tenant": "tenant"}}),
    "source": _TEXT,
    "cloudevents": st.booleans(),
}
_PUBLISHER = st.fixed_dictionaries({"target": st.just("rabbitmq")}, optional=_RABBITMQ) | st.sampled_from(
    [
        {"target": "nats", "database": "d", "wire": "v1"},
        {"target": "nats", "format": "json", "stream": "s"},
        {"target": "kafka", "topic": "x.{schema}.{table}", "tombstones": True},
        {"target": "kafka", "format": "avro", "subject_names": "record"},
        {"target": "kafka", "format": "debezium", "database": "d", "schemas": True},
    ]
)
REQUIRED: dict[str, st.SearchStrategy[Any]] = {
    "name": st.text("abcxyz_09", min_size=1, max_size=55),
    "lake": st.sampled_from(["/srv/lake", "~/lake", "s3://bucket/lake", "gs://bucket/a/b"]),
    "tables": st.lists(_TABLE | st.just("sales.*"), min_size=1, max_size=3),
}
OPTIONAL: dict[str, st.SearchStrategy[Any]] = {
    "insert_only": st.lists(_TABLE, max_size=2),
    "new_tables": st.sampled_from(["add", "ignore", "error"]),
    "conn_id": _TEXT,
    "state_conn_id": st.none() | _TEXT,
    "slot": st.text("abc_0", max_size=63),
    "publication": _TEXT,
    "publication_mode": st.sampled_from(["create", "use"]),
    **dict.fromkeys(("event_trigger", "trust_table_owners", "protect_source"), st.booleans()),
    "slot_timeout_s": _number(1e9),
    "reconnect_s": st.just(0) | _number(1e9),
    "types": st.dictionaries(
        st.just(_COLUMNS[0]), st.sampled_from(["string", "decimal(10,2)", "array(2)"]), max_size=1
    ),
    "text_columns": st.lists(st.just(_COLUMNS[1]), max_size=1),
    "exclude_columns": st.lists(st.just(_COLUMNS[2]), max_size=1),
    "unconstrained_numeric": st.sampled_from(["string", "decimal(38,10)"]),
    "timestamp_without_tz": st.sampled_from(["ntz", "string"]),
    "per_column": st.dictionaries(_COLUMN, st.fixed_dictionaries({}, optional=_VALUES), max_size=2),
    "per_table": st.dictionaries(
        _TABLE,
        st.fixed_dictionaries(
            {},
            optional={**_POLICIES, "max_staleness_s": _number(60).map(lambda it: it + 60)}
            | {"partition_by": _PARTITION},
        ),
        max_size=2,
    ),
    **_VALUES,
    **_POLICIES,
    "max_staleness_s": _number(1e6).map(lambda it: it + 60),
    **dict.fromkeys(
        ("flush_interval_s", "consistent_point_interval_s", "maintenance_interval_s"), _number(1e9)
    ),
    **dict.fromkeys(("flush_bytes", "part_bytes", "receive_buffer_bytes", "message_bytes"), _SIZE),
    **dict.fromkeys(("batch_bytes", "slice_bytes", "snapshot_range_bytes"), _SIZE),
    "message_prefixes": st.lists(_TEXT, max_size=2).map(lambda it: ["*", *it]),
    "trigger_interval_s": st.just(0) | _number(1e9),
    "changelog_retention_h": st.integers(168, 876_000),
    "consistent_point_keep_all_h": _number(876_000),
    "consistent_point_thinning_min": _number(1e6),
    "consistent_point_retention_h": _number(168),
    "consistent_point_bytes": _number(100),
    "lock_timeout_s": _number(1e9),
    "publishers": st.dictionaries(st.sampled_from(["events"]), _PUBLISHER, max_size=1),
    "target_database": st.sampled_from(["{pipeline}", "{schema}"]),
    "target_table": st.sampled_from(["{schema}_{table}", "{table}"]),
    "target_schemas": st.dictionaries(st.just("public"), st.just("shop"), max_size=1),
    "target_tables": st.dictionaries(_TABLE, st.just("purchases"), max_size=1),
}
FILES = st.fixed_dictionaries(REQUIRED, optional=OPTIONAL)
"""Valid pipeline files, but for the few rules that compare settings."""
