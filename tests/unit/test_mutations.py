"""The list of mutations fits the code: `make mutations`, which runs them, takes minutes."""

from __future__ import annotations

import pytest

from tests.mutate import ROOT, Mutation, read_mutations

MUTATIONS = read_mutations()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.name for mutation in MUTATIONS])
def test_mutation_applies_once_and_names_an_existing_test(mutation: Mutation) -> None:
    assert mutation.apply((ROOT / mutation.path).read_text("utf-8"))
    file, _, test = mutation.killed_by.split(" ")[0].partition("::")
    assert f"def {test.partition('[')[0]}" in (ROOT / file).read_text("utf-8")


def test_enough_mutations_are_listed() -> None:
    assert len(MUTATIONS) >= 40
