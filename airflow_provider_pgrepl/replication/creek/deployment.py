"""Deployment: what creek's environment says, as a pipeline with one publisher.

The names and defaults are those of creek's cmd/creekd.go at b88e46c.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import psycopg2
import psycopg2.extensions

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline

PUBLISHER = "creek"
LAKE_VARIABLE = "PGREPL_LAKE"
OPTIONS_VARIABLE = "PGREPL_PIPELINE_OPTIONS"
PUBLISHER_VARIABLE = "PGREPL_PUBLISHER_OPTIONS"
_METRICS_HOST_VARIABLE = "PGREPL_METRICS_HOST"
_NEEDED = ("PG_URI", "PG_PUBLICATION_NAME", "PG_PUBLICATION_SLOT", "NATS_URI", LAKE_VARIABLE)
_WITHOUT_EFFECT = (
    *("PG_MESSAGE_TIMEOUT", "NATS_TIMEOUT", "NATS_MAX_PENDING", "NATS_REPLICAS", "NATS_RETENTION_POLICY"),
    *("NATS_RETENTION_MAX_AGE", "NATS_RETENTION_MAX_BYTES", "NATS_RETENTION_MAX_MSGS"),
)
"""creek reads them, and does nothing with them either."""
_METRICS_PORT = "7779"
_OURS = ("name", "lake", "tables", "publication", "publication_mode", "publishers")
_PUBLISHERS = ("target", "namespace", "database", "format", "metrics")


@dataclass(frozen=True)
class Deployment:
    """`tables`: what the publication is made for where there is none. `replaced_slot`: creek's.
    `without_effect`: variables that were given, and change nothing."""

    dsn: str = field(repr=False)
    nats_uri: str = field(repr=False)
    database: str
    publication: str
    replaced_slot: str
    tables: tuple[TableName, ...]
    namespace: str
    lake: str
    metrics: str
    log_level: str
    options: Mapping[str, Any]
    publisher_options: Mapping[str, Any]
    without_effect: tuple[str, ...]

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Deployment:
        """Raises ConfigError, which names the variable."""
        given = {name: value.strip() for name, value in environment.items() if value.strip()}
        if missing := [name for name in _NEEDED if name not in given]:
            raise ConfigError(
                f"{', '.join(missing)}: not set",
                "they are creek's own; PGREPL_LAKE is a folder that stays, as /lake, a volume",
            )
        dsn = _without_pool(given["PG_URI"])
        return cls(
            dsn,
            given["NATS_URI"],
            _database(dsn),
            given["PG_PUBLICATION_NAME"],
            given["PG_PUBLICATION_SLOT"],
            _tables(given.get("PG_TABLES", "")),
            given.get("NATS_NAMESPACE", "CREEK"),
            given[LAKE_VARIABLE],
            _metrics(given),
            given.get("LOG_LEVEL", "info"),
            _options(OPTIONS_VARIABLE, given, "the pipeline file's fields", _OURS),
            _options(PUBLISHER_VARIABLE, given, "a publisher's settings", _PUBLISHERS),
            tuple(name for name in _WITHOUT_EFFECT if name in given),
        )

    def pipeline(self, tables: Collection[TableName]) -> Pipeline:
        """The pipeline, of the tables that the publication has. Raises ConfigError."""
        # creek's consumers take a NULL for the value: by default none is sent for one that is not known.
        given = {"unchanged": "require", **self.publisher_options}
        publisher = {**given, "target": "nats", "namespace": self.namespace, "database": self.database}
        fields = {
            "lake_tables": "none",
            **self.options,
            "name": re.sub("[^a-z0-9_]", "_", self.replaced_slot.lower()).strip("_")[:55],
            "lake": self.lake,
            "tables": sorted(map(str, tables)),
            "publication": self.publication,
            "publication_mode": "use",
            "publishers": {PUBLISHER: {**publisher, "metrics": self.metrics}},
        }
        return Pipeline.from_dict(fields)


def _without_pool(uri: str) -> str:
    """creek's driver takes settings of its pool there (pgxpool.ParseConfig), which libpq does not know."""
    if not uri.startswith(("postgres://", "postgresql://")):
        return uri
    try:
        parts = urlsplit(uri)
    except ValueError:
        raise _unreadable("PG_URI") from None
    kept = [(name, value) for name, value in parse_qsl(parts.query, True) if not name.startswith("pool_")]
    return urlunsplit(parts._replace(query=urlencode(kept)))


def _database(dsn: str) -> str:
    try:
        found = psycopg2.extensions.parse_dsn(dsn)
    except psycopg2.Error:
        raise _unreadable("PG_URI") from None
    if not found.get("dbname"):
        raise ConfigError("PG_URI: names no database", "creek's subjects carry its name: …:5432/shop")
    return str(found["dbname"])


def _unreadable(variable: str) -> ConfigError:
    return ConfigError(f"{variable}: cannot be read", "give it as postgres://user:password@host:5432/shop")


def _tables(text: str) -> tuple[TableName, ...]:
    try:
        return tuple(TableName.parse(name.strip()) for name in text.split(",") if name.strip())
    except ValueError as error:
        raise ConfigError(f"PG_TABLES: {error}") from None


def _metrics(given: Mapping[str, str]) -> str:
    port = given.get("PROMETHEUS_PORT", _METRICS_PORT)
    return "" if port == "0" else f"{given.get(_METRICS_HOST_VARIABLE, '0.0.0.0')}:{port}"  # noqa: S104 - creek's


def _options(variable: str, given: Mapping[str, str], what: str, by_creek: Collection[str]) -> dict[str, Any]:
    try:
        found = json.loads(given.get(variable, "{}"))
    except ValueError as error:
        raise ConfigError(f"{variable}: is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{variable}: must be an object of {what}")
    if taken := sorted(set(found) & set(by_creek)):
        raise ConfigError(f"{variable}: {', '.join(taken)}: given by creek's variables")
    return found
