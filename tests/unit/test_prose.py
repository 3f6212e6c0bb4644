"""Docstrings, comments, messages, documents and names say in plain English who does what.

prose: ignore-file, because the examples break the rules.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.prose import PythonFile, check, markdown_findings

ROOT = Path(__file__).parents[2]
PYTHON = {
    'def f():\n    """How far it is behind."""\n': "question-word-docstring",
    'def f():\n    """Of the application that a handle stands for."""\n': "headless-docstring",
    '"""Module."""\n# whoever begins again\n': "private-word",
    'log.warning("table %s has gone back to %s")\n': "private-word-message",
    'raise E("it was not made in time")\n': "message-pronoun",
    'raise E("a table without key")\n': "message-verb",
    'raise E("the lake is gone", "has it been restored?")\n': "hint-question",
    'A = {"changes that wait": 1}\n': "sentence-as-key",
    "def told(): pass\n": "private-identifier",
    "def test_what_is_refused(): pass\n": "test-name",
    '"""The behaviour of a table."""\n': "british-spelling",
    '"""A table.\n\n' + "A line of a paragraph\n" * 7 + '"""\n': "dense-docstring",
}
MARKDOWN = {
    "The slot is told the LSN.": "private-word-docs",
    "It is recognised.": "british-spelling",
    f"The table {'very ' * 40}is long.": "long-sentence",
}


def test_repository_has_no_findings() -> None:
    found = [f"{one.path}:{one.line} {one.rule} {one.text}" for one in check(ROOT)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("source", PYTHON)
def test_rule_reports_its_example(source: str) -> None:
    assert PYTHON[source] in {one.rule for one in PythonFile("package/module.py", source).findings()}


def test_public_method_without_docstring_is_reported() -> None:
    source = 'class A:\n    """An operator."""\n    def lag(self): pass\n'
    found = PythonFile("package/operators/module.py", source).findings()
    assert [one.rule for one in found] == ["missing-docstring"]


@pytest.mark.parametrize("text", MARKDOWN)
def test_rule_for_documents_reports_its_example(text: str) -> None:
    assert MARKDOWN[text] in {one.rule for one in markdown_findings("page.md", text)}


def test_ignored_line_and_code_block_are_skipped() -> None:
    assert not list(PythonFile("package/module.py", "# whoever begins  # prose: ignore\n").findings())
    assert not list(markdown_findings("page.md", "```\nwhoever begins\n```\n"))
