"""A pipeline for one test after another, replaced when a test does not leave it whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from airflow_provider_pgrepl.replication.state.tables import TableState
from demo.postgres import Server
from tests.conftest import fresh_database
from tests.support.in_process import InProcess


class SharedPipeline:
    """A pipeline that tests borrow. `begin` makes it from a database's DSN, in a folder."""

    def __init__(self, begin: Callable[[str, Path], InProcess], server: Server, folder: Path) -> None:
        self._begin, self._server, self._folder = begin, server, folder
        self._numbers = itertools.count()
        self._stack = ExitStack()
        self._now: InProcess | None = None

    @contextmanager
    def lent(self) -> Iterator[InProcess]:
        """Yield the pipeline that the last test left whole, or a new one, with an empty log."""
        pipeline = self._now = self._now or self._new()
        pipeline.log.unlink(missing_ok=True)
        try:
            yield pipeline
        finally:
            if not is_whole(pipeline):
                self.close()

    def close(self) -> None:
        self._now = None
        self._stack.close()

    def _new(self) -> InProcess:
        dsn = self._stack.enter_context(fresh_database(self._server))
        folder = self._folder / str(next(self._numbers))
        folder.mkdir()
        return self._begin(dsn, folder)


def is_whole(pipeline: InProcess) -> bool:
    """Return True if all tables are replicated and equal the source."""
    return all(
        record.state is TableState.STREAMING and not pipeline.differences(name)
        for name, record in pipeline.states().items()
    )
