"""The selection of a pipeline's tables: its names and patterns, resolved against the catalog.

`derived_exclusions` finds columns that have the values of excluded ones under names that no setting excludes.
A child by plain inheritance is copied and sent as a separate table, so a setting that names the parent's
column does not cover the child's. Both columns have the same name: PostgreSQL renames an inherited column
together with its parent's. A generated column may be computed from an excluded one, as a column for full-text
search is computed from several.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

from airflow_provider_pgrepl.errors import ConfigError, TableError, one_line, remove
from airflow_provider_pgrepl.replication.postgres.names import ColumnName, TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.runtime.quantities import show_list
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.tables import COLUMN_FIELDS
from airflow_provider_pgrepl.replication.source.catalog.followed_names import FollowedNames
from airflow_provider_pgrepl.replication.source.catalog.refused_changes import RefusedChanges
from airflow_provider_pgrepl.replication.source.catalog.relations import any_exists, read_relations
from airflow_provider_pgrepl.replication.source.connection import Connection, rows
from airflow_provider_pgrepl.replication.source.server_errors import source_errors

from .tables import is_system, refused_tables, shape_problems, why_no_table

_PARENTS = """
WITH RECURSIVE above (child, oid) AS (
    SELECT i.inhrelid, i.inhparent
    FROM pg_catalog.pg_inherits i JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid
    WHERE i.inhrelid = ANY (%s::oid[]) AND NOT c.relispartition
    UNION
    SELECT above.child, i.inhparent FROM above JOIN pg_catalog.pg_inherits i ON i.inhrelid = above.oid
)
SELECT child::bigint, oid::bigint FROM above ORDER BY child, oid
"""
# An expression cannot use the whole row, nor another generated column. A partition may have another one.
_MADE_OF = """
SELECT DISTINCT a.attrelid::bigint, a.attname::text, source.attname::text
FROM pg_catalog.pg_attribute a
    JOIN pg_catalog.pg_attrdef e ON e.adrelid = a.attrelid AND e.adnum = a.attnum
    JOIN pg_catalog.pg_depend d ON d.refclassid = 'pg_catalog.pg_class'::regclass AND d.refobjid = a.attrelid
        AND (d.classid = 'pg_catalog.pg_attrdef'::regclass AND d.objid = e.oid
            OR d.classid = 'pg_catalog.pg_class'::regclass AND d.objid = a.attrelid AND d.objsubid = a.attnum)
    JOIN pg_catalog.pg_attribute source ON source.attrelid = a.attrelid AND source.attnum = d.refobjsubid
WHERE a.attrelid = ANY (%s::oid[]) AND a.attgenerated <> '' AND source.attnum <> a.attnum
ORDER BY 1, 2, 3
"""
log = logging.getLogger(__name__)
_CANDIDATES = """
SELECT c.oid::bigint, n.nspname, c.relname, c.relkind::text, c.relpersistence::text, c.relispartition
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = ANY (%s) OR c.oid = ANY (%s::oid[])
"""
_SHOWN = 20
_TABLE_KINDS = ("r", "p", "f")
_BY_PATTERN = " (one that a pattern matches: pgrepl remove FILE.json NAME)"
_KEYLESS = "no usable key; name such a table in `tables` to see what it lacks"


class RecordedRules(Protocol):
    """The settings that named tables and columns when these were recorded."""

    def problems(self, relation: Relation) -> Iterable[str]:
        """Return a sentence for each setting that names a table or its columns only by an earlier name."""


def derived_exclusions(
    connection: Connection,
    pipeline: Pipeline,
    relations: Mapping[int, Relation],
    recorded: RecordedRules | None,
) -> Iterator[tuple[int, str]]:
    """Yield the oid of each table that publishes the values of an excluded column, with a sentence about it.

    `recorded`: None if nothing was recorded. Raises SourceConnectionError, SourceError.
    """
    excluded = frozenset(map(ColumnName.parse, pipeline.exclude_columns))
    if excluded:
        yield from _inherited(connection, excluded, relations, recorded)
        yield from _generated(connection, excluded, relations)


def _inherited(
    connection: Connection,
    excluded: frozenset[ColumnName],
    relations: Mapping[int, Relation],
    recorded: RecordedRules | None,
) -> Iterator[tuple[int, str]]:
    with source_errors("looking for inherited columns"):
        pairs = rows(connection, _PARENTS, (list(relations),))
    parents = read_relations(connection, {parent for _, parent in pairs}, None) if pairs else {}
    # A parent that is selected may have another name in the pipeline.
    parents |= {oid: relations[oid] for oid in parents.keys() & relations.keys()}
    for oid, parent_oid in pairs:
        child, parent = relations[oid], parents.get(parent_oid)
        if parent is None:
            continue
        for column in (*child.columns, *child.unpublished):
            own, inherited = (ColumnName(one.table, column.name) for one in (child, parent))
            if inherited in excluded and own not in excluded:
                yield oid, f"inherits column {inherited}, which exclude_columns names: name {own} there"
        for problem in recorded.problems(parent) if recorded is not None else ():
            yield oid, f"inherits from {parent.table}: {problem}"


def _generated(
    connection: Connection, excluded: frozenset[ColumnName], relations: Mapping[int, Relation]
) -> Iterator[tuple[int, str]]:
    tables = {one.table for one in excluded}
    wanted = {oid: one for oid, one in relations.items() if one.table in tables}
    if not wanted:
        return
    holders = {part.oid: oid for oid, one in wanted.items() for part in one.partitions} | {
        oid: oid for oid in wanted
    }
    with source_errors("looking for generated columns"):
        found = rows(connection, _MADE_OF, (list(holders),))
    made_of = dict.fromkeys((holders[oid], generated, source) for oid, generated, source in found)
    for oid, *names in made_of:
        relation = wanted[oid]
        generated, source = (ColumnName(relation.table, name) for name in names)
        is_published = any(column.name == generated.name for column in relation.columns)
        if is_published and source in excluded and generated not in excluded:
            yield (
                oid,
                f"column {generated} is generated from {source}, which exclude_columns names: name it there",
            )


class RecordedNames(Protocol):
    """The names that tables and columns had when they were recorded, and the settings that used them."""

    def names(self, oid: int) -> Set[TableName]:
        """Return every name under which a table was recorded."""

    def oids(self, table: TableName) -> Set[int]:
        """Return the oids of the tables that were recorded under a name."""

    def problems(self, relation: Relation) -> Iterable[str]:
        """Return a sentence for each setting that names a table or its columns only by an earlier name."""


@dataclass(frozen=True)
class RequestedTables:
    """Requests in addition to the pipeline file.

    `added` and `removed`: tables that an operator added or removed. `replicated`: tables that are replicated
    already. If such a table cannot be replicated any more, a pattern reports a problem and does not leave it
    out. `recorded`: None if nothing was recorded about the source's tables. `followed`: the names of renamed
    tables; None: every table is selected by its present name.
    """

    added: frozenset[TableName] = frozenset()
    removed: frozenset[TableName] = frozenset()
    replicated: frozenset[TableName] = frozenset()
    recorded: RecordedNames | None = None
    followed: FollowedNames | None = None


@dataclass(frozen=True)
class SelectedTables:
    """The result of `select_tables`: tables that can be replicated, by name, and the problems of others.

    `matched`: tables that only a pattern selects. `unnamed`: tables whose only problem is a setting with an
    earlier name; they cannot be copied, but can continue. `left_out`: why patterns leave tables out.
    """

    relations: tuple[Relation, ...]
    problems: Mapping[TableName, TableError]
    matched: frozenset[TableName]
    unnamed: frozenset[TableName] = frozenset()
    left_out: Mapping[TableName, str] = field(default_factory=dict)

    @property
    def tables(self) -> frozenset[TableName]:
        return frozenset(relation.table for relation in self.relations) | self.problems.keys()


def resolve_tables(
    connection: Connection, pipeline: Pipeline, requested: RequestedTables | None = None
) -> list[Relation]:
    """Return the pipeline's tables, ordered by name, with patterns expanded. Each of them can be replicated.

    Raises ConfigError if a setting names a table that is not selected, and TableError, which lists every
    table that cannot be replicated and why. A pattern leaves out tables that cannot be replicated, which is
    logged, and partitions, which belong to their partitioned table.
    """
    requested = requested or RequestedTables()
    selected = select_tables(connection, pipeline, requested)
    log_left_out(selected)
    problems = [error.message for error in selected.problems.values()]
    if not selected.tables:
        schemas = ", ".join(sorted(f"{schema}.*" for schema in _patterns(pipeline)))
        problems = [f"{schemas}: no table can be replicated; name a table to see what it lacks"]
    if problems:
        raise TableError(
            "\n".join(sorted(line for text in problems for line in text.splitlines())),
            "fix the cause or the name, or remove the table from the pipeline's tables"
            + (_BY_PATTERN if requested.replicated & selected.problems.keys() else ""),
        )
    check_choices(pipeline, selected.tables | requested.removed)
    return list(selected.relations)


def select_tables(connection: Connection, pipeline: Pipeline, requested: RequestedTables) -> SelectedTables:
    """Select the pipeline's tables, and return each table's problems separately.

    Raises ConfigError if insert_only names a table that is not selected, and TableError for a pattern of a
    system schema.
    """
    patterns = _patterns(pipeline)
    insert_only = frozenset(TableName.parse(text) for text in pipeline.insert_only)
    named = frozenset(TableName.parse(text) for text in pipeline.tables if not text.endswith(".*"))
    _check_insert_only(insert_only, named | requested.added | requested.removed, patterns)
    # A table in insert_only counts as named, even if only a pattern selects it.
    named |= insert_only | requested.added
    replicated = frozenset(table for table in requested.replicated if table.schema in patterns) - named
    return _Selection(
        connection,
        pipeline,
        (named | replicated) - requested.removed,
        patterns,
        insert_only,
        requested,
    ).select(by_pattern=replicated)


def left_out_warnings(selected: SelectedTables) -> Iterator[str]:
    """Yield a warning for each reason why patterns leave tables out, with the tables."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for table, reason in sorted(selected.left_out.items()):
        by_reason[reason].append(str(table))
    for reason, tables in by_reason.items():
        yield f"the pattern leaves out {show_list(tables, _SHOWN)}: {reason}"


def log_left_out(selected: SelectedTables) -> None:
    """Log the warnings of `left_out_warnings`."""
    for warning in left_out_warnings(selected):
        log.warning("%s", warning)


def lists(pipeline: Pipeline, table: TableName) -> bool:
    """Return True if a pipeline file selects a table, by name or by a pattern."""
    names = {TableName.parse(text) for text in (*pipeline.tables, *pipeline.insert_only) if text[-2:] != ".*"}
    return table in names or table.schema in _patterns(pipeline)


def _patterns(pipeline: Pipeline) -> frozenset[str]:
    """Return the schemas that a pipeline selects by a pattern (`schema.*`)."""
    texts = (text for text in pipeline.tables if text.endswith(".*"))
    return frozenset(TableName.parse(text[:-1] + "any").schema for text in texts)


def _check_insert_only(
    insert_only: Iterable[TableName], named: frozenset[TableName], patterns: frozenset[str]
) -> None:
    unknown = sorted(table for table in insert_only if table not in named and table.schema not in patterns)
    if unknown:
        raise ConfigError(
            f"insert_only: {', '.join(map(str, unknown))} is not among the tables of the pipeline",
            "list it in tables too, or take it out of insert_only",
        )


def check_choices(pipeline: Pipeline, tables: Set[TableName]) -> None:
    """Raise ConfigError if a setting names a table that is not in `tables`: the name is misspelled.

    Raises ConfigError as well if target_schemas names a schema of which the pipeline selects no table.
    """
    chosen = _chosen_tables(pipeline)
    unknown = {setting: sorted(found - tables) for setting, found in chosen.items() if found - tables}
    if unknown:
        listed = "; ".join(f"{setting}: {', '.join(map(str, found))}" for setting, found in unknown.items())
        raise ConfigError(
            f"{listed} is not among the tables of the pipeline",
            f"list it in tables too, or take it out of {' and '.join(unknown)}",
        )
    schemas = {table.schema for table in tables} | _patterns(pipeline)
    if missing := sorted(pipeline.target_schemas.keys() - schemas):
        raise ConfigError(
            f"target_schemas: {', '.join(map(one_line, missing))}: the pipeline has no table of that schema",
            "correct the name, or take it out of target_schemas",
        )


def _chosen_tables(pipeline: Pipeline) -> dict[str, set[TableName]]:
    """Return the tables that settings name, directly or by a column, by setting."""
    chosen = {
        setting: {ColumnName.parse(name).table for name in getattr(pipeline, setting)}
        for setting in COLUMN_FIELDS
    }
    for setting in ("per_table", "target_tables"):
        chosen[setting] = {TableName.parse(name) for name in getattr(pipeline, setting)}
    return chosen


class _Selection:
    """One run of `select_tables`, which collects relations and problems."""

    def __init__(
        self,
        connection: Connection,
        pipeline: Pipeline,
        named: frozenset[TableName],
        patterns: frozenset[str],
        insert_only: frozenset[TableName],
        requested: RequestedTables,
    ) -> None:
        self._connection = connection
        self._pipeline = pipeline
        self._named = named
        self._patterns = patterns
        self._insert_only = insert_only
        self._removed = requested.removed
        self._names = requested.followed or FollowedNames(pipeline)
        self._followed: dict[int, TableName] = {}
        # A pattern must not leave out tables that settings name: the settings would have no effect.
        self._expected = named.union(*_chosen_tables(pipeline).values())
        self._recorded = requested.recorded
        self._lost: list[TableName] = []
        self._unnamed: set[TableName] = set()
        self._problems: dict[TableName, list[str]] = defaultdict(list)
        self._refused: dict[int, RefusedChanges] = {}
        self._derived: dict[int, list[str]] = defaultdict(list)
        self._left_out: dict[TableName, str] = {}

    def select(self, by_pattern: frozenset[TableName]) -> SelectedTables:
        for schema in sorted(filter(is_system, self._patterns)):
            raise TableError(f"{schema}.*: a system schema, which is never replicated")
        chosen = self._choose()
        relations = read_relations(
            self._connection,
            chosen,
            self._pipeline.publication,
            planned=self._pipeline.publication_mode == "create",
        )
        relations = {
            oid: one.followed_as(self._followed.get(oid, one.table)) for oid, one in relations.items()
        }
        self._refused = refused_tables(self._connection, self._pipeline, relations.values())
        for oid, problem in derived_exclusions(self._connection, self._pipeline, relations, self._recorded):
            self._derived[oid].append(problem)
        usable = [relation for relation in relations.values() if self._is_usable(relation)]
        usable = [relation for relation in usable if relation.table not in self._problems]
        problems = {
            table: TableError("\n".join(f"{table}: {text}" for text in texts))
            for table, texts in sorted(self._problems.items())
        }
        tables = {relation.table for relation in usable} | problems.keys()
        return SelectedTables(
            tuple(sorted(usable, key=lambda relation: relation.table)),
            problems,
            frozenset(tables - self._named | tables & by_pattern),
            frozenset(self._unnamed),
            self._left_out,
        )

    def _choose(self) -> list[int]:
        """Return the oids of the ordinary and partitioned tables that are named or match a pattern."""
        excluded = {ColumnName.parse(column).table for column in self._pipeline.exclude_columns}
        schemas = sorted({table.schema for table in self._named | excluded} | self._patterns)
        with source_errors("listing the tables"):
            found = rows(self._connection, _CANDIDATES, (schemas, list(self._names.followed())))
        by_name = {TableName(schema, name): tuple(more) for _, schema, name, *more in found}
        oids = {TableName(schema, name): oid for oid, schema, name, *_ in found}
        self._rename_followed(by_name, oids)
        self._lost = sorted(table for table in excluded - by_name.keys() if not self._is_renamed(table))
        chosen = []
        for table in sorted(self._named - self._problems.keys()):
            problem = why_no_table(table, by_name.get(table))
            if problem:
                self._problems[table].append(problem)
            else:
                chosen.append(oids[table])
        for schema in sorted(self._patterns):
            chosen += self._matches(schema, by_name, oids)
        self._refuse_partitions_beside_their_table(chosen)
        return chosen

    def _rename_followed(self, by_name: dict[TableName, tuple[Any, ...]], oids: dict[TableName, int]) -> None:
        """Give renamed tables that the pipeline follows the names under which it does.

        No pattern matches a removed one under its present name.
        """
        present = {oid: name for name, oid in oids.items()}
        for oid in self._names.followed().keys() & present.keys():
            now = present[oid]
            table = self._names.find(self._connection, oid, now)
            if table == now:
                continue
            if table in self._removed:
                if now not in self._named:
                    del by_name[now], oids[now]
                continue
            self._followed[oid] = table
            by_name[table], oids[table] = by_name.pop(now), oids.pop(now)
            if now in self._named:
                self._problems[now].append(
                    f"is replicated as {table}, the name that it had (on_rename: follow). To replicate it"
                    f" under its present name, first {remove(table)}"
                )

    def _matches(
        self, schema: str, by_name: dict[TableName, tuple[Any, ...]], oids: dict[TableName, int]
    ) -> list[int]:
        matching = []
        for table, facts in by_name.items():
            if table.schema != schema or table in self._named or table in self._removed or facts[2]:
                continue
            problem = why_no_table(table, facts)
            if problem is None:
                matching.append(oids[table])
            elif facts[0] in _TABLE_KINDS:
                self._left_out[table] = problem
        return matching

    def _refuse_partitions_beside_their_table(self, chosen: list[int]) -> None:
        with source_errors("reading the partitions"):
            pairs = rows(
                self._connection,
                "SELECT c.oid::bigint, a.relid::oid::bigint FROM pg_catalog.pg_class c,"
                " LATERAL pg_catalog.pg_partition_ancestors(c.oid) AS a (relid)"
                " WHERE c.relispartition AND c.oid = ANY (%(oids)s::oid[])"
                " AND a.relid <> c.oid AND a.relid::oid = ANY (%(oids)s::oid[])",
                {"oids": chosen},
            )
        both = read_relations(self._connection, {oid for pair in pairs for oid in pair}, None)
        names = {oid: self._followed.get(oid, relation.table) for oid, relation in both.items()}
        for partition, ancestor in pairs:
            self._problems[names[partition]].append(
                f"is a partition of {names[ancestor]}, which is replicated as a whole; take the"
                " partition out of tables"
            )

    def _is_usable(self, relation: Relation) -> bool:
        """Return True if the table can be replicated.

        Otherwise, record a problem for a named table; a pattern leaves the table out.
        """
        refused = self._refused.get(relation.oid)
        by_pattern = relation.table not in self._expected
        if by_pattern and not _has_identity(relation):
            self._left_out[relation.table] = _KEYLESS
            return False
        if by_pattern and refused:
            self._left_out[relation.table] = f"{refused.problem}; {refused.cure}"
            return False
        problems = [*self._shape_problems(relation), *self._key_problems(relation)]
        if by_pattern and problems:
            self._left_out[relation.table] = "; ".join(problems)
            return False
        by_rule = [*self._rule_problems(relation)]
        if by_rule and not problems:
            self._unnamed.add(relation.table)
        if not problems and refused:
            problems = [f"{refused.problem}. Either {refused.cure}"]
        if problems or by_rule:
            self._problems[relation.table] += [*problems, *by_rule]
        return not problems and not by_rule

    def _shape_problems(self, relation: Relation) -> Iterable[str]:
        return shape_problems(self._connection, self._pipeline, relation)

    def _rule_problems(self, relation: Relation) -> Iterable[str]:
        """Yield the problems of settings that no longer cover the table or its columns.

        They name it, or a lost table whose rows it may hold, by an earlier name, or name a column from which
        one of its columns is derived.
        """
        yield from self._derived.get(relation.oid, ())
        if self._recorded is None:
            return
        yield from self._recorded.problems(relation)
        if self._lost and not self._recorded.names(relation.oid):
            lost = ", ".join(map(str, self._lost))
            yield (
                f"a new table, and exclude_columns names columns of {lost}, which no longer exists: this"
                f" table may hold its rows. Name the columns of {relation.table} that are to be left out,"
                f" and take {lost} out of exclude_columns"
            )

    def _is_renamed(self, table: TableName) -> bool:
        """Return True if a table that was recorded under this name exists under another name."""
        known = self._recorded.oids(table) if self._recorded is not None else ()
        return bool(known) and any_exists(self._connection, known)

    def _key_problems(self, relation: Relation) -> Iterable[str]:
        """Yield why rows cannot be distinguished, by a key or, with REPLICA IDENTITY FULL, by all values."""
        if not relation.key_columns and self._pipeline.options(relation.table).policy.deletes == "soft":
            yield (
                "it has no key, so deletes: soft cannot say which row of equal ones is marked; give it a"
                " primary key, or set deletes to hard for it in per_table"
            )
        if _has_identity(relation) or relation.table in self._insert_only:
            return
        table = relation.source_table.sql
        why = {
            "n": "its replica identity is NOTHING",
            "i": "its replica identity index is gone, or not published as a whole",
            "f": "it has replica identity FULL, but no columns by which to tell rows apart",
        }.get(relation.replica_identity, "it has no primary key that can serve as replica identity")
        if relation.replica_identity == "f":
            yield f"{why}; when its rows are only ever inserted, list it in insert_only"
            return
        yield (
            f"{why}, and publishing it would make the application's UPDATE and DELETE on it fail. Either"
            f" ALTER TABLE {table} ADD PRIMARY KEY (…); or, with a unique index over NOT NULL columns,"
            f" ALTER TABLE {table} REPLICA IDENTITY USING INDEX …; or ALTER TABLE {table} REPLICA IDENTITY"
            f" DEFAULT where a primary key exists; or ALTER TABLE {table} REPLICA IDENTITY FULL, with which"
            " changes carry whole rows; or, when its rows are only ever inserted, list it in insert_only"
        )


def _has_identity(relation: Relation) -> bool:
    return bool(relation.key_columns) or (relation.replica_identity == "f" and bool(relation.columns))
