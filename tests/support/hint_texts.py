"""The texts of the package that contain hints, with `{name}` in place of each value."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).parents[2]
PACKAGE = _ROOT / "airflow_provider_pgrepl"
VALUE = re.compile(r"\{[^{}]*\}")


class Text(NamedTuple):
    """A text, and the file that it is in: below the package, or a page of the reference."""

    file: str
    text: str


@functools.cache
def texts_of_code() -> tuple[Text, ...]:
    """Return every text of the package but docstrings, with the expression of each value in braces."""
    return tuple(_texts_of_code())


def _texts_of_code() -> Iterator[Text]:
    for file in sorted(PACKAGE.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(file.read_text("utf-8"))))
        parts = {id(part) for node in nodes for part in _parts(node)}
        for node in nodes:
            if id(node) not in parts and (text := _text(node)):
                yield Text(file.relative_to(PACKAGE).as_posix(), text)


def texts_of_reference() -> Iterator[Text]:
    """The lines of the reference of errors."""
    page = "docs/reference/errors.md"
    for line in (_ROOT / page).read_text("utf-8").splitlines():
        yield Text(page, line)


def _parts(node: ast.AST) -> list[ast.expr]:
    """Return the parts of an f-string, or the docstring of an expression statement: no texts of their own."""
    if isinstance(node, ast.JoinedStr):
        return node.values
    return [node.value] if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else []


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(
            # Braces within an expression would end it.
            f"{{{re.sub('[{}]', '', ast.unparse(part.value))}}}"
            if isinstance(part, ast.FormattedValue)
            else _text(part)
            for part in node.values
        )
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
