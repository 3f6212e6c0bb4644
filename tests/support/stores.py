"""Servers that speak the storage of Google and of Azure, emulators of them, with a bucket each."""

from __future__ import annotations

import base64
import hmac
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from pyarrow import fs

from demo.server_process import ServerProcess
from tests.support.s3 import BUCKET, REQUIRED, await_built

_ROOT = Path(__file__).resolve().parents[2]
# https://learn.microsoft.com/azure/storage/common/storage-use-azurite#well-known-storage-account-and-key
ACCOUNT = "devstoreaccount1"
_ACCOUNTS_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


class StoreServer(ServerProcess):
    """An emulator of a store. `lake`: the URI below which all its lakes are."""

    lake = ""
    hosts: tuple[str, ...] = ()
    """The host names of the store itself."""
    # An answer may keep its connection open.
    stop_s = 1.0
    program = Path()
    script = ""

    def environment_of(self, port: int) -> dict[str, str]:
        """Return the variables with which a client reaches the store behind a port of this host."""
        raise NotImplementedError

    @property
    def is_there(self) -> bool:
        return self.program.exists()

    def make_bucket(self) -> None:
        raise NotImplementedError

    def new_lake(self) -> str:
        """Return the URI of a new lake, to which nothing has been written."""
        return f"{self.lake}/{uuid.uuid4().hex[:12]}/lake"


class GoogleServer(StoreServer):
    """fake-gcs-server, extended by the requests that object_store needs."""

    name, script = "the server that speaks Google's storage", "setup/gcs_server.sh"
    lake = f"gs://{BUCKET}"
    hosts = ("storage.googleapis.com",)
    program = _ROOT / ".gcs_server" / "gcs_server"

    def environment_of(self, port: int) -> dict[str, str]:
        return {"GOOGLE_BASE_URL": f"http://127.0.0.1:{port}"}

    def make_bucket(self) -> None:
        (self.folder / "data" / BUCKET).mkdir(parents=True, exist_ok=True)

    def prepare(self) -> None:
        self.make_bucket()

    def command(self) -> list[str]:
        return [str(self.program), "-address", f"127.0.0.1:{self.port}", "-folder", str(self.folder / "data")]

    def answers(self) -> bool:
        return _answers(f"http://127.0.0.1:{self.port}/storage/v1/b")


class AzureServer(StoreServer):
    """Azurite."""

    name, script = "Azurite", "setup/azurite.sh"
    lake = f"abfss://{BUCKET}@{ACCOUNT}.dfs.core.windows.net"
    hosts = (f"{ACCOUNT}.dfs.core.windows.net", f"{ACCOUNT}.blob.core.windows.net")
    program = _ROOT / ".azurite" / "node_modules" / ".bin" / "azurite-blob"

    def environment_of(self, port: int) -> dict[str, str]:
        return {
            "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{ACCOUNT}",
            "AZURE_STORAGE_ACCOUNT_KEY": _ACCOUNTS_KEY,
        }

    def make_bucket(self) -> None:
        authority = f"127.0.0.1:{self.port}"
        kinds = {f"{kind}_storage_authority": authority for kind in ("blob", "dfs")}
        schemes = {f"{kind}_storage_scheme": "http" for kind in ("blob", "dfs")}
        fs.AzureFileSystem(ACCOUNT, account_key=_ACCOUNTS_KEY, **kinds, **schemes).create_dir(BUCKET)

    def command(self) -> list[str]:
        own = _ROOT / ".azurite" / "node" / "bin"
        node = shutil.which("node", path=f"{own}{os.pathsep}{os.environ['PATH']}") or "node"
        listening = ["--blobHost", "127.0.0.1", "--blobPort", str(self.port), "--silent"]
        return [node, str(self.program), *listening, "--skipApiVersionCheck", "--location", str(self.folder)]

    def environment(self) -> Mapping[str, str]:
        return {"PATH": os.environ["PATH"], "HOME": str(self.folder)}

    def answers(self) -> bool:
        return _answers(f"http://127.0.0.1:{self.port}/{ACCOUNT}?comp=list")


def shared_access(rights: str) -> str:
    """A token for all of the account: https://learn.microsoft.com/rest/api/storageservices/create-account-sas"""
    said = {"sv": "2024-11-04", "ss": "b", "srt": "sco", "sp": rights, "se": "2099-01-01T00:00:00Z"}
    signed = [ACCOUNT, rights, said["ss"], said["srt"], "", said["se"], "", "", said["sv"], "", ""]
    key = base64.b64decode(_ACCOUNTS_KEY)
    signature = hmac.digest(key, "\n".join(signed).encode(), "sha256")
    return urlencode(said | {"sig": base64.b64encode(signature).decode()})


def service_account_key(token_uri: str = "") -> str:
    """Return a made-up key in Google's format; clients request its tokens at `token_uri`."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    told = {"client_email": "writer@shop.iam.gserviceaccount.com", "private_key_id": "1", "client_id": "1"}
    told |= {"token_uri": token_uri} if token_uri else {}
    return json.dumps({"type": "service_account", "private_key": pem.decode(), "project_id": "shop", **told})


def _answers(url: str) -> bool:
    try:
        with urlopen(Request(url), timeout=1):
            return True
    except OSError as error:
        return hasattr(error, "code")


@contextmanager
def running_store(kind: type[StoreServer]) -> Iterator[StoreServer]:
    """Yield a server with the bucket. Skips the test where the server is missing, unless it is required."""
    await_built()
    with tempfile.TemporaryDirectory(prefix="pgrepl-test-store-") as folder:
        server = kind(Path(folder))
        why = f"needs {server.name}: sh {server.script}"
        if not server.is_there:
            assert not os.environ.get(REQUIRED), why
            pytest.skip(why)
        server.start()
        server.make_bucket()
        try:
            yield server
        finally:
            server.stop()
