"""The credentials, region and endpoint with which a process accesses the store of its lake.

They come from the environment, under the names of the stores' own tools or of deltalake, or are passed to
this process. No file, argument or setting ever holds them. Without credentials, the libraries use the role of
an instance, a container or a web identity, and renew its tokens.
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


class StoreVariables(NamedTuple):
    """The environment variables of one kind of store.

    `variables`: those that a process may be given. `others`: further variables that a library reads.
    """

    variables: tuple[str, ...]
    others: tuple[str, ...]
    identities: tuple[str, ...] = ()
    """Variables of a host's own identity. They are removed only if keys are given."""
    keys: tuple[str, ...] = ()


AMAZON = StoreVariables(
    (KEY_ID, SECRET, TOKEN, REGION, ENDPOINT),
    ("AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_PROFILE", "AWS_DEFAULT_PROFILE"),
)
GOOGLE = StoreVariables(
    (GOOGLE_KEY, GOOGLE_ENDPOINT),
    (
        "STORAGE_EMULATOR_HOST",
        "CLOUD_STORAGE_EMULATOR_ENDPOINT",
        "GOOGLE_BEARER_TOKEN",
        "GOOGLE_SKIP_SIGNATURE",
    ),
    # The libraries reject a key in addition to these, and ignore only GOOGLE_APPLICATION_CREDENTIALS.
    ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH"),
    (GOOGLE_KEY,),
)
AZURE = StoreVariables(
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
"""Alternative names, which are read if the first name is not set."""
VARIABLES = tuple(name for kind in _KINDS for name in kind.variables)

_given: dict[str, str] = {}
_replaced: set[str] = set()
"""The names of variables that the given variables replace."""
_reached: set[StoreVariables] = set()

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


def reach(kind: StoreVariables) -> None:
    """Record that this process opens a store of this kind, see `store_variables`."""
    _reached.add(kind)


def replaced_by(variables: Mapping[str, str]) -> Iterator[str]:
    """Yield the names of all environment variables that these variables replace."""
    for kind in _KINDS:
        if any(name in variables for name in kind.variables):
            kept = () if any(name in variables for name in kind.keys) else kind.identities
            names = (*kind.variables, *kind.others, *kind.identities)
            yield from (name for name in names if name not in kept)


def store_variables() -> dict[str, str]:
    """Return the variables with which this process accesses its store, for its tasks on other hosts.

    These are all variables given by `use_store`, or else those in the environment of the kinds of store that
    were opened. Keys of other kinds of store are not passed to tasks.

    Azure's client and tenant IDs are left out unless a client secret is set: if a file or the host proves the
    identity, it belongs to one host.
    """
    names = _given or [name for kind in _reached for name in kind.variables]
    found = {name: value for name in names if (value := store_variable(name))}
    for name in () if AZURE_SECRET in found else (AZURE_CLIENT, AZURE_TENANT):
        found.pop(name, None)
    return found


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
    names = (name, _OTHER_NAMES.get(name, ""))
    return next((each for each in names if os.environ.get(each, "").strip()), "")
