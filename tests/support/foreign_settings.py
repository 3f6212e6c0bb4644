"""Settings and checkpoints of other programs on a lake table, as Spark commits them."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
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


def write_v2_checkpoint(uri: str, suffix: str, *, without: Collection[str] = ()) -> Path:
    """Write a V2 checkpoint of the newest version, as Spark does with delta.checkpointPolicy=v2.

    `suffix`: json or parquet, of the top-level file, which is returned. `without`: app ids that have expired.
    """
    set_by_another(uri, Settings({"delta.checkpointPolicy": "v2"}, ["v2Checkpoint"], of_readers=True))
    table = DeltaTable(uri)
    table.create_checkpoint()
    log, version = Path(uri, "_delta_log"), int(table.version())
    classic = log / f"{version:020}.checkpoint.parquet"
    rows = pq.read_table(classic)
    classic.unlink()
    sidecar = f"{version:020}.checkpoint.0000000001.0000000001.{uuid.uuid4()}.parquet"
    (log / "_sidecars").mkdir(exist_ok=True)
    pq.write_table(rows.select(["add", "remove"]), log / "_sidecars" / sidecar)
    size = (log / "_sidecars" / sidecar).stat().st_size
    named = {"path": sidecar, "sizeInBytes": size, "modificationTime": 0}
    others = [
        {kind: row[kind]}
        for row in rows.to_pylist(maps_as_pydicts="strict")
        for kind in ("protocol", "metaData", "txn")
        if row.get(kind) is not None and not (kind == "txn" and row[kind]["appId"] in without)
    ]
    actions: list[dict[str, Any]] = [
        {"checkpointMetadata": {"version": version}},
        {"sidecar": named},
        *others,
    ]
    top = log / f"{version:020}.checkpoint.{uuid.uuid4()}.{suffix}"
    if suffix == "json":
        top.write_text("\n".join(map(json.dumps, actions)))
    else:
        kinds = rows.schema
        parts = {
            "checkpointMetadata": pa.struct([("version", pa.int64())]),
            "sidecar": pa.struct(
                [("path", pa.string()), ("sizeInBytes", pa.int64()), ("modificationTime", pa.int64())]
            ),
            **{kind: kinds.field(kind).type for kind in ("protocol", "metaData", "txn")},
        }
        columns = [pa.array([action.get(kind) for action in actions], of) for kind, of in parts.items()]
        pq.write_table(pa.table(columns, names=list(parts)), top)
    hint = {"version": version, "size": len(actions), "v2Checkpoint": {"path": top.name, "sizeInBytes": 1}}
    (log / "_last_checkpoint").write_text(json.dumps(hint))
    return top


def clean_log(uri: str) -> None:
    """Delete the commits before the newest, as Spark does behind a checkpoint."""
    for version in range(int(DeltaTable(uri).version())):
        Path(uri, f"_delta_log/{version:020}.json").unlink(missing_ok=True)
