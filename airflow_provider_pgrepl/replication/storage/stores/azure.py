"""Access to Azure Blob Storage, and to Azure Data Lake Storage, which adds folders."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from obstore.store import AzureStore
from pyarrow import fs

from airflow_provider_pgrepl.replication.settings.store_variables import name_in_environment, store_variable
from airflow_provider_pgrepl.replication.settings.stores import (
    AZURE_CLIENT,
    AZURE_ENDPOINT,
    AZURE_KEY,
    AZURE_SAS,
    AZURE_SECRET,
    AZURE_TENANT,
    AZURE_TOKEN_FILE,
    StoreLocation,
)

from .base import FEW, StoreAccess, retried, said

_HADOOP = "spark.hadoop.fs.azure"
_METADATA_HOST = "169.254.169.254"


class _AzureFileSystem(fs.AzureFileSystem):
    """Arrow's filesystem, which gives up after three retries, within 6 s, and has no setting for that."""

    def get_file_info(self, paths_or_selector: Any) -> Any:
        """Return what is there, as in the base class. Raises OSError after RETRY_TIMEOUT."""
        return retried(lambda: fs.AzureFileSystem.get_file_info(self, paths_or_selector))

    def delete_dir(self, path: str) -> None:
        """Delete a folder, as in the base class. Raises OSError after RETRY_TIMEOUT."""
        retried(lambda: fs.AzureFileSystem.delete_dir(self, path))

    def delete_file(self, path: str) -> None:
        """Delete a file, as in the base class. Raises OSError after RETRY_TIMEOUT."""
        retried(lambda: fs.AzureFileSystem.delete_file(self, path))


@dataclass(frozen=True)
class AzureAccess(StoreAccess):
    """Access to a container by the account's key, by a SAS token, or by a client of Microsoft Entra ID.

    Without a key, a token or a client secret: by the identity of the host.
    """

    store_class = AzureStore
    prefix = "azure_storage_"
    opens_by_requests = True
    # An account with a hierarchical namespace keeps empty folders.
    has_folders = True
    # A SAS token needs an additional permission for batch requests.
    may_reject_batches = True

    account: str
    tenant: str
    client: str
    key: str = field(repr=False)
    sas: str = field(repr=False)
    secret: str = field(repr=False)

    @classmethod
    def of(cls, place: StoreLocation) -> AzureAccess:
        key, sas = store_variable(AZURE_KEY), store_variable(AZURE_SAS).removeprefix("?")
        client = (store_variable(name) for name in (AZURE_TENANT, AZURE_CLIENT, AZURE_SECRET))
        # Pass only one kind of credentials: the libraries do not all choose the same one.
        tenant, client_id, secret = ("", "", "") if key or sas else client
        url = store_variable(AZURE_ENDPOINT).rstrip("/")
        return cls(place.bucket, url, place.account, tenant, client_id, key, "" if key else sas, secret)

    @property
    def attempts(self) -> int:
        # A store may answer each batch deletion that a token signs with an error of its own (Azurite does).
        return FEW if self.sas else super().attempts

    @property
    def token_server(self) -> str:
        has_credentials = self.key or self.sas or self.secret or os.environ.get(AZURE_TOKEN_FILE)
        # Azure's services other than virtual machines name their own server.
        return "" if has_credentials or os.environ.get("IDENTITY_ENDPOINT") else _METADATA_HOST

    def filesystem(self) -> fs.FileSystem:
        options: dict[str, Any] = said({"account_key": self.key, "sas_token": self.sas and f"?{self.sas}"})
        if self.secret:
            options |= {"tenant_id": self.tenant, "client_id": self.client, "client_secret": self.secret}
        elif self.client and not os.environ.get(AZURE_TOKEN_FILE):
            # The client ID selects an identity of the host.
            options |= {"client_id": self.client}
        if self.url:
            scheme, _, host = self.url.rpartition("://")
            # An emulator has the account in the path, where Arrow adds it; other hosts before the first dot.
            host = host.removesuffix(f"/{self.account}").removeprefix(self.account)
            for kind in ("blob", "dfs"):
                authority = host.replace(".blob.", f".{kind}.", 1)
                options |= {
                    f"{kind}_storage_authority": authority,
                    f"{kind}_storage_scheme": scheme or "https",
                }
        return _AzureFileSystem(self.account, **options)

    @staticmethod
    def spark_settings() -> dict[str, str]:
        # Hadoop replaces the name of a variable with its value in the process that reads the setting
        # (org.apache.hadoop.conf.Configuration, "Variable Expansion").
        # https://hadoop.apache.org/docs/r3.5.0/hadoop-azure/abfs.html
        if name := name_in_environment(AZURE_KEY):
            return {f"{_HADOOP}.account.key": f"${{env.{name}}}"}
        if name := name_in_environment(AZURE_SAS):
            return {f"{_HADOOP}.account.auth.type": "SAS", f"{_HADOOP}.sas.fixed.token": f"${{env.{name}}}"}
        return {}

    def for_obstore(self) -> dict[str, str]:
        """Return the kind of credentials. obstore would otherwise prefer other ones in the environment."""
        ways = {"access_key": self.key, "sas_token": self.sas, "client_secret": self.secret}
        return next(({"credential_type": way} for way, given in ways.items() if given), {})

    def options(self) -> dict[str, str]:
        return said(
            {
                "azure_storage_account_name": self.account,
                "azure_storage_endpoint": self.url,
                "azure_storage_account_key": self.key,
                "azure_storage_sas_token": self.sas,
                "azure_storage_tenant_id": self.tenant,
                "azure_storage_client_id": self.client,
                "azure_storage_client_secret": self.secret,
                "allow_http": "true" if self.is_plain else "",
            }
        )
