"""The one error of the demo: a sentence for the person in front of the terminal."""

from __future__ import annotations


class DemoError(Exception):
    """The demo cannot go on; the message says why and what to do, and is all that is shown."""
