"""How a process reaches the store that holds its lake.

Credentials, region and endpoint are the environment's, under the names that Amazon's tools know, or were
given to this process: no file, argument or setting ever holds them. Where none are named, the libraries
follow the roles of an instance, a container or a web identity by themselves, and renew what they got.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

KEY_ID, SECRET, TOKEN = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"
REGION, ENDPOINT = "AWS_REGION", "AWS_ENDPOINT_URL_S3"
_OTHER_NAMES = {REGION: "AWS_DEFAULT_REGION", ENDPOINT: "AWS_ENDPOINT_URL"}
"""Which Amazon's tools read where the first is not set."""
VARIABLES = (KEY_ID, SECRET, TOKEN, REGION, ENDPOINT)
OF_STORES = (*VARIABLES, *_OTHER_NAMES.values(), "AWS_ENDPOINT", "AWS_PROFILE", "AWS_DEFAULT_PROFILE")
"""All of which one of the libraries reads."""

_given: dict[str, str] = {}

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def use_store(variables: Mapping[str, str]) -> None:
    """Have this process reach its store so, whatever its environment says. All of `VARIABLES`, or some.

    The libraries fill up what they are not told from the environment: from it goes what is not given. A token
    of other keys, or another endpoint, would be mixed with these.
    """
    _given.clear()
    _given.update({name: value for name, value in variables.items() if value})
    for name in OF_STORES if _given else ():
        if name not in _given:
            os.environ.pop(name, None)


def store_variables() -> dict[str, str]:
    """How this process reaches its store, as far as that is said."""
    return {name: value for name in VARIABLES if (value := store_variable(name))}


def reaching_store(work: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The work as a task of Spark, which reaches the store as its driver does."""
    variables = store_variables()

    def run(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        if variables:
            use_store(variables)
        return work(*arguments, **named)

    return run


def store_variable(name: str) -> str:
    """What is said by one of `VARIABLES`; empty when nothing is."""
    if _given:
        return _given.get(name, "")
    value = os.environ.get(name, "").strip()
    return value or os.environ.get(_OTHER_NAMES.get(name, ""), "").strip()
