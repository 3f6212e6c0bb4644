"""The error of the demo, whose message is shown to the user."""

from __future__ import annotations


class DemoError(Exception):
    """The demo cannot continue. The message has the reason and the remedy, and is shown without a trace."""
