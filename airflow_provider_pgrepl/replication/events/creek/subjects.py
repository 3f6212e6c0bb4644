"""Streams and subjects of creek's wire, as its newer version (W2) names them."""

from __future__ import annotations

import re
from functools import lru_cache

from airflow_provider_pgrepl.replication.names import TableName

_SPECIAL = re.compile(r"[\s.*>%\x00-\x1f\x7f]")
"""What separates the words of a subject, or stands for words."""


def stream_name(namespace: str, kind: str, database: str) -> str:
    """`kind`: `wal`, `schema` or `snap`."""
    return f"{namespace}_{kind}_{database}"


@lru_cache(10_000)
def subject(stream: str, table: str) -> str:
    """`<stream>.<schema>.<table>`; what is special in a name is percent-encoded. `table`: `schema.name`."""
    name = TableName.parse(table)
    return f"{stream}.{_word(name.schema)}.{_word(name.name)}"


def _word(name: str) -> str:
    return _SPECIAL.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode()), name)
