"""Order: what an application is to do, so that a later task can tell whether the one that runs does it."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from airflow_provider_pgrepl import __version__
from airflow_provider_pgrepl.replication.app.process import DSN_VARIABLE, STATE_DSN_VARIABLE
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.store_variables import (
    AZURE_ENDPOINT,
    ENDPOINT,
    GOOGLE_ENDPOINT,
)
from airflow_provider_pgrepl.spark_driver.supervisor import write_whole

_FILE = "order.json"
_OF_PLACE = {
    "order",
    *(f"variable {name}" for name in (DSN_VARIABLE, STATE_DSN_VARIABLE)),
    *(f"variable {name}" for name in (ENDPOINT, GOOGLE_ENDPOINT, AZURE_ENDPOINT)),
}


@dataclass(frozen=True)
class Order:
    """A pipeline, arguments, settings of Spark, and variables, whose values are never written down."""

    pipeline: Pipeline
    application: str
    arguments: Sequence[str] = ()
    settings: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)

    def write(self, folder: Path) -> None:
        """Leave it beside the application that it is for."""
        salt = secrets.token_hex(16)
        write_whole(folder / _FILE, json.dumps({"salt": salt, **self._comparable(salt)}))

    def differences(self, folder: Path) -> list[str]:
        """The names of what the application of that folder was ordered otherwise; `order` if nobody knows."""
        try:
            known = json.loads((folder / _FILE).read_text(encoding="utf-8"))
            return _differences(known, self._comparable(str(known["salt"])))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return ["order"]

    def differences_of_place(self, folder: Path) -> list[str]:
        """Those by which source, state or store may be others than that application's: names and paths are
        the same at two servers."""
        return [name for name in self.differences(folder) if name in _OF_PLACE]

    def _comparable(self, salt: str) -> dict[str, Any]:
        return {
            "version": __version__,
            "application": self.application,
            "arguments": list(self.arguments),
            "settings": list(self.settings),
            "pipeline": json.loads(self.pipeline.to_json()),
            "variable": {name: _digest(salt, value) for name, value in self.environment.items()},
        }


def _differences(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    found = []
    for name, value in wanted.items():
        if not isinstance(value, dict):
            found += [name] if known[name] != value else []
            continue
        keys = sorted({*value, *known[name]})
        found += [f"{name} {key}" for key in keys if known[name].get(key) != value.get(key)]
    return found


def _digest(salt: str, value: str) -> str:
    return hashlib.sha256(f"{salt}{value}".encode()).hexdigest()
