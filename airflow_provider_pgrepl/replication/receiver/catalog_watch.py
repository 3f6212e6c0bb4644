"""CatalogWatch: pg_catalog as the receiver needs it, and whether the publication is still the pipeline's."""

from __future__ import annotations

import logging
import time

from airflow_provider_pgrepl.errors import PublicationError, SourceConnectionError, SourceError
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.receiver.continuity import check_publication
from airflow_provider_pgrepl.replication.source.catalog.relations import read_relation
from airflow_provider_pgrepl.replication.source.connection import Connection

log = logging.getLogger(__name__)

_PAUSES_S = (0.02, 0.1, 0.5)


class CatalogWatch:
    """Reads over one connection, of which it is the only user. Waits for no lock on a table."""

    def __init__(self, connection: Connection, record: EpochRecord, *, trusts_owners: bool = False) -> None:
        self._connection = connection
        self._record = record
        self._trusts_owners = trusts_owners

    def read_relation(self, oid: int, told_by: int = 0) -> Relation | None:
        """The table as it is now; None when it is gone. Raises PublicationError, SourceConnectionError.

        `told_by`: the transaction in which the stream announces it.

        One whose catalog cannot be read, although it was tried again, is as good as gone: the others go on.
        """
        self.check_publication()
        for pause_s in (*_PAUSES_S, None):
            try:
                return self._read(oid, told_by)
            except (PublicationError, SourceConnectionError):
                raise
            except (SourceError, LookupError) as error:
                if pause_s is None:
                    log.error("what the catalog says of the table with oid %s cannot be read: %r", oid, error)
                else:
                    # Some of what the server looks up is of a later moment: DDL may have come between.
                    time.sleep(pause_s)
        return None

    def _read(self, oid: int, told_by: int) -> Relation | None:
        return read_relation(
            self._connection,
            oid,
            self._record.publication,
            had_rows=True,
            trusts_owners=self._trusts_owners,
            told_by=told_by,
        )

    def check_publication(self) -> None:
        """Raises PublicationError when it was dropped, made anew, or altered to leave out kinds of changes.

        A server from 18 on only warns of a missing publication, and sends nothing.
        """
        check_publication(self._connection, self._record.publication, self._record.publication_oid)
