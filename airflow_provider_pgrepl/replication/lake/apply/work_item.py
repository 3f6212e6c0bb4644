"""WorkItem: what a batch has to do for one relation. No Spark in here."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from airflow_provider_pgrepl.replication.changelog import reader
from airflow_provider_pgrepl.replication.delta.table import open_delta

MARK = 0
"""The relation id of the item that stands for the batch itself."""


@dataclass(frozen=True)
class WorkItem:
    """A relation's share of the commits after `from_version` up to `to_version`.

    The batch's own item has relation MARK and says what is durable as of `to_version`; with epoch 0 its
    commits do not say it, and the changelog has to be asked (`as_recorded`).
    """

    relation_id: int
    from_version: int
    to_version: int
    paths: tuple[str, ...] = ()
    bytes: int = 0
    epoch: int = 0
    durable_lsn: int = 0
    last_commit_us: int = 0

    def as_recorded(self, uri: str) -> WorkItem:
        """The batch's own item, with what the changelog itself says of its `to_version`."""
        table = reader.open_changelog(uri)
        version = min(self.to_version, int(table.version()))
        if version < table.version():
            table = open_delta(uri, version)
        epoch, durable_lsn = reader.read_epoch_number(table), reader.read_durable_lsn(table)
        return replace(self, to_version=version, epoch=epoch, durable_lsn=durable_lsn)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkItem:
        fields = json.loads(text)
        return cls(**{**fields, "paths": tuple(fields["paths"])})
