"""Locations of lakes, and names of their tables in catalogs. Pure.

Delta, Arrow and Hadoop use different URI schemes for the same store. This package stores and passes Delta's.

A database or table has the same name in each catalog (Hive metastore, Glue, Unity Catalog). The name consists
of lowercase letters, digits and `_`, which all of them accept.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.postgres.names import TableName

from .stores import SCHEMES, STORES, StoreLocation

EXAMPLES = (
    f"{', '.join(kind.example for kind in STORES.values())}, or a directory of this host or of a file system"
    " that all hosts share"
)
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)(.*)", re.DOTALL)
# deltalake percent-encodes all other characters in a table's location, and other readers do not always decode
# them.
_PATH = re.compile(r"[A-Za-z0-9_.~+=/-]*")
_FIELDS = ("pipeline", "schema", "table")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_CREDENTIALS = re.compile(r"[A-Za-z0-9+.-]+://[^/@]*:[^/@]*@")
_OTHERS = re.compile(r"[^a-z0-9_]")


def parse_uri(lake: str) -> tuple[str, str, str] | None:
    """Return scheme (lowercase), host and path of a URI; None for a path of this host."""
    match = _URI.fullmatch(lake)
    return None if match is None else (match[1].lower(), match[2], match[3])


def check_lake(lake: str) -> None:
    """Raise ConfigError for a lake root that is neither an absolute path nor a place in a supported store."""
    if not lake.strip():
        raise ConfigError("is empty", "give the path under which the lake tables are to be")
    if _CREDENTIALS.match(lake):
        raise ConfigError(
            "the URI holds credentials",
            "those of a store come from the environment or an Airflow connection, never from the file",
        )
    if lake.startswith("/") and posixpath.normpath(lake).strip("/") == "":
        raise ConfigError(
            "is the root of the file system, in which folders of others lie",
            "give a folder for this pipeline alone, as /srv/lake",
        )
    if lake != lake.strip():
        raise ConfigError("begins or ends with a blank", "give the path without it")
    if _SCHEME.match(lake) and (fault := fault_of_uri(lake)):
        raise ConfigError(fault, f"give {EXAMPLES}")
    if any(mark in lake for mark in ("{{", "{%")):
        raise ConfigError(
            f"{lake!r} holds a template that was not rendered",
            "Airflow renders templates in a dict or JSON text that an operator has as `pipeline`, in no file:"
            " write the path itself",
        )
    if "%" in lake:
        raise ConfigError("must not contain %", "Delta readers decode it in some places only")
    if not (lake.startswith(("/", "~")) or _SCHEME.match(lake)):
        raise ConfigError(
            f"{lake!r} is a relative path, and each process would start from its own folder",
            "give the whole path, as /srv/lake",
        )


def fault_of_uri(lake: str) -> str:
    """Return the reason why a lake's URI is invalid, as a phrase without subject; "" if it is valid."""
    parts = parse_uri(lake)
    if parts is None:
        return "is neither a path nor a URI with a bucket"
    scheme, host, path = parts
    if scheme not in SCHEMES:
        return f"{scheme}:// is not supported"
    kind = STORES[SCHEMES[scheme]]
    if not kind.host.fullmatch(host):
        return f"{host!r} {kind.host_fault}"
    if not path.strip("/"):
        return "names no folder in the bucket"
    if not _PATH.fullmatch(path):
        return "may have ASCII letters, digits and _ . ~ + = - in its path, since all else would be encoded"
    if "//" in path.rstrip("/") or any(part in (".", "..") for part in path.split("/")):
        return "has an empty part, . or .. in its path"
    return ""


def canonical(lake: str) -> str:
    """Return a store's URI with Delta's scheme and without a trailing slash; other paths are unchanged."""
    parts = parse_uri(lake)
    if parts is None or not is_object_store(lake):
        return lake
    scheme, host, path = parts
    return f"{SCHEMES.get(scheme, scheme)}://{host}{path}".rstrip("/")


def hadoop_uri(uri: str) -> str:
    """Return the URI with the scheme that Spark's own readers use."""
    parts = parse_uri(uri)
    if parts is None:
        return uri
    scheme, host, path = parts
    kind = STORES.get(scheme)
    return f"{(kind and kind.hadoop) or scheme}://{host}{path}"


def is_object_store(uri: str) -> bool:
    """Return True if a URI is in an object store.

    There, acknowledged writes are durable, and an object appears only after it was written completely.
    """
    return store_location(uri) is not None


def store_location(uri: str) -> StoreLocation | None:
    """Return the location that a URI names in an object store; None for a directory."""
    parts = parse_uri(uri)
    if parts is None or parts[0] == "file":
        return None
    scheme, host, path = parts
    bucket, _, domain = host.partition("@")
    return StoreLocation(SCHEMES.get(scheme, scheme), bucket, path.strip("/"), domain.partition(".")[0])


@dataclass(frozen=True)
class CatalogNames:
    """The templates for names in a catalog, with `{pipeline}`, `{schema}` and `{table}`.

    `schemas`: replacements for some schema names in the templates. `tables`: the names of some tables, which
    are used instead of the template.
    """

    pipeline: str
    database: str
    table: str
    schemas: Mapping[str, str]
    tables: Mapping[TableName, str]

    def of(self, table: TableName, ending: str = "") -> tuple[str, str]:
        """Return the names of database and table. `ending`: a suffix, as of the table's history table."""
        values = {
            "pipeline": self.pipeline,
            "schema": self.schemas.get(table.schema, table.schema),
            "table": table.name,
        }
        name = self.tables.get(table) or self.table.format(**values)
        return _plain(self.database.format(**values)), _plain(name + ending)


def check_template(text: str, needed: str = "") -> None:
    """Raise ValueError for an invalid template of names. `needed`: a field that it must contain."""
    try:
        parts = list(Formatter().parse(text))
    except ValueError as error:
        raise ValueError(f"{text!r} is no template: {error}") from None
    fields = [field for _, field, spec, conversion in parts if field is not None]
    if unknown := [field for field in fields if field not in _FIELDS]:
        known = ", ".join(f"{{{name}}}" for name in _FIELDS)
        raise ValueError(f"{text!r} has {{{unknown[0]}}}; there are {known}")
    if any(spec or conversion for _, _, spec, conversion in parts):
        raise ValueError(f"{text!r} has a format, which names need not")
    if needed and needed not in fields:
        raise ValueError(f"{text!r} lacks {{{needed}}}, without which all tables would have one name")


def _plain(name: str) -> str:
    """Return a name in lowercase ASCII letters, digits and `_`.

    Non-ASCII characters are replaced by their code points, so that names in other scripts stay different.
    """
    return _OTHERS.sub(_replaced, name.lower()) or "_"


def _replaced(found: re.Match[str]) -> str:
    letter = found[0]
    return "_" if letter.isascii() else f"u{ord(letter):04x}"
