"""How a process reaches the store that holds its lake.

Credentials, region and endpoint are the environment's, under the names that the stores' own tools know, or
deltalake, or were given to this process: no file, argument or setting ever holds them. Where none are named,
the libraries follow the roles of an instance, a container or a web identity, and renew what they got.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, ParamSpec, TypeVar

KEY_ID, SECRET, TOKEN = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"
REGION, ENDPOINT = "AWS_REGION", "AWS_ENDPOINT_URL_S3"
GOOGLE_KEY, GOOGLE_ENDPOINT = "GOOGLE_SERVICE_ACCOUNT_KEY", "GOOGLE_BASE_URL"
AZURE_KEY, AZURE_SAS = "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN"
AZURE_TENANT, AZURE_CLIENT, AZURE_SECRET = "AZURE_TENANT_ID", "AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET"
AZURE_ENDPOINT = "AZURE_STORAGE_ENDPOINT"
AZURE_TOKEN_FILE = "AZURE_FEDERATED_TOKEN_FILE"  # noqa: S105 - a name


class Kind(NamedTuple):
    """Of one kind of store: what a process is given, and what a library reads beside it."""

    variables: tuple[str, ...]
    others: tuple[str, ...]
    identities: tuple[str, ...] = ()
    """A host's own, which stand for keys: they go when keys are given, and only then."""
    keys: tuple[str, ...] = ()


AMAZON = Kind(
    (KEY_ID, SECRET, TOKEN, REGION, ENDPOINT),
    ("AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_PROFILE", "AWS_DEFAULT_PROFILE"),
)
GOOGLE = Kind(
    (GOOGLE_KEY, GOOGLE_ENDPOINT),
    (
        "STORAGE_EMULATOR_HOST",
        "CLOUD_STORAGE_EMULATOR_ENDPOINT",
        "GOOGLE_BEARER_TOKEN",
        "GOOGLE_SKIP_SIGNATURE",
    ),
    # The libraries refuse a key beside these, and only pass over GOOGLE_APPLICATION_CREDENTIALS.
    ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH"),
    (GOOGLE_KEY,),
)
AZURE = Kind(
    (AZURE_KEY, AZURE_SAS, AZURE_TENANT, AZURE_CLIENT, AZURE_SECRET, AZURE_ENDPOINT),
    (
        *("AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_MASTER_KEY", "AZURE_STORAGE_TOKEN"),
        *("AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_CLIENT_ID", "AZURE_STORAGE_CLIENT_SECRET"),
        *("AZURE_STORAGE_TENANT_ID", "AZURE_AUTHORITY_ID", "AZURE_STORAGE_AUTHORITY_ID"),
        *("AZURE_CREDENTIAL_TYPE", "AZURE_STORAGE_USE_EMULATOR", "AZURE_ENDPOINT"),
    ),
    (AZURE_TOKEN_FILE, AZURE_CLIENT, AZURE_TENANT),
    (AZURE_KEY, AZURE_SAS, AZURE_SECRET),
)
_KINDS = (AMAZON, GOOGLE, AZURE)
_OTHER_NAMES = {
    REGION: "AWS_DEFAULT_REGION",
    ENDPOINT: "AWS_ENDPOINT_URL",
    GOOGLE_ENDPOINT: "STORAGE_EMULATOR_HOST",
    AZURE_KEY: "AZURE_STORAGE_KEY",
    AZURE_SAS: "AZURE_STORAGE_SAS_KEY",
}
"""Which are read where the first is not set."""
VARIABLES = tuple(name for kind in _KINDS for name in kind.variables)

_given: dict[str, str] = {}
_replaced: set[str] = set()
"""The names for which those stand that were given."""
_reached: set[Kind] = set()

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def use_store(variables: Mapping[str, str]) -> None:
    """Have this process reach its store so, whatever its environment says. All of `VARIABLES`, or some.

    The libraries fill up what they are not told from the environment: from it goes what is not given of that
    kind of store. A token of other keys, or another endpoint, would be mixed with these.
    """
    _given.clear()
    _given.update({name: value for name, value in variables.items() if value})
    _replaced.clear()
    _replaced.update(replaced_by(_given), _given)
    for name in _replaced - _given.keys():
        os.environ.pop(name, None)


def reach(kind: Kind) -> None:
    """To be told when a store of this kind is opened."""
    _reached.add(kind)


def replaced_by(variables: Mapping[str, str]) -> Iterator[str]:
    """The names in an environment for which these variables stand, all of them."""
    for kind in _KINDS:
        if any(name in variables for name in kind.variables):
            kept = () if any(name in variables for name in kind.keys) else kind.identities
            names = (*kind.variables, *kind.others, *kind.identities)
            yield from (name for name in names if name not in kept)


def store_variables() -> dict[str, str]:
    """How this process reaches its store, as far as that is said: all that it was given, else what its
    environment says of the kinds of store that it has opened. Keys of others are no business of a task's.

    Who a client of Azure is, where a file or the host proves it, is each host's own, as that file is.
    """
    names = _given or [name for kind in _reached for name in kind.variables]
    found = {name: value for name in names if (value := store_variable(name))}
    for name in () if AZURE_SECRET in found else (AZURE_CLIENT, AZURE_TENANT):
        found.pop(name, None)
    return found


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
    if name in _replaced:
        return _given.get(name, "")
    return os.environ.get(name_in_environment(name), "").strip()


def name_in_environment(name: str) -> str:
    """Under which name the environment says what one of `VARIABLES` is for; empty when it does not."""
    names = (name, _OTHER_NAMES.get(name, ""))
    return next((each for each in names if os.environ.get(each, "").strip()), "")
