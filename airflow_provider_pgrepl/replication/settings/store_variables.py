"""The credentials, region and endpoint with which a process accesses the store of its lake.

They come from the environment, under the names of the stores' own tools or of deltalake, or are passed to
this process. No file, argument or setting ever holds them. Without credentials, the libraries use the role of
an instance, a container or a web identity, and renew its tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import ParamSpec, TypeVar

from .stores import STORES, VARIABLES, StoreKind

_given: dict[str, str] = {}
_replaced: set[str] = set()
"""The names of variables that the given variables replace."""
_reached: set[StoreKind] = set()

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def use_store(variables: Mapping[str, str]) -> None:
    """Set the variables with which this process accesses its store. They override the environment.

    `variables`: all of `VARIABLES`, or some. For each kind of store with a given variable, the variables that
    are not given are removed from the environment. The libraries would otherwise read them, and combine a
    token of other keys, or another endpoint, with the given ones.
    """
    _given.clear()
    _given.update({name: value for name, value in variables.items() if value})
    _replaced.clear()
    _replaced.update(replaced_by(_given), _given)
    for name in _replaced - _given.keys():
        os.environ.pop(name, None)


def reach(kind: StoreKind) -> None:
    """Record that this process opens a store of this kind, see `store_variables`."""
    _reached.add(kind)


def replaced_by(variables: Mapping[str, str]) -> Iterator[str]:
    """Yield the names of all environment variables that these variables replace."""
    for kind in STORES.values():
        yield from kind.replaced_by(variables)


def store_variables() -> dict[str, str]:
    """Return the variables with which this process accesses its store, for its tasks on other hosts.

    These are all variables given by `use_store`, or else those in the environment of the kinds of store that
    were opened. Keys of other kinds of store are not passed to tasks.

    A variable that needs another one, which is not set, is left out: a file or the host proves that identity,
    and other hosts cannot use it.
    """
    names = _given or [one.name for kind in _reached for one in kind.variables]
    found = {name: value for name in names if (value := store_variable(name))}
    return {name: value for name, value in found.items() if (VARIABLES[name].needs or name) in found}


def reaching_store(work: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Wrap a function for Spark tasks, so that they access the store with the variables of the driver."""
    variables = store_variables()

    def run(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        if variables:
            use_store(variables)
        return work(*arguments, **named)

    return run


def store_variable(name: str) -> str:
    """Return the value of one of `VARIABLES`, given or from the environment; "" if it is not set."""
    if name in _replaced:
        return _given.get(name, "")
    return os.environ.get(name_in_environment(name), "").strip()


def name_in_environment(name: str) -> str:
    """Return the name under which the environment sets one of `VARIABLES`; "" if it is not set."""
    names = (name, VARIABLES[name].other_name)
    return next((each for each in names if os.environ.get(each, "").strip()), "")
