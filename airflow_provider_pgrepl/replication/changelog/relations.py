"""Op `R`: a Relation message as received, with what pg_catalog said at receipt."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property

from airflow_provider_pgrepl.replication.pgoutput.messages import RelationMessage, WireColumn
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import PublicationStanding, Relation


@dataclass(frozen=True)
class RelationRecord:
    """A relation as it was received. `catalog` is None when the table was gone at receipt.

    `using`: it came with an ALTER TABLE that had, or may have had, a USING clause, which gives a column whose
    type was changed values of any kind. Only an event trigger tells. `watched`: it told of all DDL since the
    relation that was received before, so that DDL explains no other file than one that came with a message.
    `hidden`: columns, by their places in the message, whose values the changelog does not keep.
    `standing`: nothing was received; the receiver says how the table was published when it looked.
    """

    message: RelationMessage
    catalog: Relation | None
    using: bool = False
    watched: bool = False
    standing: PublicationStanding | None = None
    hidden: tuple[int, ...] = ()

    def to_json(self) -> str:
        catalog = json.loads(self.catalog.to_json()) if self.catalog else None
        fields = {"message": asdict(self.message), "catalog": catalog}
        fields |= {name: True for name in ("using", "watched") if getattr(self, name)}
        if self.hidden:
            fields["hidden"] = self.hidden
        if self.standing is not None:
            fields["standing"] = asdict(self.standing)
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))

    @classmethod
    def of_catalog(cls, relation: Relation) -> RelationRecord:
        """A relation that no stream has sent, as one would that agrees with the catalog."""
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
    def of_standing(cls, relation_id: int, standing: PublicationStanding) -> RelationRecord:
        """How a relation's table was published when the receiver looked."""
        return cls(RelationMessage(relation_id, "", "", "", ()), None, standing=standing)

    @classmethod
    def from_json(cls, text: str) -> RelationRecord:
        fields = json.loads(text)
        message = fields["message"]
        columns = tuple(WireColumn(**column) for column in message["columns"])
        catalog, standing = fields["catalog"], fields.get("standing")
        return cls(
            RelationMessage(**{**message, "columns": columns}),
            Relation.from_json(json.dumps(catalog)) if catalog else None,
            fields.get("using", False),
            fields.get("watched", False),
            PublicationStanding.from_dict(standing) if standing else None,
            tuple(fields.get("hidden", ())),
        )

    @property
    def name(self) -> TableName:
        """What the table was called when this was received: a version has one name, which two messages of
        it, one before a rename and one after, need not have."""
        if self.catalog is not None:
            return self.catalog.table
        return TableName(self.message.schema, self.message.name)

    @property
    def names(self) -> set[TableName]:
        """What the stream and the catalog called it: a rename may lie between the two."""
        return {self.name, TableName(self.message.schema, self.message.name)}

    @property
    def agrees(self) -> bool:
        """Whether stream and catalog describe the same columns and identity: no DDL lay between the two."""
        message, catalog = self.message, self.catalog
        if catalog is None or message.oid != catalog.oid:
            return False
        return self.same_columns and message.replica_identity == catalog.replica_identity and self._same_key

    @property
    def same_columns(self) -> bool:
        """Whether stream and catalog name the same columns with the same types, in one order."""
        sent = [(column.name, column.type_oid, column.typmod) for column in self.message.columns]
        columns = self.catalog.columns if self.catalog else ()
        return sent == [(column.name, column.type_oid, column.typmod) for column in columns]

    @property
    def _same_key(self) -> bool:
        """With FULL the stream marks every column; a key that is published in part only, the catalog none."""
        known = {column.name for column in self.catalog.key_columns} if self.catalog else set()
        if self.message.replica_identity == "f" or not known:
            return True
        return known == {column.name for column in self.message.columns if column.is_identity}

    @cached_property
    def version(self) -> int:
        """63-bit hash: the catalog relation's own when both agree, so that it equals a snapshot's."""
        is_plain = not (self.using or self.watched or self.hidden)
        if self.catalog is not None and self.agrees and is_plain:
            return self.catalog.version
        return int.from_bytes(hashlib.blake2b(self.to_json().encode(), digest_size=8).digest()) >> 1
