"""One commit of a transaction that is too large to be in memory at once: what its parts ask for, gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Literal

import pyarrow as pa
from pyroaring import BitMap64

from airflow_provider_pgrepl.replication.lake.delta.partitions import LakeFiles, files_beside
from airflow_provider_pgrepl.replication.lake.files.merge_on_read import rewrite_files
from airflow_provider_pgrepl.replication.lake.files.places import Places
from airflow_provider_pgrepl.replication.lake.files.row_search import FileRows
from airflow_provider_pgrepl.replication.lake.merge.slice_commit import (
    SliceCommit,
    Way,
    write_left,
    write_rows,
)


@dataclass(frozen=True)
class PartedCommit(SliceCommit):
    """What is to be written goes into files as it comes; `make_of` commits them all at once."""

    _files: list[LakeFiles] = field(default_factory=list)
    _gone: dict[int, BitMap64] = field(default_factory=dict)

    def make_of(self, parts: Iterable[pa.Table], take: Callable[[pa.Table], None], *, empties: bool) -> None:
        """Have `take` make, with this very commit, what each part asks for; and commit all that. `empties`:
        of what the table held before nothing stays.

        Raises VersionTakenError when somebody has committed meanwhile, and what `take` does.
        """
        found = FileRows(self.table)
        with files_beside(found.uri, found.schema) as files:
            self._files[:] = [files]
            self._gone.clear()
            for part in parts:
                take(part)
            if empties:
                at = self.table, self.app, self.position, found, range(len(found.files))
                rewrite_files(*at, files.finish(), self._properties)
            else:
                way: Way = "rewrite" if self.strategy == "rewrite" else "mark"
                if way == "rewrite":
                    write_left(files, found, self._gone)
                self._replace(found, self._gone, files, way)

    def whole(self) -> SliceCommit:
        """The same commit, of changes that are all in memory."""
        return SliceCommit(*(getattr(self, each.name) for each in fields(SliceCommit)))

    def nothing(self) -> None:
        """Of this part."""

    def write(self, rows: pa.Table, mode: Literal["append", "overwrite"]) -> None:  # noqa: ARG002 - is told
        """Add rows; that the table is emptied, `make_of` is told."""
        schema = pa.schema(self.table.schema().to_arrow())
        write_rows(self._files[0], rows.select(schema.names).cast(schema))

    def way(self, bytes_to_rewrite: int, bytes_of_change: int) -> Way:  # noqa: ARG002 - of each part
        """What goes is looked up in any case, however it is to go."""
        return "mark"

    def replace(self, found: FileRows, gone: Places, rows: pa.Table, way: Way) -> None:  # noqa: ARG002
        """Have rows go, and others come."""
        for number, marks in gone.marks().items():
            self._gone[number] = self._gone.get(number, BitMap64()) | marks
        self.write(rows, "append")
