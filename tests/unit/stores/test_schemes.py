"""Storage schemes are parts: built in, of an installed package, or the user's own."""

from __future__ import annotations

import importlib.metadata
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import tidewheel as tw
from tests.object_servers.az import AZServer
from tests.object_servers.gs import GSServer
from tidewheel import parts
from tidewheel.conditional_create import creates_are_conditional
from tidewheel.errors import StorageError
from tidewheel.storage import LocalStore, Store, is_remote, join, split, store
from tidewheel.stores import SCHEMES
from tidewheel.stores.s3 import S3Store

OWN = '''
import tidewheel as tw
from tidewheel.storage import LocalStore


class Vault(tw.Storage):
    def open(self, uri):
        return LocalStore("{folder}/" + uri.partition("://")[2])
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a storage scheme in a module in the working folder."""
    name = f"vault_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(OWN).replace("{folder}", str(tmp_path / "data")))
    monkeypatch.chdir(tmp_path)
    yield f"{name}:Vault"
    sys.modules.pop(name, None)


def test_the_built_in_schemes_are_modules() -> None:
    assert SCHEMES.built_in() == ("az", "file", "gs", "hf", "s3")
    for name in SCHEMES.built_in():
        assert issubclass(SCHEMES.find(name), tw.Storage)


def test_a_class_of_the_users_own_is_named_in_the_uri(own: str, tmp_path: Path) -> None:
    uri = f"{own}://bucket/prefix"
    assert is_remote(uri)
    store(uri).write("key", b"1")
    assert (tmp_path / "data/bucket/prefix/key").read_bytes() == b"1"
    folder, name = split(join(uri, "key"))
    assert folder.read(name) == b"1"


def test_an_installed_package_offers_a_scheme_of_its_own(own: str, tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    parts._entry_points.cache_clear()
    point = importlib.metadata.EntryPoint("vault", own, SCHEMES.group)
    monkeypatch.setattr(parts.importlib.metadata, "entry_points",
                        lambda group: [point] if group == SCHEMES.group else [])
    try:
        store("vault://bucket").write("key", b"1")
    finally:
        parts._entry_points.cache_clear()
    assert (tmp_path / "data/bucket/key").read_bytes() == b"1"


@pytest.mark.parametrize(("uri", "hint"), [("gcs://bucket/x", "did you mean 'gs'"), ("http://host/x", "there are az"),
                                           ("nowhere:Vault://x", "no module 'nowhere'")])
def test_an_unknown_scheme_is_refused_with_the_nearest_one(uri: str, hint: str) -> None:
    with pytest.raises(StorageError, match=hint) as error:
        store(uri)
    assert "s3://bucket/prefix" in error.value.fix


def test_stores_of_all_schemes_are_picklable() -> None:
    for uri in ("s3://bucket/prefix", "gs://bucket/prefix", "az://container/prefix", "hf://datasets/owner/name"):
        copied = pickle.loads(pickle.dumps(store(uri)))
        assert (type(copied), copied.uri) == (type(store(uri)), uri)


@pytest.mark.parametrize(("scheme", "package"), [("gs", "gcsfs"), ("az", "adlfs")])
def test_without_its_package_a_scheme_says_what_to_install(scheme: str, package: str) -> None:
    """In a process in which the package cannot be imported; naming the URI needs no package."""
    code = (f"import sys; sys.modules[{package!r}] = None\nfrom tidewheel.storage import store\n"
            f"place = store('{scheme}://bucket/x')\ntry:\n    place.check()\n"
            "except Exception as error:\n    print(error)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert f"pip install 'tidewheel[{scheme}]'" in done.stdout, done.stdout + done.stderr


def test_azure_without_an_account_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("adlfs")
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_CONNECTION_STRING"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(StorageError, match="no storage account is named") as error:
        store("az://container").check()
    assert "AZURE_STORAGE_ACCOUNT_NAME" in error.value.fix


def test_local_paths_need_no_scheme(tmp_path: Path) -> None:
    assert isinstance(store(tmp_path), LocalStore)
    assert isinstance(store("a folder: with://slashes"), LocalStore)
    assert not is_remote(str(tmp_path))
    assert not is_remote(f"FILE://{tmp_path}")


# -- identity ------------------------------------------------------------------------------------


def test_the_identity_of_a_store_is_bucket_endpoint_and_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "first")
    first = store("s3://bucket/a").identity()
    assert first == store("s3://bucket/b").identity()
    assert first != store("s3://another/a").identity()
    assert "first" not in first
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "second")
    assert store("s3://bucket/a").identity() != first
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "first")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert store("s3://bucket/a").identity() != first


class Probed(LocalStore):
    """Counts its creates, and shares its identity with others."""

    creates = 0

    def create(self, key: str, data: bytes) -> bool:
        Probed.creates += 1
        return super().create(key, data)

    def identity(self) -> str:
        return "one bucket"


def test_conditional_creates_are_probed_once_for_all_prefixes_of_a_bucket(tmp_path: Path) -> None:
    assert creates_are_conditional(Probed(tmp_path / "a"))
    assert creates_are_conditional(Probed(tmp_path / "b"))
    assert Probed.creates == 2  # one probe of two creates
    assert list(Probed(tmp_path).list()) == []


@pytest.mark.parametrize(("kind", "package"), [(GSServer, "gcsfs"), (AZServer, "adlfs")])
def test_google_and_azure_honour_conditional_creates(kind: type, package: str) -> None:
    pytest.importorskip(package)
    with kind() as server:
        bucket_store: Store = store(server.create_bucket("conditions") + "/data")
        assert creates_are_conditional(bucket_store)
        assert bucket_store.create("key", b"first")
        assert not bucket_store.create("key", b"second")
        assert bucket_store.create("key", b"first")  # the same content counts as made by this call
        assert bucket_store.read("key") == b"first"


def test_s3_stores_are_made_of_the_scheme() -> None:
    assert isinstance(store("S3://bucket/x/"), S3Store)
    assert store("S3://bucket/x/").uri == "s3://bucket/x"
