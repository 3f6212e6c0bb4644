"""The queries of the shipped dashboard and alert rules."""

from __future__ import annotations

import json
import re

import yaml

from airflow_provider_pgrepl.cli.apps import DASHBOARDS, GRAFANA, RULES


def queries() -> list[str]:
    """Return the expressions of all panels and alerts."""
    panels = json.loads((DASHBOARDS / GRAFANA).read_text())["panels"]
    groups = yaml.safe_load((DASHBOARDS / RULES).read_text())["groups"]
    return [
        *(target["expr"] for panel in panels for target in panel.get("targets", ())),
        *(rule["expr"] for group in groups for rule in group["rules"]),
    ]


def queried() -> set[str]:
    """Return the names of the series that they read."""
    return {name for one in queries() for name in re.findall(r"\b(?:pgrepl|process)_\w+", one)}
