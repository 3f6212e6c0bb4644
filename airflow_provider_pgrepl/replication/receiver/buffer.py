"""TransactionBuffer: rows on their way into the changelog, whole transactions apart from the open one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from airflow_provider_pgrepl.replication.changelog.parts import Part
from airflow_provider_pgrepl.replication.changelog.writer import ChangelogWriter
from airflow_provider_pgrepl.replication.pgoutput.columns import NO_TIME, TransactionEnd
from airflow_provider_pgrepl.replication.postgres.lsn import LSN


class TransactionBuffer:
    """Holds rows until a flush commits them. Memory stays bounded however large a transaction is: of an open
    one, parts are written ahead, and the commit at its end adds them all.
    """

    def __init__(self, writer: ChangelogWriter, part_bytes: int) -> None:
        self._writer = writer
        self._part_bytes = part_bytes
        self._whole: list[pa.Table] = []
        self._whole_parts: list[Part] = []
        self._open: list[pa.Table] = []
        self._open_parts: list[Part] = []
        self._open_bytes = 0
        self._first_lsn = 0
        self._last: TransactionEnd | None = None
        self._last_us = 0
        self.whole_bytes = 0

    @property
    def has_whole(self) -> bool:
        """Whether a flush would commit something."""
        return bool(self._whole or self._whole_parts)

    def add(self, rows: pa.Table, ended: Sequence[TransactionEnd], size: int) -> None:
        """Take a chunk's rows, by commit LSN; `ended` are transactions that end in it, `size` its bytes."""
        if ended:
            self._end_open(rows, ended, size)
            return
        self._push_open(rows, size)
        if self._open_bytes >= self._part_bytes:
            self._spill_open()

    def _end_open(self, rows: pa.Table, ended: Sequence[TransactionEnd], size: int) -> None:
        last = ended[-1]
        cut = int(np.searchsorted(rows["commit_lsn"].to_numpy(), last.commit_lsn, side="right"))
        rest = size * (rows.num_rows - cut) // max(1, rows.num_rows)
        if cut or self._open or self._open_parts:
            self._whole += [*self._open, *([rows.slice(0, cut)] if cut else [])]
            self._whole_parts += self._open_parts
            self._first_lsn = self._first_lsn or ended[0].commit_lsn
            self._last = last
            self._last_us = max(
                [self._last_us, *(end.commit_us for end in ended if end.commit_us != NO_TIME)]
            )
            self.whole_bytes += size - rest + self._open_bytes
        self._open, self._open_parts, self._open_bytes = [], [], 0
        self._push_open(rows.slice(cut), rest)

    def _push_open(self, rows: pa.Table, size: int) -> None:
        if rows.num_rows:
            self._open.append(rows)
            self._open_bytes += size

    def _spill_open(self) -> None:
        self._open_parts.append(self._writer.write_part(pa.concat_tables(self._open)))
        self._open, self._open_bytes = [], 0

    def flush(self, idle_lsn: LSN) -> None:
        """Commit all whole transactions; `idle_lsn` is known to lie before any later one."""
        if self._last is None:
            return
        parts = [*self._whole_parts, *(self._writer.write_part(rows) for rows in self._cut_parts())]
        self._writer.append(
            parts,
            durable_lsn=max(LSN(self._last.end_lsn), idle_lsn),
            first_lsn=LSN(self._first_lsn),
            last_lsn=LSN(self._last.commit_lsn),
            last_commit_us=self._last_us,
        )
        self._whole, self._whole_parts, self.whole_bytes = [], [], 0
        self._first_lsn, self._last = 0, None

    def _cut_parts(self) -> list[pa.Table]:
        parts: list[list[pa.Table]] = []
        room = 0
        for rows in self._whole:
            if room <= 0:
                parts.append([])
                room = self._part_bytes
            parts[-1].append(rows)
            room -= rows.nbytes
        return [pa.concat_tables(part) for part in parts]
