"""Tables alike, each in a schema of its own and with a course of events of its own, all on one stream."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from airflow_provider_pgrepl.replication.drift.judge import DriftResult, compare_catalog
from airflow_provider_pgrepl.replication.lake.apply.table_merge import TableResult
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.source.catalog.relations import read_relation
from airflow_provider_pgrepl.replication.source.event_trigger import trigger
from tests.support.altered import assert_as_source
from tests.support.handed import Handed
from tests.support.replicated import execute


class Courses(Handed):
    """A table `t` for each course, copied.

    `make`: the statements that make it, the same for all or by course.
    """

    def __init__(
        self,
        dsn: str,
        folder: Path,
        courses: Iterable[Hashable],
        make: Sequence[str] | Mapping[Hashable, Sequence[str]],
        **options: Any,
    ) -> None:
        self.schemas = {course: f"c{number}" for number, course in enumerate(courses)}
        super().__init__(dsn, folder, tuple(map(self.table, self.schemas)), **options)
        self.relations: dict[Any, Relation] = {}
        for course, schema in self.schemas.items():
            execute(dsn, f"create schema {schema}")
            self.execute(course, *(make[course] if isinstance(make, Mapping) else make))

    def table(self, course: Hashable) -> str:
        return f"{self.schemas[course]}.t"

    def take(self) -> Courses:
        """Copy all tables at one position."""
        if self.pipeline.event_trigger:
            with self.source() as source:
                trigger.install(source, self.pipeline)
        position = LSN(self.begin() - 1)
        self.relations = {course: self.copy_at(position, self.table(course)) for course in self.schemas}
        return self

    def execute(self, course: Hashable, *statements: str) -> None:
        """Run statements with the course's schema as the one that names are looked up in."""
        execute(f"{self.dsn} options='-c search_path={self.schemas[course]}'", *statements)

    def execute_in_all(self, *statements: str) -> None:
        for course in self.schemas:
            self.execute(course, *statements)

    def look(self, course: Hashable, *, had_rows: bool = False) -> DriftResult:
        """Compare the recorded relation of a course with the catalog, and return the verdict."""
        relation = self.relations[course]
        with self.source() as source:
            current = read_relation(source, relation.oid, self.pipeline.publication, had_rows=had_rows)
        return compare_catalog(relation, current, self.pipeline.options(relation.table))

    def bring_all(self) -> dict[Any, TableResult]:
        """Apply the received changes to every table."""
        return {course: self.hand(relation) for course, relation in self.relations.items()}

    def follow(self) -> dict[Any, TableResult]:
        self.receive()
        return self.bring_all()

    def follow_all(self) -> None:
        """Receive and apply all changes, and assert that no table stopped."""
        stopped = {course: found.error for course, found in self.follow().items() if found.error is not None}
        assert stopped == {}

    def assert_all_as_source(self) -> None:
        for course in self.schemas:
            assert_as_source(self, self.table(course))
