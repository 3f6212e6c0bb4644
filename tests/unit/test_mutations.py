"""The list of mutations fits the code: `make mutations`, which runs them, takes minutes."""

from __future__ import annotations

import pytest

from tests.mutate import BEGIN, END, ROOT, Mutation, read_mutations

MUTATIONS = read_mutations()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.name for mutation in MUTATIONS])
def test_mutation_applies_once_and_names_an_existing_test(mutation: Mutation) -> None:
    assert mutation.apply((ROOT / mutation.path).read_text("utf-8"))
    file, _, test = mutation.killed_by.split(" ")[0].partition("::")
    assert f"def {test.partition('[')[0]}" in (ROOT / file).read_text("utf-8")


def test_enough_mutations_are_listed() -> None:
    assert len(MUTATIONS) >= 40


def test_table_of_mutations_has_their_present_tests() -> None:
    """Except for the seconds, which `python -m tests.mutate --write` measures."""
    table = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition(BEGIN)[2].partition(END)[0]
    _, _, _, *rows = table.splitlines()
    expected = [f"| {one.name} | {one.breaks} | `{one.killed_by}` " for one in MUTATIONS]
    assert sorted(row.rpartition("|")[0].rpartition("|")[0] for row in rows) == sorted(expected)
