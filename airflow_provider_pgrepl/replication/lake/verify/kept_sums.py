"""Sums of finished ranges of a comparison, kept for the next one of the table if this one does not end.

The next one, at another snapshot, takes the sums of each range whose rows have not changed
(`copy_stream.is_unchanged`), and reads the others. Tasks write one file for each range, into the folder of
`kept_ranges`. The source alone decides what the sums are: a file that stays after a commit can do no harm.
"""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Self

import numpy as np
from pyarrow import fs

from airflow_provider_pgrepl.errors import LakeError
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord
from airflow_provider_pgrepl.replication.lake.snapshot.kept_ranges import (
    SUMS_ENDING,
    copies_folder,
    identity_of,
    is_earlier,
    is_sums,
    remove_empty_folders,
    rows_decide_texts,
)
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.tables import TableOptions
from airflow_provider_pgrepl.replication.source.copy.copy_stream import CopiedRange, CopyRange
from airflow_provider_pgrepl.replication.storage import (
    Output,
    delete_files,
    make_folders,
    open_storage,
    read_file,
    read_range,
    requests_at_once,
    storage_errors,
)

from .buckets import Buckets, BucketSums, RowShape

log = logging.getLogger(__name__)

_LAYOUT = 1
_HEADER_BYTES = 4096
"""The most bytes of a file's first line."""
_OF_RANGE = 20
"""Sums are kept if their size is at most this part of the range's: they take room in the lake."""


@dataclass(frozen=True)
class _Header:
    """The first line of a file: a range, and how its rows were reduced at which position.

    `identity`: a hash of all that decides what the sums are, but the rows and the seed. `digest`: of the
    other fields, and of the sums, which follow the line.
    """

    layout: int
    identity: str
    seed: tuple[int, int]
    buckets: int
    position: LSN
    copied: CopiedRange
    digest: str = ""

    def to_line(self) -> bytes:
        return json.dumps({**asdict(self), "position": str(self.position)}).encode() + b"\n"

    def digest_of(self, body: bytes) -> str:
        line = replace(self, digest="").to_line()
        return hashlib.blake2b(line + body, digest_size=16).hexdigest()

    @classmethod
    def parse(cls, content: bytes) -> Self | None:
        """Return the header of a file, or None if the file is not whole, or of another version."""
        with suppress(ValueError, KeyError, TypeError):
            fields = json.loads(content.partition(b"\n")[0])
            fields["seed"] = tuple(fields["seed"])
            fields["position"] = LSN.parse(fields["position"])
            fields["copied"] = CopiedRange(**fields["copied"])
            header = cls(**fields)
            return header if header.layout == _LAYOUT else None
        return None


@dataclass(frozen=True)
class KeptSums:
    """The kept sums of one table's ranges, as they are sent to the tasks.

    `shape`, `buckets`: how rows are reduced; those of the kept sums if there are any. `files`: the path of
    each kept range's file. `is_possible`: False for a table in which texts can change although the row does
    not.
    """

    folder: str
    identity: str
    shape: RowShape
    buckets: Buckets
    position: LSN
    xmin: int
    files: dict[CopiedRange, str]
    is_possible: bool = True

    @property
    def ranges(self) -> Sequence[CopiedRange]:
        """The ranges whose sums were kept by an earlier comparison."""
        return list(self.files)

    def add(self, part: CopyRange, sums: BucketSums) -> None:
        """Keep the sums of a range that was read. If that is not possible, it is logged."""
        body = b"".join(one.tobytes() for one in (sums.counts, sums.s1, sums.s2))
        is_small = len(body) <= part.bytes // _OF_RANGE
        if not (self.is_possible and is_small and part.pages and part.filenode):
            return
        copied = part.as_copied(sums.rows, self.xmin)
        header = _Header(_LAYOUT, self.identity, self.shape.seed, self.buckets.count, self.position, copied)
        header = replace(header, digest=header.digest_of(body))
        try:
            filesystem, root = open_storage(self.folder)
            with storage_errors(self.folder):
                make_folders(filesystem, root)
                content = header.to_line() + body
                with Output(filesystem, f"{root}/{uuid.uuid4()}{SUMS_ENDING}", len(content)) as output:
                    output.stream.write(content)
        except LakeError as error:
            log.warning("the sums of a range are not kept: %s", error.message)

    def read(self, copied: CopiedRange) -> BucketSums | None:
        """Return the sums of a kept range, or None if its file is damaged, or gone."""
        with suppress(LakeError):
            filesystem, _ = open_storage(self.folder)
            with storage_errors(self.folder, "read"):
                content = read_file(filesystem, self.files[copied])
            header, body = _Header.parse(content), content.partition(b"\n")[2]
            if header is not None and header.digest == header.digest_of(body):
                counts, s1, s2 = np.frombuffer(body, np.int64).reshape(3, -1).copy()
                return BucketSums(counts, s1.view(np.uint64), s2.view(np.uint64), is_kept=True)
        return None


def find_kept_sums(
    lake_root: str,
    relation: Relation,
    options: TableOptions,
    epoch: EpochRecord,
    position: LSN,
    xmin: int,
    shape: RowShape,
    buckets: Buckets,
) -> KeptSums:
    """Return the sums of ranges that a snapshot with this position and xmin may still have, to which those of
    further ranges can be added.

    :param shape, buckets: how rows are reduced if no sums were kept
    Raises LakeUnavailableError, LakeError.
    """
    folder, is_possible = copies_folder(lake_root, relation.table), rows_decide_texts(relation)
    parts = (identity_of(relation, options, epoch), shape.columns, shape.keys)
    identity = hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
    headers = _read_headers(folder)
    found = {
        path: header
        for path, header in headers.items()
        if header is not None
        and (is_possible and header.identity == identity)
        and is_earlier(header.copied, header.position, xmin, position)
    }
    rows = Counter[tuple[tuple[int, int], int]]()
    for header in found.values():
        rows[header.seed, header.buckets] += header.copied.rows
    if rows:
        ((chosen, _),) = rows.most_common(1)
        found = {path: one for path, one in found.items() if (one.seed, one.buckets) == chosen}
        shape = RowShape(shape.columns, shape.keys, chosen[0])
        buckets = Buckets(np.arange(chosen[1], dtype=np.int64))
    files = {header.copied: path for path, header in _newest(found)}
    used = set(files.values())
    _delete(folder, [path for path in headers if path not in used])
    return KeptSums(folder, identity, shape, buckets, position, xmin, files, is_possible)


def _newest(found: Mapping[str, _Header]) -> Iterator[tuple[str, _Header]]:
    """Yield the headers of which no newer one has some of the same pages."""
    taken = defaultdict[tuple[int, int], list[CopiedRange]](list)
    for path, header in sorted(found.items(), key=lambda item: -item[1].copied.xmin):
        one = header.copied
        others = taken[one.leaf_oid, one.filenode]
        if all(one.end <= other.start or other.end <= one.start for other in others):
            others.append(one)
            yield path, header


def _read_headers(folder: str) -> dict[str, _Header | None]:
    """Return the header of each file; None for one that is not whole, or of another version."""
    filesystem, _ = open_storage(folder)
    paths = _list(folder)
    with storage_errors(folder, "read"), requests_at_once(filesystem, len(paths)) as each:
        read = partial(read_range, filesystem, offset=0, length=_HEADER_BYTES)
        return dict(zip(paths, each(lambda path: _Header.parse(read(path)), paths), strict=True))


def _list(folder: str) -> list[str]:
    filesystem, root = open_storage(folder)
    with storage_errors(folder, "read"):
        infos = filesystem.get_file_info(fs.FileSelector(root, allow_not_found=True))
        return [info.path for info in infos if is_sums(info)]


def forget_sums(lake_root: str, table: TableName) -> None:
    """Delete the kept sums of a table. An error is logged: maintenance deletes what stays."""
    folder = copies_folder(lake_root, table)
    with suppress(LakeError):
        _delete(folder, _list(folder))


def _delete(folder: str, paths: Sequence[str]) -> None:
    try:
        filesystem, _ = open_storage(folder)
        with storage_errors(folder):
            delete_files(filesystem, paths)
        remove_empty_folders(folder)
    except LakeError as error:
        log.warning("%s: sums of ranges are not deleted: %s", folder, error.message)
