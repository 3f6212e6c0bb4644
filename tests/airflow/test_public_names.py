"""Names that users import, and parameters: one that goes or changes breaks their DAGs and programs."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest

from airflow_provider_pgrepl import assets, events, lake

_APPLICATION = "pipeline spark_conn_id master application name preflight stop_timeout_s poll_interval_s"
CLASSES = {
    "hooks.replication.PgReplicationHook": "",
    "operators.maintenance.PgMaintenanceOperator": "pipeline tables limit_s",
    "operators.publish.PgPublishOperator": f"publisher mode hand_over_after_s {_APPLICATION}",
    "operators.replication.PgReplicationOperator": (
        "mode publisher metrics_port metrics_host hand_over_after_s on_table_errored on_lag"
        f" lag_s {_APPLICATION}"
    ),
    "operators.resnapshot.PgResnapshotOperator": f"tables reason resync {_APPLICATION}",
    "operators.resnapshot.PgAddTablesOperator": f"tables {_APPLICATION}",
    "operators.verify.PgVerifyOperator": f"tables check sample show_keys repair timeout_s {_APPLICATION}",
    "operators.snapshot.PgSnapshotOperator": (
        f"tables new_epoch resync give_up adopt take_over_slot {_APPLICATION}"
    ),
    "operators.skip.PgSkipTransactionOperator": "pipeline lsn unchanged_tables report_only",
    "operators.tables.PgPauseTablesOperator": "pipeline tables",
    "operators.tables.PgResumeTablesOperator": "pipeline tables",
    "operators.tables.PgRetryTablesOperator": "tables pipeline",
    "operators.tables.PgRemoveTablesOperator": "drop_lake_tables pipeline tables",
    "operators.teardown.PgTeardownOperator": "pipeline drop_lake give_up report_only timeout_s",
    "sensors.applied.PgAppliedSensor": "pipeline tables as_of settle_s deferrable",
    "sensors.drift.PgSchemaDriftSensor": "pipeline fail_on mark_errored until_drift sql migration_file"
    " database_conn_id migration_timeout_s deferrable",
    "sensors.health.PgReplicationHealthSensor": "pipeline fail_on lag_s wal_warning wal_failure stalled_s"
    " heartbeat_s is_continuous deferrable",
}
"""By class the parameters that are ours, in the order of the classes that take them."""
HOOK = (
    "check create_publication create_slot drop_publication drop_slot get_publication get_slot get_uri lag"
    " list_tables test_connection"
)
LAKE = {
    "at": "moment epoch",
    "changes": "tables after follow",
    "create_views": "spark prefix names variant",
    "epoch": None,
    "lsn": None,
    "messages": "above_lsn prefix epoch",
    "register_in_unity": "url catalog token",
    "register_tables": "spark",
    "sql": "query",
    "sql_reader": "query",
    "table": "name",
    "tables": None,
}
LAKE_TABLE = {
    "history_to_arrow": "",
    "history_to_spark": "spark",
    "is_verified": "",
    "to_arrow": "",
    "to_spark": "spark",
}


def parameters(function: object) -> list[str]:
    names = inspect.signature(function).parameters  # type: ignore[arg-type]
    return [name for name in names if name not in ("self", "kwargs")]


def members(of: type) -> dict[str, str | None]:
    own = {name: member for name, member in vars(of).items() if not name.startswith("_")}
    return {name: " ".join(parameters(member)) if callable(member) else None for name, member in own.items()}


@pytest.mark.parametrize("path", CLASSES)
def test_class_of_airflow_has_its_place_and_its_parameters(path: str) -> None:
    module, _, name = path.rpartition(".")
    found = getattr(import_module(f"airflow_provider_pgrepl.{module}"), name)
    own = [base for base in found.__mro__ if base.__module__.startswith("airflow_provider_pgrepl")]
    names = [name for base in own if "__init__" in vars(base) for name in parameters(vars(base)["__init__"])]
    assert list(dict.fromkeys(names)) == CLASSES[path].split()


def test_hook_has_its_methods() -> None:
    from airflow_provider_pgrepl.hooks.replication import PgReplicationHook

    assert set(HOOK.split()) <= {name for name in vars(PgReplicationHook) if not name.startswith("_")}


def test_lake_has_its_names() -> None:
    assert lake.__all__ == [
        "Change",
        "ChangeStream",
        "Lake",
        "LakeTable",
        "UnverifiedWarning",
        "build_session",
        "open_lake",
        "to_json",
    ]
    assert parameters(lake.open_lake) == ["lake", "lsn", "epoch"]
    assert members(lake.Lake) == LAKE
    assert members(lake.LakeTable) == LAKE_TABLE


def test_assets_have_their_names() -> None:
    assert assets.__all__ == ["lake_asset"]
    assert parameters(assets.lake_asset) == ["pipeline", "table", "state_conn_id", "every_s"]


def test_events_have_their_names() -> None:
    assert events.__all__ == ["BusinessEvent", "Change", "CreekClient"]
    assert all(hasattr(events, name) for name in events.__all__)
    assert parameters(events.BusinessEvent) == [
        *("payload", "key", "route", "type", "event_id", "headers", "content_type"),
    ]
