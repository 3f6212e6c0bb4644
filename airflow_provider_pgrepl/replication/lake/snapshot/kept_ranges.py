"""Finished ranges of a table's copy, kept for the next copy of the table if this one does not end.

A copy of hours can be killed, or lose its snapshot. The next one, at another snapshot, keeps the files of
each range whose rows have not changed (`copy_stream.unchanged`), and copies the others. Records of the
ranges are in the lake, `_pgrepl/copies/SCHEMA/TABLE/*.json`. They are deleted before the commit that adds
their files, so that no file is added twice.

The rows of a kept range have position and time of the snapshot at which they were copied. The start of an app
shows by the token that the source is not another server, or in an earlier state, than at that time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from pyarrow import fs

from airflow_provider_pgrepl import __version__
from airflow_provider_pgrepl.errors import LakeTableError, PgReplError, TableSnapshotError
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord, system_folder
from airflow_provider_pgrepl.replication.lake.delta.live_files import live_files
from airflow_provider_pgrepl.replication.lake.delta.ownership import is_written_name
from airflow_provider_pgrepl.replication.lake.delta.parquet_writer import WrittenFile, delete_uncommitted
from airflow_provider_pgrepl.replication.lake.delta.table import find_table
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import PgType, Relation
from airflow_provider_pgrepl.replication.settings.tables import TableOptions
from airflow_provider_pgrepl.replication.source.copy.copy_stream import CopiedRange, CopyRange
from airflow_provider_pgrepl.replication.storage import (
    Output,
    delete_files,
    durable,
    make_folders,
    open_storage,
    read_file,
    requests_at_once,
    storage_errors,
)

log = logging.getLogger(__name__)

SUMS_ENDING = ".sums"
_LAYOUT = 1
_FIRST_USER_OID = 16384
# Their texts change without a change of the row: names of objects and roles, and the locale's currency.
_NAMING = frozenset({24, 2202, 2203, 2204, 2205, 2206, 3734, 3769, 4089, 4096, 4191, 1033, 790})
MOST_AGE = timedelta(days=3)
"""The age up to which files are kept: vacuum may delete them at the age of `ORPHAN_AGE`."""
_MOST_XIDS = 2**30
"""The most transaction IDs since the earlier snapshot: the server compares them only up to 2^31 back."""


@dataclass(frozen=True)
class KeptRange:
    """A copied range, its files, and the position of the copy's snapshot."""

    copied: CopiedRange
    files: tuple[WrittenFile, ...]
    position: LSN


class KeptRanges:
    """The kept ranges of one table, those that its copy adds among them. Any thread may call `add` and
    `record`.

    `is_possible`: False for a table whose ranges cannot be kept. It has a history, whose versions begin at
    one position, or columns whose texts can change although the row does not.
    """

    def __init__(
        self, lake_root: str, relation: Relation, options: TableOptions, epoch: EpochRecord, position: LSN
    ) -> None:
        """:param position: of the snapshot that is copied now"""
        self._lake_root, self._path, self._position = lake_root, relation.table.path, position
        self._uri = f"{lake_root}/{self._path}"
        self._place = copies_folder(lake_root, relation.table)
        self._identity = identity_of(relation, options, epoch)
        self.is_possible = rows_decide_texts(relation) and not options.policy.history
        self._xmin = 0
        self._usable: dict[CopiedRange, tuple[WrittenFile, ...]] = {}
        self._found: list[KeptRange] = []
        self._records: list[str] = []
        self._sums: list[str] = []
        self._is_over = False
        self._recording = threading.Lock()
        self._added: list[KeptRange] = []
        self._adding = threading.Lock()

    def find(self, xmin: int) -> list[CopiedRange]:
        """Read the records, and return the ranges that the snapshot with this xmin may still have.

        Leaves out ranges whose files are gone, and those of another definition of the table. Raises
        LakeUnavailableError, LakeError.
        """
        self._xmin = xmin
        records = list(self._read())
        self._found = [one for _, ranges in records for one in ranges]
        if self._found and self.is_possible:
            free = self._free()
            self._usable = {
                one.copied: one.files
                for is_of_table, ranges in records
                for one in ranges
                if is_of_table and self._is_usable(one, free)
            }
        return list(self._usable)

    def files(self, copied: CopiedRange) -> tuple[WrittenFile, ...]:
        """Return the files of a range that `find` has returned."""
        return self._usable[copied]

    def add(self, part: CopyRange, files: Sequence[WrittenFile]) -> None:
        """Keep a range that was copied, from the next `record` on."""
        if self.is_possible and part.pages and part.filenode:
            copied = part.as_copied(sum(file.rows for file in files), self._xmin)
            with self._adding:
                self._added.append(KeptRange(copied, tuple(files), self._position))

    def record(self) -> None:
        """Write the ranges that were added since the last call. Does nothing after `forget`.

        Raises LakeUnavailableError, LakeError; the next call then writes them.
        """
        with self._recording:
            with self._adding:
                ranges, self._added = self._added, []
            if not ranges or self._is_over:
                return
            try:
                self._write(ranges)
            except BaseException:
                with self._adding:
                    self._added += ranges
                raise
            self._found += ranges

    def leave(self, files: Iterable[WrittenFile]) -> None:
        """Record the ranges that were added, and delete those of `files` that no record has.

        Call it at the end of a copy that is not committed. An error is logged, and its files are deleted.
        """
        try:
            self.record()
        except PgReplError as error:
            log.warning("%s: the ranges that were copied last are not kept: %s", self._path, error.message)
        recorded = {file.path for one in self._found for file in one.files}
        unrecorded = [file for file in files if file.path not in recorded]
        delete_uncommitted(self._lake_root, self._path, unrecorded)

    def _write(self, ranges: Iterable[KeptRange]) -> None:
        fields = [{**asdict(one), "position": str(one.position)} for one in ranges]
        record = {"layout": _LAYOUT, "identity": self._identity, "ranges": fields}
        content = json.dumps(record).encode()
        name = f"{uuid.uuid4()}.json"
        filesystem, root = open_storage(self._place)
        # A write that fails may have made the file: it is deleted with the others.
        self._records.append(f"{root}/{name}")
        with storage_errors(self._place):
            make_folders(filesystem, root)
            with Output(filesystem, f"{root}/{name}", len(content)) as output:
                output.stream.write(content)
            durable.flush_files(self._place, [name])

    def forget(self, used: Sequence[WrittenFile]) -> None:
        """Delete the records, with the sums of comparisons, and then the files of all kept ranges but the
        `used` ones.

        Call it before `used` are committed. Raises TableSnapshotError if one of them is gone, and
        LakeUnavailableError, LakeError; the records then stay.
        """
        filesystem, _ = open_storage(self._place)
        with self._recording:
            if self._records:
                self._check_present(used)
            self._is_over = True
            with storage_errors(self._place):
                delete_files(filesystem, [*self._records, *self._sums])
            remove_empty_folders(self._place)
        paths = {file.path for file in used}
        unused = [file for one in self._found for file in one.files if file.path not in paths]
        if unused:
            _delete_unless_table(self._lake_root, self._path, unused)

    def _check_present(self, used: Collection[WrittenFile]) -> None:
        present = self._present()
        if not all(_is_present(file, present) for file in used):
            raise TableSnapshotError(
                f"{self._path}: a file of its copy was deleted before it was committed",
                "end the program that deletes files of the lake, and run the command again",
            )

    def _is_usable(self, kept: KeptRange, free: Mapping[str, fs.FileInfo]) -> bool:
        since = datetime.now(UTC) - MOST_AGE
        return is_earlier(kept.copied, kept.position, self._xmin, self._position) and all(
            _is_present(file, free) and free[file.path].mtime > since for file in kept.files
        )

    def _free(self) -> dict[str, fs.FileInfo]:
        """Return the files in the table's folder that its newest version lacks; none if its log is damaged.

        A snapshot is the remedy for such a table, and so must not fail here.
        """
        try:
            table = find_table(self._uri)
            live: Collection[str] = () if table is None else live_files(table)
        except LakeTableError:
            return {}
        return {name: info for name, info in self._present().items() if name not in live}

    def _present(self) -> dict[str, fs.FileInfo]:
        """Return the files in the table's folder, by name."""
        filesystem, root = open_storage(self._uri)
        with storage_errors(self._uri, "read"):
            infos = filesystem.get_file_info(fs.FileSelector(root, allow_not_found=True))
        return {info.base_name: info for info in infos if info.is_file}

    def _read(self) -> Iterator[tuple[bool, list[KeptRange]]]:
        """Yield the ranges of each record, and whether they are of the table as it is now."""
        filesystem, root = open_storage(self._place)
        with storage_errors(self._place, "read"):
            infos = filesystem.get_file_info(fs.FileSelector(root, allow_not_found=True))
            self._records = [info.path for info in infos if _is_record(info)]
            self._sums = [info.path for info in infos if is_sums(info)]
            with requests_at_once(filesystem, len(self._records)) as each:
                contents = list(each(lambda path: read_file(filesystem, path), self._records))
        for content in contents:
            identity, ranges = _parse(content)
            yield identity == self._identity, ranges


def _is_record(info: fs.FileInfo) -> bool:
    # A folder can have the name of a table that ends so.
    return bool(info.is_file) and str(info.path).endswith(".json")


def is_sums(info: fs.FileInfo) -> bool:
    """Return True for a file with the sums of a compared range."""
    return bool(info.is_file) and str(info.path).endswith(SUMS_ENDING)


def _parse(content: bytes) -> tuple[str, list[KeptRange]]:
    """Return the identity and the ranges of a record.

    One that is not whole, since its writer was killed, has none: maintenance deletes the files that it names.
    """
    try:
        record = json.loads(content)
        if record["layout"] == _LAYOUT:
            return record["identity"], list(map(_parsed, record["ranges"]))
    except (ValueError, KeyError, TypeError) as error:
        log.info("a record of copied ranges is not whole (%s), and not used", type(error).__name__)
    return "", []


def forget_all(lake_root: str) -> None:
    """Delete the records and files of all tables, when another history of the source begins.

    Raises LakeUnavailableError, LakeError.
    """
    expire(lake_root, datetime.max.replace(tzinfo=UTC))


def expire(lake_root: str, before: datetime) -> None:
    """Delete the files of ranges that were recorded before a time, and then their records and sums.

    Raises LakeUnavailableError, LakeError.
    """
    place = _copies(lake_root)
    filesystem, root = open_storage(place)
    with storage_errors(place):
        infos = filesystem.get_file_info(fs.FileSelector(root, recursive=True, allow_not_found=True))
        old = [info for info in infos if (_is_record(info) or is_sums(info)) and info.mtime < before]
        for info in filter(_is_record, old):
            _, ranges = _parse(read_file(filesystem, info.path))
            folder = info.path.removeprefix(f"{root}/").rpartition("/")[0]
            _delete_unless_table(lake_root, folder, [file for one in ranges for file in one.files])
        delete_files(filesystem, [info.path for info in old])


def _delete_unless_table(lake_root: str, path: str, files: Iterable[WrittenFile]) -> None:
    """Delete files in a folder without a Delta table: no version can need them.

    In the folder of a table, vacuum deletes what no version needs when it is old enough.
    """
    with suppress(LakeTableError):
        if find_table(f"{lake_root}/{path}") is None:
            delete_uncommitted(lake_root, path, [file for file in files if is_written_name(file.path)])


def _copies(lake_root: str) -> str:
    return f"{system_folder(lake_root)}/copies"


def copies_folder(lake_root: str, table: TableName) -> str:
    """Return the URI of the folder with what is kept of the table's copies and comparisons."""
    return f"{_copies(lake_root)}/{table.path}"


def remove_empty_folders(folder: str) -> None:
    """Remove a table's folder, that of its schema, and the one of all copies, as far as they are empty."""
    place = durable.local_path(folder)
    if place is not None:
        for path in (place, *place.parents[:2]):
            with suppress(OSError):
                path.rmdir()


def rows_decide_texts(relation: Relation) -> bool:
    """Return True if no text of a value can change while its row stays as it is."""
    return all(_depends_on_row(column.pg_type) for column in relation.columns)


def _depends_on_row(kind: PgType) -> bool:
    if kind.kind == "c":
        # ALTER TYPE drops and adds attributes, and rewrites no row.
        return False
    if kind.parts:
        return all(_depends_on_row(part) for _, part in kind.parts)
    return kind.kind == "e" or (kind.kind == "b" and kind.oid < _FIRST_USER_OID and kind.oid not in _NAMING)


def is_earlier(copied: CopiedRange, at: LSN, xmin: int, position: LSN) -> bool:
    """Return True if a snapshot with this xmin and position can show that a range has not changed since it
    was copied.

    :param at: the position of the snapshot at which it was copied
    """
    # A standby may be behind the server of the earlier snapshot.
    return at <= position and 0 <= xmin - copied.xmin < _MOST_XIDS


def _parsed(fields: Mapping[str, Any]) -> KeptRange:
    files = tuple(WrittenFile(**file) for file in fields["files"])
    return KeptRange(CopiedRange(**fields["copied"]), files, LSN.parse(fields["position"]))


def _is_present(file: WrittenFile, present: Mapping[str, fs.FileInfo]) -> bool:
    return file.path in present and present[file.path].size == file.size


def identity_of(relation: Relation, options: TableOptions, epoch: EpochRecord) -> str:
    """Return a hash of all that decides on the files of a range, but the rows themselves."""
    parts = (
        __version__,
        relation.oid,
        relation.table,
        relation.columns,
        options,
        epoch.system_identifier,
        epoch.timeline,
        epoch.database_oid,
    )
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
