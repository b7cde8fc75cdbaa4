"""The attacks that were tried on Tidewheel, each a function that attacks and describes the outcome.

`python -m tests.security` runs them and prints a table; `test_attacks.py` asserts their bounds.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import yaml

from tests.security import dependencies
from tidewheel.data.config import ReadConfig
from tidewheel.data.quarantine import Bad
from tidewheel.data.readers import read_records
from tidewheel.errors import TidewheelError
from tidewheel.storage import LocalStore, store


@dataclass(frozen=True)
class Attack:
    """One attack.

    Args:
        name: the target and the kind of attack.
        bound: the protection that limits it.
        seconds: time in which it must end, even on a busy machine.
        run: function that attacks inside an empty folder and describes the outcome. It raises AssertionError when
            the bound does not hold.
    """

    name: str
    bound: str
    seconds: float
    run: Callable[[Path], str]


def _read(folder: Path, name: str, content: bytes) -> list[str]:
    (folder / name).write_bytes(content)
    records = read_records(store(folder), name, ReadConfig(paths=("*",)))
    return [record.reason if isinstance(record, Bad) else "read" for record in records]


def parquet_dictionary(folder: Path) -> str:
    """Read 4,000 rows that share one string of 20 MB."""
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 4000, pa.int32()), pa.array(["a" * 20_000_000]))
    pyarrow.parquet.write_table(pa.table({"text": column}), folder / "a.parquet", compression="zstd")
    count = sum(1 for _ in zip(range(20), read_records(store(folder), "a.parquet", ReadConfig(paths=("*",)))))
    assert count == 20
    return f"{(folder / 'a.parquet').stat().st_size} bytes; rows are read one after the other"


def unbroken_word(folder: Path) -> str:
    """Train a tokenizer on one word of a million characters."""
    from tidewheel.data.tokenize.tokenizer import train_bpe

    return f"trained, {len(train_bpe(['a' * 1_000_000], 300, ()))} bytes"


def warc(body: bytes, more: str = "") -> bytes:
    """Return a web archive with one page."""
    content = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n{more}\r\n".encode() + body
    return (f"WARC/1.0\r\nWARC-Type: response\r\nContent-Type: application/http\r\n"
            f"Content-Length: {len(content)}\r\n\r\n").encode() + content + b"\r\n\r\n"


def page_attributes(folder: Path) -> str:
    """Read a page with a tag of 200,000 attributes."""
    page = "<div " + " ".join(f"a{index}=1" for index in range(200_000)) + "><p>text</p>"
    reasons = _read(folder, "a.warc", warc(page.encode()))
    assert reasons == ["page_too_complex"], reasons
    return "quarantined: page_too_complex"


def page_brotli(folder: Path) -> str:
    """Read a page of 100 MB that Brotli compresses to a few bytes."""
    import brotli

    reasons = _read(folder, "a.warc", warc(brotli.compress(b" " * 100_000_000, quality=2), "Content-Encoding: br\r\n"))
    assert reasons == ["no_main_text"], reasons
    return "quarantined: unpacked it is over read.max_record_bytes"


def gzip_line(folder: Path) -> str:
    """Read a line of 200 MB from a compressed file of 200 kB."""
    reasons = _read(folder, "a.jsonl.gz", gzip.compress(b'{"text": "' + b"a" * 200_000_000 + b'"}', 1))
    assert reasons == ["record_too_long"], reasons
    return "quarantined: record_too_long"


def _refused(source: str) -> str:
    from tidewheel.data.tokenize.chat import read_template

    try:
        read_template(None, source.encode(), where="template")
    except TidewheelError as error:
        return f"refused: {error.what.removeprefix('the chat template is not usable: ')}"
    raise AssertionError("the template was accepted")


def template_loops(folder: Path) -> str:
    """Use a chat template of nine nested loops."""
    return _refused("{% for x in range(1000) %}" * 9 + "{% endfor %}" * 9)


def template_allocates(folder: Path) -> str:
    """Use a chat template that doubles a string ninety times."""
    return _refused("{% set n = namespace(x='a') %}{% for i in range(90) %}{% set n.x = n.x ~ n.x %}{% endfor %}")


def yaml_aliases(folder: Path) -> str:
    """Load a recipe whose aliases expand to 10^12 values."""
    from tidewheel import yaml_text

    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    try:
        yaml_text.load("\n".join(lines))
    except yaml.YAMLError as error:
        return f"refused: {str(error).splitlines()[0]}"[:90]
    raise AssertionError("the recipe was accepted")


def endpoint_password(folder: Path) -> str:
    """Put a password into the object store's address, which messages and logs would show."""
    from tidewheel.errors import StorageError

    before = os.environ.get("AWS_ENDPOINT_URL")
    os.environ["AWS_ENDPOINT_URL"] = "http://user:pLaNtEd@127.0.0.1:9"
    message = ""
    try:
        store("s3://bucket").read("key")
    except StorageError as error:
        message = str(error)
    finally:
        os.environ.pop("AWS_ENDPOINT_URL")
        if before is not None:
            os.environ["AWS_ENDPOINT_URL"] = before
    assert "contains a user or a password" in message, message
    assert "pLaNtEd" not in message
    return "refused, and not shown"


#: Files with secrets that an upload once contained.
UPLOADED = (".git-credentials", ".npmrc", ".pypirc", ".kube/config", ".docker/config.json", ".envrc", "prod.env",
            "service-account-1.json", "signing.p12", "signing.pfx", "tls.pem", ".ray/auth_token", ".huggingface/token",
            ".pgpass", "terraform.tfstate", "secrets.yaml", ".vault-token", "rclone.conf", "ignored.txt")


def upload_of_secrets(folder: Path) -> str:
    """Submit a working folder with secrets in typical files, in ignored files and in code."""
    from tidewheel.cluster.upload import survey

    key = "AKIA" + "Q" * 16  # concatenated, so that no secret scanner reports this file
    files = {**dict.fromkeys(UPLOADED, "secret"), ".gitignore": "ignored.txt", "settings.py": f"KEY = '{key}'",
             "train.py": "pass"}
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    listing = survey(str(folder))
    assert set(listing.files) == {"train.py", ".gitignore"}, listing.files
    assert key not in listing.left_out()
    return f"{len(files) - len(listing.files)} of {len(files)} files stay here, those that may hold secrets are named"


def other_bytes(folder: Path) -> str:
    """Install a package with the pinned name and version and other bytes."""
    wheel = folder / "pinned-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as package:
        package.writestr("pinned.py", "")
        package.writestr("pinned-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: pinned\nVersion: 1.0\n")
        package.writestr("pinned-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        package.writestr("pinned-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    packages = {"install": [{"metadata": {"name": "pinned", "version": "1.0"},
                             "download_info": {"archive_info": {"hashes": {"sha256": digest}}}}]}
    (folder / "requirements.lock").write_text(dependencies.lock(packages))
    install = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "install", "--no-index",
               "--find-links", str(folder), "--target", str(folder / "there"), "--require-hashes", "--no-deps",
               "-r", str(folder / "requirements.lock")]
    subprocess.run([*install, "--dry-run"], check=True, capture_output=True)
    with zipfile.ZipFile(wheel, "a") as package:
        package.writestr("planted.py", "")
    process = subprocess.run(install, check=False, capture_output=True, text=True)
    assert process.returncode != 0
    assert "DO NOT MATCH THE HASHES" in process.stderr, process.stderr
    assert not (folder / "there").exists()
    return "refused: the hash is not that of requirements.lock"


def shard_after_check(folder: Path) -> str:
    """Replace a cached shard after its hash is checked and before it is read."""
    from blake3 import blake3

    from tidewheel.shards.cache import ShardFiles
    from tidewheel.shards.manifest import ShardInfo

    class Remote(LocalStore):
        """A folder that acts as remote storage, so that its shards are copied."""

        def local_path(self, key: str) -> None:
            return None

    content = b"the shard's content" * 1000
    (folder / "remote").mkdir()
    remote = Remote(str(folder / "remote"))
    remote.write("a.arrow", content)
    shard = ShardInfo("a.arrow", rows=1, tokens=1, bytes=len(content), hash="blake3-" + blake3(content).hexdigest())
    with ShardFiles(remote, folder / "cache").opened(shard) as (copy, readable):
        copy.unlink()
        copy.write_bytes(b"planted")
        assert readable.read_bytes() == content
    with ShardFiles(remote, folder / "cache").opened(shard) as (_, readable):
        assert readable.read_bytes() == content
    return "the bytes read are the bytes hashed; the planted file is downloaded again"


def shard_cache(folder: Path) -> str:
    """Create the cache's folder as another user before the run does."""
    from tidewheel.errors import StorageError
    from tidewheel.private_folders import user_folder

    before = tempfile.tempdir
    tempfile.tempdir = str(folder)
    try:
        (folder / f"tidewheel-shards-{os.getuid()}").mkdir()
        (folder / f"tidewheel-shards-{os.getuid()}").chmod(0o777)
        user_folder("shards")
    except StorageError as error:
        return f"refused: {error.what}"[:90]
    finally:
        tempfile.tempdir = before
    raise AssertionError("the folder was accepted")


def run_token(folder: Path) -> str:
    """Read the token of a private run as another user."""
    from tidewheel.cluster import private_run

    folder.chmod(0o700)
    token = private_run.make_token(folder)
    mode = token.stat().st_mode & 0o777
    assert mode == 0o600, oct(mode)
    return "mode 0600, in a folder of mode 0700"


def unauthenticated(folder: Path) -> str:
    """Announce 256 MiB to a memory-tier agent without authentication, and hold many connections open."""
    from tidewheel import unauthenticated as limits
    from tidewheel.checkpoint.memory_tier.agent import Agent

    agent = Agent("127.0.0.1", "secret", "attacked")
    try:
        with socket.create_connection(agent.address, timeout=15) as connection:
            connection.sendall((256 << 20).to_bytes(4, "big"))
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(4096):  # the agent's challenge, then the end; TimeoutError if it waits for more
                    pass
    finally:
        agent.stop()
    closed: list[int] = []
    held = limits.UnauthenticatedConnections(max_connections=2)
    with contextlib.ExitStack() as stack:
        for number in range(3):
            stack.enter_context(held.admitted(functools.partial(closed.append, number)))
        assert closed == [0]
    return f"{limits.HELLO_BYTES} bytes, {limits.HELLO_SECONDS:g} s, {limits.MAX_CONNECTIONS} at once; the oldest goes"


ATTACKS = (
    Attack("Parquet dictionary bomb", "batches by decoded bytes", 60, parquet_dictionary),
    Attack("packed line of 200 MB", "read.max_record_bytes", 60, gzip_line),
    Attack("tokenizer: one word of 1 MB", "words are split before training", 60, unbroken_word),
    Attack("web page: 200,000 attributes", "counted before libxml2, own process", 30, page_attributes),
    Attack("web page: Brotli bomb", "unpacked up to a limit", 30, page_brotli),
    Attack("chat template: nested loops", "work is counted", 20, template_loops),
    Attack("chat template: doubling", "work is counted", 20, template_allocates),
    Attack("YAML alias bomb", "values that aliases stand for", 20, yaml_aliases),
    Attack("password in AWS_ENDPOINT_URL", "refused before any request", 20, endpoint_password),
    Attack("submit: secrets in the folder", "names, ignore files, contents", 20, upload_of_secrets),
    Attack("package with other bytes", "make install, --require-hashes", 120, other_bytes),
    Attack("unauthenticated connections to an agent", "hello size, time and number", 20, unauthenticated),
    Attack("shard cache of another user", "owner and mode are checked", 20, shard_cache),
    Attack("shard replaced after its check", "hash of the descriptor that is read", 20, shard_after_check),
    Attack("token of a private run", "own token, mode 0600", 20, run_token),
)


def attempt(attack: Attack) -> tuple[str, float]:
    """Run an attack in an empty folder and return a description of its outcome and its seconds.

    Raises:
        AssertionError: the bound does not hold.
    """
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        result = attack.run(Path(folder))
        seconds = time.monotonic() - begin
    assert seconds < attack.seconds, f"{seconds:.1f} s, more than {attack.seconds}"
    return result, seconds
