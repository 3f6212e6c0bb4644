"""Op `R`: a Relation message as received, with the table's definition in pg_catalog at that time."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property

from airflow_provider_pgrepl.replication.pgoutput.messages import RelationMessage, WireColumn
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import PublicationStatus, Relation


@dataclass(frozen=True)
class RelationRecord:
    """A relation as it was received. `catalog` is None if the table no longer existed at that time.

    `using`: an ALTER TABLE with, or possibly with, a USING clause preceded the relation, so a column whose
    type changed may have any new values. Only an event trigger reports this. `watched`: an event trigger
    reported all DDL since the previous relation, so only DDL with a message of the trigger can explain a new
    data file.

    `hidden`: the positions in the message of columns whose values the changelog does not keep.
    `publication_status`: as the receiver has read it; the record then holds no received relation.
    """

    message: RelationMessage
    catalog: Relation | None
    using: bool = False
    watched: bool = False
    publication_status: PublicationStatus | None = None
    hidden: tuple[int, ...] = ()

    def to_json(self) -> str:
        catalog = json.loads(self.catalog.to_json()) if self.catalog else None
        fields = {"message": asdict(self.message), "catalog": catalog}
        fields |= {name: True for name in ("using", "watched") if getattr(self, name)}
        if self.hidden:
            fields["hidden"] = self.hidden
        if self.publication_status is not None:
            # The stored key keeps its first name: changelog files are immutable.
            fields["standing"] = asdict(self.publication_status)
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))

    @classmethod
    def of_catalog(cls, relation: Relation) -> RelationRecord:
        """Return the record of a relation that was not received, with a message made from its catalog."""
        columns = tuple(
            WireColumn(column.name, column.type_oid, column.typmod, column.is_key)
            for column in relation.columns
        )
        name = relation.table
        return cls(
            RelationMessage(relation.oid, name.schema, name.name, relation.replica_identity, columns),
            relation,
        )

    @classmethod
    def of_publication_status(cls, relation_id: int, status: PublicationStatus) -> RelationRecord:
        """Return the record of a relation's publication status, as the receiver has read it."""
        return cls(RelationMessage(relation_id, "", "", "", ()), None, publication_status=status)

    @classmethod
    def from_json(cls, text: str) -> RelationRecord:
        fields = json.loads(text)
        message = fields["message"]
        columns = tuple(WireColumn(**column) for column in message["columns"])
        catalog, status = fields["catalog"], fields.get("standing")
        return cls(
            RelationMessage(**{**message, "columns": columns}),
            Relation.from_json(json.dumps(catalog)) if catalog else None,
            fields.get("using", False),
            fields.get("watched", False),
            PublicationStatus.from_dict(status) if status else None,
            tuple(fields.get("hidden", ())),
        )

    @property
    def name(self) -> TableName:
        """The table's name in the catalog at receipt, or else in the message.

        A version has one name, although it may be sent in two messages, before and after a rename.
        """
        if self.catalog is not None:
            return self.catalog.table
        return TableName(self.message.schema, self.message.name)

    @property
    def names(self) -> set[TableName]:
        """The table's names in the stream and in the catalog. They differ after a rename in between."""
        return {self.name, TableName(self.message.schema, self.message.name)}

    @property
    def agrees(self) -> bool:
        """True if stream and catalog describe the same columns and identity: no DDL ran between the two."""
        message, catalog = self.message, self.catalog
        if catalog is None or message.oid != catalog.oid:
            return False
        return self.same_columns and message.replica_identity == catalog.replica_identity and self._same_key

    @property
    def same_columns(self) -> bool:
        """True if stream and catalog have the same columns with the same types, in the same order."""
        sent = [(column.name, column.type_oid, column.typmod) for column in self.message.columns]
        columns = self.catalog.columns if self.catalog else ()
        return sent == [(column.name, column.type_oid, column.typmod) for column in columns]

    @property
    def _same_key(self) -> bool:
        """True if stream and catalog mark the same key columns, or if they cannot be compared.

        With replica identity FULL the stream marks every column. The catalog marks no column of a key that is
        only partly published.
        """
        known = {column.name for column in self.catalog.key_columns} if self.catalog else set()
        if self.message.replica_identity == "f" or not known:
            return True
        return known == {column.name for column in self.message.columns if column.is_identity}

    @cached_property
    def version(self) -> int:
        """A 63-bit hash of the record.

        If stream and catalog agree, and the record has no flag and no hidden column, it is the version of
        the catalog relation, so that it equals the version of a snapshot.
        """
        is_plain = not (self.using or self.watched or self.hidden)
        if self.catalog is not None and self.agrees and is_plain:
            return self.catalog.version
        return int.from_bytes(hashlib.blake2b(self.to_json().encode(), digest_size=8).digest()) >> 1
