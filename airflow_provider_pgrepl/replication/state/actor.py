"""The actor of a recorded event: the program, its process and database role, and what started it."""

from __future__ import annotations

import os
import socket

from airflow_provider_pgrepl.errors import one_line

STARTED_BY_VARIABLE = "PGREPL_STARTED_BY"
"""The environment variable that names what started this process, in terms that a person can look up. Events,
and messages about locks, show it."""

ACTOR = "%(actor)s || ' as ' || session_user || %(started_by)s"
"""The actor as an SQL expression. Its parameters are those of `actor_fields`."""


def started_by_environment() -> str:
    """Return what started this process on one line, or "" if its environment does not tell."""
    return one_line(os.environ.get(STARTED_BY_VARIABLE, ""))


def actor_fields(program: str, started_by: str = "") -> dict[str, str]:
    """Return the parameters of ACTOR for this process.

    :param program: the program's name, such as `replicate` or `pause`
    :param started_by: what started it, by default what the environment tells
    """
    known = one_line(started_by) or started_by_environment()
    return {
        "actor": f"pgrepl {program} on {socket.gethostname()}:{os.getpid()}",
        "started_by": f", started by {known}" if known else "",
    }
