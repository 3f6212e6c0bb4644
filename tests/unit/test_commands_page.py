"""docs/reference/commands.md says what the commands say."""

from __future__ import annotations

from tests.support.commands_page import PAGE, text


def test_page_is_what_the_commands_give() -> None:
    assert PAGE.read_text() == text(), "run .venv/bin/python -m tests.support.commands_page"
