"""What other programs set on a lake table, as Spark commits it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

LEGACY = ("appendOnly", "invariants")


@dataclass(frozen=True)
class Settings:
    """`of_columns`: by a column what its metadata says more; `nullable`: False where it may not be null."""

    properties: Mapping[str, str] = field(default_factory=dict)
    features: Sequence[str] = ()
    of_readers: bool = False
    writer: int = 2
    of_columns: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    not_null: Sequence[str] = ()

    def protocol(self) -> dict[str, Any]:
        if not self.features:
            return {"minReaderVersion": 1, "minWriterVersion": self.writer}
        found = {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": [*LEGACY, *self.features]}
        return {
            **found,
            **({"minReaderVersion": 3, "readerFeatures": [*self.features]} if self.of_readers else {}),
        }


def set_by_another(uri: str, settings: Settings) -> int:
    """Commit, and return the version."""
    table = DeltaTable(uri)
    held, schema = table.metadata(), json.loads(table.schema().to_json())
    for one in schema["fields"]:
        one["metadata"] |= settings.of_columns.get(one["name"], {})
        one["nullable"] = one["name"] not in settings.not_null
    metadata = {
        "id": str(held.id),
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps(schema, separators=(",", ":")),
        "partitionColumns": held.partition_columns,
        "configuration": {**held.configuration, **settings.properties},
        "createdTime": held.created_time,
    }
    return commit_by_another(
        uri, "SET TBLPROPERTIES", {"protocol": settings.protocol()}, {"metaData": metadata}
    )


def commit_by_another(uri: str, operation: str, *actions: Mapping[str, Any]) -> int:
    """Commit these actions, and return the version."""
    version, now = int(DeltaTable(uri).version()) + 1, int(time.time() * 1000)
    about = {
        "timestamp": now,
        "inCommitTimestamp": now,
        "operation": operation,
        "engineInfo": "Apache-Spark/4.2.0",
    }
    lines = [json.dumps(action) for action in ({"commitInfo": about}, *actions)]
    Path(uri, f"_delta_log/{version:020}.json").write_text("\n".join(lines))
    return version
