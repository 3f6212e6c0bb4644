"""Files of a lake that are written: a small one of a store is in memory until it is whole, and then one put.

Arrow's own stream puts in two exchanges (it waits for `100 Continue`), and a server that closes the
connection in between costs it up to a second before it tries again.
"""

from __future__ import annotations

from types import TracebackType

import pyarrow as pa
from pyarrow import fs

from airflow_provider_pgrepl.replication.storage import objects
from airflow_provider_pgrepl.replication.storage.stores.object_store import is_store

_IN_MEMORY_BYTES = 4 << 20


class Output:
    """A file that is being written through `stream`; a context manager. It is there once it is closed."""

    def __init__(self, filesystem: fs.FileSystem, path: str, size: int) -> None:
        """`size`: about how many bytes it will have at most. Raises OSError, as all else here."""
        self._filesystem, self._path = filesystem, path
        self._is_put = is_store(filesystem) and size <= _IN_MEMORY_BYTES
        self.stream: pa.NativeFile = (
            pa.BufferOutputStream() if self._is_put else filesystem.open_output_stream(path)
        )

    def tell(self) -> int:
        """The bytes so far."""
        return int(self.stream.tell())

    def close(self) -> None:
        """Have it there, whole."""
        if self.stream.closed:
            return
        if self._is_put:
            objects.put(self._filesystem, self._path, self.stream.getvalue().to_pybytes())
        else:
            self.stream.close()

    def drop(self) -> None:
        """Close it, as it is not wanted any more: what there is of it, if anything, is to be deleted."""
        if not self.stream.closed:
            self.stream.close()

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.drop()
