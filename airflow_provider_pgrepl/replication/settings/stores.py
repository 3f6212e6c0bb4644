"""The properties of the kinds of object stores (STORES).

A new store needs an entry here and its own module in `storage/stores/`: no other code lists or compares kinds
of stores. A store that S3's clients can use needs neither: its URIs begin with `s3://`, and its endpoint is
given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from airflow_provider_pgrepl import errors

AWS_KEY_ID, AWS_SECRET, AWS_TOKEN = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"
AWS_REGION, AWS_ENDPOINT = "AWS_REGION", "AWS_ENDPOINT_URL_S3"
GOOGLE_KEY, GOOGLE_ENDPOINT = "GOOGLE_SERVICE_ACCOUNT_KEY", "GOOGLE_BASE_URL"
GOOGLE_KEY_FILES = ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH")
AZURE_KEY, AZURE_SAS = "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN"
AZURE_TENANT, AZURE_CLIENT, AZURE_SECRET = "AZURE_TENANT_ID", "AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET"
AZURE_ENDPOINT = "AZURE_STORAGE_ENDPOINT"
AZURE_TOKEN_FILE = "AZURE_FEDERATED_TOKEN_FILE"  # noqa: S105 - a name


class StoreLocation(NamedTuple):
    """A location in an object store. `bucket`: for Azure, the container, which belongs to an `account`."""

    scheme: str
    bucket: str
    key: str
    account: str = ""


class StoreVariable(NamedTuple):
    """An environment variable that a process may be given.

    - `other_name`: the name under which the environment may set it, too.
    - `needs`: the variable without which it names an identity of the host, which other hosts cannot use.
    """

    name: str
    other_name: str = ""
    is_secret: bool = False
    is_endpoint: bool = False
    needs: str = ""


class StoreLogin(NamedTuple):
    """The fields of an Airflow connection. `extra_field` returns an extra by its name, or None."""

    login: str | None
    password: str | None
    host: str | None
    extra_field: Callable[[str], Any]


class Connector(NamedTuple):
    """A connector of Hadoop to a kind of object store.

    - `folder`: the folder below that of the jars that holds the connector and its dependencies, fetched only
      for lakes in such a store.
    - `artifact`: its name in Maven. `system`: its class. `store`: the store's name, for messages.
    - `credentials`: the prefixes of its settings for credentials.
    """

    folder: str
    artifact: str
    system: str
    store: str
    credentials: tuple[str, ...] = ()


@dataclass(frozen=True)
class StoreKind:
    """A kind of object store. Its name in STORES is the scheme that Delta uses.

    - `access`: module and class below `storage/stores`.
    - `page`: the page of `docs/how-to/` about it. `example`: the URI of a lake.
    - `aliases`: other schemes that a URI may have. `hadoop`: the scheme of Spark's own readers, if another.
    - `host`: matches what is between scheme and path. `host_fault`: a phrase for a host that does not match.
    - `variables`: those that a process may be given. `others`: further variables that a library reads.
    - `identities`: variables of a host's own identity. They are removed only if secrets are given.
    - `connections`: the types of Airflow connections. `unsupported`: their extras that are rejected.
    - `variables_of`: returns the values of a connection by the names of variables. Raises ValueError for an
      incomplete connection, or one to another location; its message begins with a verb.
    """

    access: str
    page: str
    example: str
    host: re.Pattern[str]
    variables: tuple[StoreVariable, ...]
    others: tuple[str, ...]
    connections: tuple[str, ...]
    unsupported: tuple[str, ...]
    variables_of: Callable[[StoreLogin, StoreLocation], dict[str, str | None]]
    connector: Connector
    aliases: tuple[str, ...] = ()
    hadoop: str = ""
    host_fault: str = "cannot be the name of a bucket"
    identities: tuple[str, ...] = ()

    def replaced_by(self, given: Mapping[str, str]) -> tuple[str, ...]:
        """Return the names of all environment variables that the given ones replace."""
        named = [one for one in self.variables if one.name in given]
        if not named:
            return ()
        replaces_all = any(one.is_secret for one in named)
        replaced = [one for one in self.variables if replaces_all or not one.needs]
        names = (name for one in replaced for name in (one.name, one.other_name) if name)
        return (*names, *self.others, *(self.identities if replaces_all else ()))


def _of_amazon(connection: StoreLogin, _: StoreLocation) -> dict[str, str | None]:
    extra = connection.extra_field
    of_s3 = (extra("service_config") or {}).get("s3") or {}
    variables = {
        AWS_KEY_ID: connection.login or extra("aws_access_key_id"),
        AWS_SECRET: connection.password or extra("aws_secret_access_key"),
        AWS_TOKEN: extra("aws_session_token"),
        AWS_REGION: extra("region_name"),
        AWS_ENDPOINT: of_s3.get("endpoint_url") or extra("endpoint_url") or extra("host"),
    }
    if bool(variables[AWS_KEY_ID]) != bool(variables[AWS_SECRET]):
        raise ValueError("has only one of access key id and secret access key")
    return variables


def _of_google(connection: StoreLogin, _: StoreLocation) -> dict[str, str | None]:
    """Return the variable with the service account's key. Without a key, the hosts use default credentials.

    Raises ValueError for a key that cannot be read or is not a service account's.
    """
    key = connection.extra_field("keyfile_dict")
    if path := connection.extra_field("key_path"):
        try:
            key = Path(path).read_text()
        except (OSError, UnicodeDecodeError):
            raise ValueError("has a key_path that this worker cannot read") from None
    try:
        found = json.loads(key) if isinstance(key, str) else key
    except ValueError:
        found = ""
    if found is not None and not (isinstance(found, dict) and found.get("private_key")):
        raise ValueError("has a key that is not the JSON key of a service account")
    return {GOOGLE_KEY: json.dumps(found) if found else None}


def _of_azure(connection: StoreLogin, place: StoreLocation) -> dict[str, str | None]:
    """Return the variables of an Entra client if there is a tenant, else of a SAS token or an account key.

    Raises ValueError for another storage account than that of `place`, and for an incomplete client.
    https://airflow.apache.org/docs/apache-airflow-providers-microsoft-azure/stable/connections/wasb.html
    """
    extra, host = connection.extra_field, (connection.host or "").rstrip("/")
    tenant = extra("tenant_id")
    account = host.rpartition("://")[2].partition(".")[0] if host else ("" if tenant else connection.login)
    is_other = "://" in host and not host.endswith(".core.windows.net")
    if account and not is_other and account != place.account:
        raise ValueError(f"belongs to storage account {account}, but the lake is in {place.account}")
    variables = {AZURE_ENDPOINT: host if is_other else None}
    if tenant:
        if not (connection.login and connection.password):
            raise ValueError("has a tenant_id, but lacks the client id (login) or secret (password)")
        client = {AZURE_CLIENT: connection.login, AZURE_SECRET: connection.password}
        return variables | {AZURE_TENANT: tenant} | client
    sas = extra("sas_token")
    if sas and "://" in sas:
        sas = sas.partition("?")[2]
    key = extra("shared_access_key") or connection.password or extra("account_key")
    return variables | ({AZURE_SAS: sas} if sas else {AZURE_KEY: key})


STORES: Mapping[str, StoreKind] = {
    "s3": StoreKind(
        access="amazon.AmazonAccess",
        page="keep-the-lake-on-s3",
        example="s3://bucket/path",
        aliases=("s3a",),
        hadoop="s3a",
        # https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html
        host=re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"),
        variables=(
            StoreVariable(AWS_KEY_ID),
            StoreVariable(AWS_SECRET, is_secret=True),
            StoreVariable(AWS_TOKEN, is_secret=True),
            StoreVariable(AWS_REGION, "AWS_DEFAULT_REGION"),
            StoreVariable(AWS_ENDPOINT, "AWS_ENDPOINT_URL", is_endpoint=True),
        ),
        others=("AWS_ENDPOINT", "AWS_PROFILE", "AWS_DEFAULT_PROFILE"),
        connections=("aws",),
        unsupported=(
            *("role_arn", "profile_name", "session_kwargs", "assume_role_method", "assume_role_kwargs"),
        ),
        variables_of=_of_amazon,
        connector=Connector(
            folder="s3a",
            artifact="hadoop-aws",
            system="org.apache.hadoop.fs.s3a.S3AFileSystem",
            store="stores that speak S3",
        ),
    ),
    "gs": StoreKind(
        access="google.GoogleAccess",
        page="keep-the-lake-on-gcs",
        example="gs://bucket/path",
        # https://cloud.google.com/storage/docs/buckets#naming: up to 222 characters for a domain.
        host=re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]"),
        variables=(
            StoreVariable(GOOGLE_KEY, is_secret=True),
            StoreVariable(GOOGLE_ENDPOINT, "STORAGE_EMULATOR_HOST", is_endpoint=True),
        ),
        others=("CLOUD_STORAGE_EMULATOR_ENDPOINT", "GOOGLE_BEARER_TOKEN", "GOOGLE_SKIP_SIGNATURE"),
        # The libraries reject a key in addition to these, and ignore only GOOGLE_APPLICATION_CREDENTIALS.
        identities=GOOGLE_KEY_FILES,
        connections=("google_cloud_platform",),
        unsupported=(
            *("key_secret_name", "credential_config_file", "impersonation_chain", "idp_issuer_url"),
            "is_anonymous",
        ),
        variables_of=_of_google,
        connector=Connector(
            folder="gs",
            artifact="hadoop-gcp",
            system="org.apache.hadoop.fs.gs.GoogleHadoopFileSystem",
            store="Google Cloud Storage",
            credentials=("spark.hadoop.fs.gs.auth.",),
        ),
    ),
    "abfss": StoreKind(
        access="azure.AzureAccess",
        page="keep-the-lake-on-azure",
        example="abfss://container@account.dfs.core.windows.net/path",
        aliases=("abfs",),
        # https://learn.microsoft.com/azure/storage/blobs/data-lake-storage-introduction-abfs-uri. deltalake
        # does not recognize hosts of Azure's other clouds, such as that of China.
        host=re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]@[a-z0-9]{3,24}\.dfs\.core\.windows\.net"),
        host_fault="is not container@account.dfs.core.windows.net",
        variables=(
            StoreVariable(AZURE_KEY, "AZURE_STORAGE_KEY", is_secret=True),
            StoreVariable(AZURE_SAS, "AZURE_STORAGE_SAS_KEY", is_secret=True),
            StoreVariable(AZURE_TENANT, needs=AZURE_SECRET),
            StoreVariable(AZURE_CLIENT, needs=AZURE_SECRET),
            StoreVariable(AZURE_SECRET, is_secret=True),
            StoreVariable(AZURE_ENDPOINT, is_endpoint=True),
        ),
        others=(
            *("AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_MASTER_KEY", "AZURE_STORAGE_TOKEN"),
            *("AZURE_STORAGE_CLIENT_ID", "AZURE_STORAGE_CLIENT_SECRET", "AZURE_STORAGE_TENANT_ID"),
            *("AZURE_AUTHORITY_ID", "AZURE_STORAGE_AUTHORITY_ID", "AZURE_CREDENTIAL_TYPE"),
            *("AZURE_STORAGE_USE_EMULATOR", "AZURE_ENDPOINT"),
        ),
        identities=(AZURE_TOKEN_FILE,),
        connections=("wasb", "adls"),
        unsupported=("connection_string", "managed_identity_client_id", "workload_identity_tenant_id"),
        variables_of=_of_azure,
        connector=Connector(
            folder="abfs",
            artifact="hadoop-azure",
            system="org.apache.hadoop.fs.azurebfs.SecureAzureBlobFileSystem",
            store="Azure's storage",
            credentials=("spark.hadoop.fs.azure.account.", "spark.hadoop.fs.azure.sas."),
        ),
    ),
}
SCHEMES = {alias: scheme for scheme, kind in STORES.items() for alias in (scheme, *kind.aliases)}
"""Delta's scheme, by each scheme that the URI of a lake may have."""
VARIABLES = {one.name: one for kind in STORES.values() for one in kind.variables}
ENDPOINTS = tuple(one.name for one in VARIABLES.values() if one.is_endpoint)
PAGES = ", ".join(errors.document(f"how-to/{kind.page}") for kind in STORES.values())
