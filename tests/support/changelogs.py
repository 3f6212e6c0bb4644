"""A changelog made of transactions that a stream could bring, through the receiver's own parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord
from airflow_provider_pgrepl.replication.changelog.writer import ChangelogWriter, create_changelog
from airflow_provider_pgrepl.replication.pgoutput.columns import Splitter
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.receiver.changelog_feed import TransactionBuffer
from airflow_provider_pgrepl.replication.receiver.changelog_rows import VersionTagger
from tests.support import wire_bytes as wire
from tests.support.announced import announce, look_up


def epoch_record(epoch: int = 1, consistent_point: int = 50) -> EpochRecord:
    return EpochRecord("p", Epoch(epoch), "7", 1, "pgrepl_p", "pgrepl_p", 5, LSN(consistent_point))


def new_changelog(folder: Path) -> str:
    uri = str(folder / "changelog")
    create_changelog(uri, epoch_record())
    return uri


@dataclass
class Written:
    """A changelog writer with the receiver's parts before it. Rows are texts `k, v`; a relation is announced
    at its first use.
    """

    uri: str
    part_bytes: int = 1 << 20
    announced: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.writer = ChangelogWriter(self.uri)
        self.buffer = TransactionBuffer(self.writer, self.part_bytes)
        self.splitter, self.tagger = Splitter(), VersionTagger(self.writer.epoch, look_up)

    def take(self, *messages: bytes) -> None:
        """Hand a chunk to the buffer."""
        split = self.splitter.split(messages)
        rows = self.tagger.tag(split)
        self.buffer.add(rows, split.ended, sum(map(len, messages)))

    def begin(self, lsn: int) -> bytes:
        return wire.put_begin(lsn, lsn, lsn)

    def commit(self, lsn: int) -> bytes:
        return wire.put_commit(lsn, lsn + 8, lsn)

    def insert(self, relation: int, *keys: object) -> list[bytes]:
        first = [] if relation in self.announced else [announce(relation, "k", "v")]
        self.announced.add(relation)
        return [*first, *(wire.put_insert(relation, [str(key), f"v{key}"]) for key in keys)]

    def transaction(self, lsn: int, **rows: int) -> None:
        """`r7=3`: three rows into relation 7."""
        inserts = [
            message for name, count in rows.items() for message in self.insert(int(name[1:]), *range(count))
        ]
        self.take(self.begin(lsn), *inserts, self.commit(lsn))

    def flush(self) -> int:
        """Commit; returns the changelog version."""
        self.buffer.flush(LSN(0))
        return self.writer.version
