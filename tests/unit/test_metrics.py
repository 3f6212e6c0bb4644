"""Metrics of apps: their values, their bounds, and the documents and queries that name them."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from importlib import util
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from airflow_provider_pgrepl.cli.apps import DASHBOARDS, GRAFANA, RULES, copy_dashboards
from airflow_provider_pgrepl.cli.commands import COMMANDS
from airflow_provider_pgrepl.errors import ConfigError, LakeUnavailableError, PgReplError, ToolError
from airflow_provider_pgrepl.replication.app.metrics.publisher import PublisherCollector
from airflow_provider_pgrepl.replication.app.metrics.replication import (
    MAX_TABLES,
    OTHER,
    ErrorCounts,
    Observed,
    ReplicationCollector,
)
from airflow_provider_pgrepl.replication.app.status.summary import LagMeter
from airflow_provider_pgrepl.replication.events.publish.record import PublisherProgress
from airflow_provider_pgrepl.replication.lake.apply.work_item import ApplierProgress
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.receiver.changelog_feed import ReceiverProgress
from airflow_provider_pgrepl.replication.runtime.metrics_endpoint import check_client, metrics_address
from airflow_provider_pgrepl.replication.state import source_tokens
from airflow_provider_pgrepl.replication.state.progress import TableMerges
from airflow_provider_pgrepl.replication.state.tables import TableCondition, TableState
from tests.support.metrics import queried, queries

ROOT = Path(__file__).resolve().parents[2]
NOW = datetime(2026, 1, 1, tzinfo=UTC)
T = TableName("public", "t")


def condition(state: TableState, error: str = "") -> TableCondition:
    return TableCondition(state, error, NOW)


def collector(
    observed: Observed,
    received: ReceiverProgress | None = None,
    applied: ApplierProgress | None = None,
    errors: ErrorCounts | None = None,
) -> ReplicationCollector:
    received, applied = received or ReceiverProgress(), applied or ApplierProgress()
    lag = LagMeter(lambda: received, lambda: applied)
    return ReplicationCollector(
        "shop", lambda: received, lambda: applied, lambda: observed, lag, errors or ErrorCounts()
    )


def scraped(one: ReplicationCollector | PublisherCollector) -> dict[tuple[str, frozenset], float]:
    """Return the values of a scrape by name and labels, without the label of the pipeline."""
    registry = CollectorRegistry()
    registry.register(one)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, frozenset((key, value) for key, value in sample.labels.items() if key != "pipeline")): (
            sample.value
        )
        for family in families
        for sample in family.samples
    }


def series(name: str, **labels: str) -> tuple[str, frozenset]:
    return name, frozenset(labels.items())


def test_values_are_those_that_the_process_holds():
    received = ReceiverProgress(LSN(900), LSN(800), LSN(700), LSN(900), 5, changes=7, committed_bytes=70)
    applied = ApplierProgress(version=4, applied_lsn=LSN(599), commit_ts=NOW, changes=6)
    applied.merges_ended, applied.merge_seconds, applied.merged_bytes = 3, 1.5, 60
    applied.merges = {T.path: TableMerges(0.5, 60, 10, waiting_s=2.0)}
    observed = Observed(
        is_source_up=True,
        is_state_up=True,
        end=LSN(1000),
        is_slot_active=True,
        is_slot_lost=False,
        retained_bytes=400,
        limit_bytes=float("inf"),
        tables={T: condition(TableState.STREAMING)},
    )
    found = scraped(collector(observed, received, applied))
    assert found[series("pgrepl_received_lsn")] == 900
    assert found[series("pgrepl_confirmed_lsn")] == 700
    assert found[series("pgrepl_lag_bytes")] == 300
    assert found[series("pgrepl_lag_seconds")] > 0
    assert found[series("pgrepl_wal_limit_bytes")] == float("inf")
    assert found[series("pgrepl_merge_seconds_count")] == 3
    assert found[series("pgrepl_merge_seconds_sum")] == 1.5
    assert found[series("pgrepl_tables", state="streaming")] == 1
    assert found[series("pgrepl_tables", state="errored")] == 0
    assert found[series("pgrepl_table_state", table="public.t", state="streaming")] == 1
    assert found[series("pgrepl_table_lag_seconds", table="public.t")] == 2
    applied.caught_up, applied.version = True, 5
    assert scraped(collector(observed, received, applied))[series("pgrepl_lag_seconds")] == 0


def test_hostile_table_name_stays_one_label():
    table = TableName('s"\n', 'x"} 1\npgrepl_fake 1\\')
    observed = Observed(tables={table: condition(TableState.ERRORED, "DriftError")})
    found = scraped(collector(observed))
    assert found[series("pgrepl_table_state", table=str(table), state="errored")] == 1
    assert not [name for name, _ in found if name == "pgrepl_fake"]


def test_tables_beyond_the_limit_have_no_series_and_errored_ones_come_first():
    states = {TableName("public", f"t{number:05}"): TableState.STREAMING for number in range(MAX_TABLES + 5)}
    last = max(states)
    states[last] = TableState.ERRORED
    found = scraped(collector(Observed(tables={name: condition(state) for name, state in states.items()})))
    assert sum(name == "pgrepl_table_state" for name, _ in found) == MAX_TABLES
    assert found[series("pgrepl_table_state", table=str(last), state="errored")] == 1
    assert found[series("pgrepl_tables_omitted")] == 5
    assert found[series("pgrepl_tables", state="streaming")] == MAX_TABLES + 4


def test_figures_stay_when_the_source_is_away():
    observed = Observed(is_source_up=True, end=LSN(1000), retained_bytes=400)
    found = scraped(collector(replace(observed, is_source_up=False)))
    assert found[series("pgrepl_source_up")] == 0
    assert found[series("pgrepl_wal_retained_bytes")] == 400


def test_errors_are_counted_by_class_from_log_lines():
    errors = ErrorCounts()
    log = logging.Logger("metrics")
    log.addHandler(errors)
    log.warning("maintenance failed: %s", LakeUnavailableError("full", "add space"))
    log.warning("nothing of ours: %s", ValueError("x"))
    errors.add("ClassOfALaterVersion")
    found = scraped(collector(Observed(), errors=errors))
    assert found[series("pgrepl_errors_total", **{"class": "LakeUnavailableError"})] == 1
    assert found[series("pgrepl_errors_total", **{"class": OTHER})] == 1
    assert found[series("pgrepl_errors_total", **{"class": "DriftError"})] == 0
    assert not [one for one in (dict(labels).get("class", "") for _, labels in found) if one.startswith("_")]


def test_private_error_class_counts_as_its_base():
    private = source_tokens._CannotWriteError
    assert private.__base__ is PgReplError
    errors = ErrorCounts()
    errors.add(private.__name__)
    assert errors.read()["PgReplError"] == 1
    assert private.__name__ not in errors.read()


def test_address_is_local_unless_a_host_is_given(monkeypatch):
    assert metrics_address(None, None) is None
    assert metrics_address(9187, None) == ("127.0.0.1", 9187)
    assert metrics_address(9187, "0.0.0.0") == ("0.0.0.0", 9187)
    with pytest.raises(ConfigError, match="no endpoint without metrics_port"):
        metrics_address(None, "0.0.0.0")
    with pytest.raises(ConfigError, match="70000 is not a port"):
        metrics_address(70000, None)
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    monkeypatch.setattr(
        "airflow_provider_pgrepl.replication.runtime.metrics_endpoint.find_spec", util.find_spec
    )
    with pytest.raises(ToolError, match="prometheus-client"):
        check_client()


def families() -> list[Metric]:
    publisher = PublisherCollector("shop", "events", PublisherProgress)
    return [*collector(Observed()).collect(), *list(publisher.collect())[1:]]


def exported(found: Iterable[Metric]) -> set[str]:
    """Return the names under which Prometheus has the series."""
    names = set()
    for family in found:
        suffixes = {"counter": ("_total",), "summary": ("_count", "_sum")}.get(family.type, ("",))
        names |= {family.name + suffix for suffix in suffixes}
    return names


def test_reference_lists_every_metric_with_its_help():
    text = (ROOT / "docs/reference/metrics.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `(pgrepl_\w+)` \| [^|]+ \| [^|]* \| ([^|]+) \|$", text, re.MULTILINE))
    assert rows == {
        family.name + ("_total" if family.type == "counter" else ""): family.documentation
        for family in families()
    }


def test_dashboard_and_rules_query_only_metrics_that_exist():
    ours = {name for name in queried() if name.startswith("pgrepl_")}
    assert len(ours) > 25
    assert ours <= exported(families())


def test_each_alert_says_what_to_run():
    commands = {command.name for command in COMMANDS}
    rules = yaml.safe_load((DASHBOARDS / RULES).read_text())["groups"][0]["rules"]
    for rule in rules:
        assert rule["annotations"]["summary"].endswith("."), rule["alert"]
        run = re.findall(r"pgrepl ([a-z-]+) FILE.json", rule["annotations"]["command"])
        assert set(run) <= commands, rule["alert"]
        assert run, rule["alert"]


def test_dashboards_are_copied_and_never_overwritten(tmp_path):
    copied = copy_dashboards(tmp_path / "new")
    assert [file.name for file in copied] == [GRAFANA, RULES]
    assert json.loads(copied[0].read_text())["uid"] == "pgrepl"
    with pytest.raises(ConfigError, match="already there"):
        copy_dashboards(tmp_path / "new")


def test_panels_of_the_dashboard_do_not_overlap():
    panels = json.loads((DASHBOARDS / GRAFANA).read_text())["panels"]
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert len(queries()) > 30
