"""settings/stores.py: every kind of store has all its parts, and no other code lists or compares kinds."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_provider_pgrepl.replication.settings import stores
from airflow_provider_pgrepl.replication.settings.lake import canonical, fault_of_uri, store_location
from airflow_provider_pgrepl.replication.settings.stores import SCHEMES, STORES, VARIABLES
from airflow_provider_pgrepl.replication.storage.stores import access_class
from airflow_provider_pgrepl.replication.storage.stores.base import StoreAccess

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "airflow_provider_pgrepl"
CONSTANTS = {
    name: next(scheme for scheme, kind in STORES.items() if VARIABLES[value] in kind.variables)
    for name, value in vars(stores).items()
    if isinstance(value, str) and value in VARIABLES
}
"""The scheme of the store, by the name of each constant for a variable."""
CODES = "replication/storage/errors.py"
"""Explains error codes. Several stores share a code, so that its explanation may name variables of each."""


@pytest.fixture(scope="module")
def code() -> dict[str, ast.Module]:
    """The package's modules, parsed, by their path. The module of the stores is left out."""
    return {
        str(path.relative_to(PACKAGE)): ast.parse(path.read_text())
        for path in PACKAGE.rglob("*.py")
        if path != PACKAGE / "replication" / "settings" / "stores.py"
    }


@pytest.mark.parametrize("scheme", STORES)
def test_store_has_its_module_its_page_and_its_jars(scheme: str) -> None:
    kind = STORES[scheme]
    assert issubclass(access_class(kind), StoreAccess)
    assert fault_of_uri(kind.example) == ""
    assert canonical(kind.example) == kind.example
    assert [SCHEMES[alias] for alias in (scheme, *kind.aliases)] == [scheme] * (1 + len(kind.aliases))
    page = (ROOT / "docs" / "how-to" / f"{kind.page}.md").read_text()
    assert [one.name for one in kind.variables if f"`{one.name}`" not in page] == []
    assert f"{kind.page}.md" in (ROOT / "docs" / "README.md").read_text()
    folder = kind.connector.folder
    assert f"\n{folder}: java" in (ROOT / "Makefile").read_text()
    assert kind.connector.artifact in (ROOT / "setup" / f"{folder}.xml").read_text()


@pytest.mark.parametrize("scheme", STORES)
def test_store_marks_secrets_and_one_endpoint(scheme: str) -> None:
    """An unmarked secret would be shown in Airflow's logs, an unmarked endpoint in no hint."""
    kind = STORES[scheme]
    assert [one.name for one in kind.variables if one.is_endpoint] == [
        one.name for one in kind.variables if "ENDPOINT" in one.name or "URL" in one.name
    ]
    words = re.compile("(?!.*_ID$).*(SECRET|TOKEN|KEY|PASSWORD)")
    assert [one for one in kind.variables if one.is_secret] == [
        one for one in kind.variables if words.match(one.name)
    ]
    assert all(VARIABLES[one.needs].is_secret for one in kind.variables if one.needs)


@pytest.mark.parametrize("scheme", STORES)
def test_every_variable_of_a_store_belongs_to_it_alone(scheme: str) -> None:
    names = {name for one in STORES[scheme].variables for name in (one.name, one.other_name) if name}
    names |= {*STORES[scheme].others, *STORES[scheme].identities}
    for other in STORES.keys() - {scheme}:
        given = {one.name: "x" for one in STORES[other].variables}
        assert not names & {*STORES[other].replaced_by(given)}


def texts_outside_docstrings(tree: ast.Module) -> Iterator[str]:
    documented = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
            yield node.value


def test_no_other_code_names_a_scheme_a_variable_or_a_page(code: dict[str, ast.Module]) -> None:
    names, pages = {*SCHEMES, *VARIABLES}, [kind.page for kind in STORES.values()]
    found = [
        f"{file}: {text}"
        for file, tree in code.items()
        for text in texts_outside_docstrings(tree)
        if text in names or any(page in text for page in pages)
    ]
    assert found == []


def test_no_other_code_names_variables_of_two_stores(code: dict[str, ast.Module]) -> None:
    """A module that needs them of each store has to take them from STORES, or a new store is left out."""
    found = {}
    for file, tree in code.items():
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & CONSTANTS.keys()
        if len({CONSTANTS[name] for name in used}) > 1:
            found[file] = used
    assert found.keys() == {CODES}


def test_no_other_code_compares_the_class_of_a_filesystem_or_an_access(code: dict[str, ast.Module]) -> None:
    classes = {kind.access.partition(".")[2] for kind in STORES.values()} | {
        "S3FileSystem",
        "GcsFileSystem",
        "AzureFileSystem",
    }
    own = {f"replication/storage/stores/{kind.access.partition('.')[0]}.py" for kind in STORES.values()}
    found = {
        file
        for file, tree in code.items()
        for node in ast.walk(tree)
        if {getattr(node, "id", ""), getattr(node, "attr", "")} & classes
    }
    assert found <= own


@pytest.mark.parametrize("scheme", STORES)
def test_example_names_a_place_of_its_own_kind(scheme: str) -> None:
    place = store_location(STORES[scheme].example)
    assert place is not None
    assert place.scheme == scheme
