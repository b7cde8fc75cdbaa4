"""The listing before an upload matches the package, and both leave out ignored files and likely secrets."""

from __future__ import annotations

import subprocess
import zipfile

import pytest

from tidewheel.cluster import upload
from tidewheel.cluster.jobs import Submission
from tidewheel.cluster.upload import SCAN_BYTES, survey
from tidewheel.errors import ConfigError

TREE = {"jobs/train.py": "x" * 10, "jobs/__pycache__/train.pyc": "y", "data/big.bin": "z" * 1000, ".env": "KEY=secret",
        "keys/server.pem": "secret", ".aws/credentials": "secret", "notes.txt": "n", ".git/config": "g",
        "sub/.gitignore": "*.tmp\n", "sub/a.tmp": "t", "sub/b.txt": "b", ".gitignore": "data/\n",
        "service_credentials_prod.json": "secret"}
SECRET_FILES = (
    ".git-credentials", ".npmrc", ".pypirc", ".kube/config", ".docker/config.json", ".envrc", "prod.env",
    "service-account-7.json", "signing.p12", "signing.pfx", "tls.pem", ".ray/auth_token", ".huggingface/token",
    ".pgpass", "terraform.tfstate", "terraform.tfstate.backup", "secrets.yaml", ".vault-token", "rclone.conf", ".netrc",
    ".aws/credentials", ".ssh/config", "id_rsa", "id_ed25519.old", ".gnupg/pubring.kbx", "deep/below/ID_RSA",
    "deep/.Env")
# concatenated, so that no secret scanner reports this file
KEYS = {"an AWS access key": "AKIA" + "Q" * 16, "a private key": "-----BEGIN OPENSSH PRIVATE " + "KEY-----",
        "a GitHub token": "ghp_" + "a1" * 18, "a Hugging Face token": "hf_" + "Ab" * 17,
        "a Slack token": "xoxb-" + "123456789012-abcdef"}


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path, TREE)


def write(folder, tree):
    for name, text in tree.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_the_listing_matches_what_is_packed_and_what_ray_unpacks(folder, tmp_path_factory):
    from ray._private.runtime_env.packaging import unzip_package

    (folder / "jobs/train.py").chmod(0o755)
    listing = survey(str(folder))
    output = tmp_path_factory.mktemp("package")
    listing.pack(output / "package.zip")
    with zipfile.ZipFile(output / "package.zip") as package:
        assert {entry.filename: entry.file_size for entry in package.infolist()} == listing.files
    assert set(listing.files) == {"jobs/train.py", "notes.txt", ".gitignore", "sub/.gitignore", "sub/b.txt"}
    unzip_package(str(output / "package.zip"), str(output / "unpacked"), False, False)
    for name in listing.files:
        assert (output / "unpacked" / name).read_text() == TREE[name]
    assert (output / "unpacked/jobs/train.py").stat().st_mode & 0o111
    listing.pack(output / "again.zip")
    assert (output / "again.zip").read_bytes() == (output / "package.zip").read_bytes()


def test_files_that_usually_hold_secrets_are_left_out_and_named(tmp_path):
    write(tmp_path, {"train.py": "pass", **dict.fromkeys(SECRET_FILES, "content")})
    listing = survey(str(tmp_path))
    assert set(listing.files) == {"train.py"}
    assert set(listing.secrets) == set(SECRET_FILES)
    assert listing.left_out().startswith(f"left out {len(SECRET_FILES)} files that may hold secrets: ")
    assert f"{len(SECRET_FILES) - upload.SHOWN} more; --include PATTERN uploads them" in listing.left_out()
    assert "\n" not in listing.left_out()


@pytest.mark.parametrize("kind", KEYS)
def test_a_file_with_a_key_in_it_is_left_out_and_says_why(tmp_path, kind):
    write(tmp_path, {"train.py": f"import os\nKEY = '{KEYS[kind]}'\n", "other.py": "pass"})
    listing = survey(str(tmp_path))
    assert set(listing.files) == {"other.py"}
    assert listing.left_out().startswith(f"left out 1 file that may hold secrets: train.py ({kind}); --include ")
    assert KEYS[kind] not in listing.left_out()
    assert set(survey(str(tmp_path), includes=["train.py"]).files) == {"other.py", "train.py"}


def test_data_is_not_searched_for_keys(tmp_path):
    key = KEYS["an AWS access key"]
    write(tmp_path, {"large.jsonl": key + "\n" + "x" * SCAN_BYTES, "binary.bin": f"\0{key}"})
    assert set(survey(str(tmp_path)).files) == {"large.jsonl", "binary.bin"}


def test_include_adds_only_what_it_names(folder):
    assert set(survey(str(folder), includes=["keys/*.pem", "data/big.bin"]).files) == {
        *survey(str(folder)).files, "keys/server.pem", "data/big.bin"}
    assert not any(name.startswith((".git/", "jobs/__pycache__")) for name in survey(str(folder), includes=["*"]).files)
    assert "notes.txt" not in survey(str(folder), excludes=["*.txt"]).files


def test_ignore_files_have_the_same_meaning_as_for_git(tmp_path):
    """Nested files, negations, anchors and folders give the files that git itself would add."""
    write(tmp_path, {
        ".gitignore": "*.log\n!keep.log\n/top.txt\nbuild/\nruns/*\n!runs/best/\n**/cache/**\n\\#odd\n",
        "a.log": "", "keep.log": "", "top.txt": "", "sub/top.txt": "", "build/x.txt": "", "sub/build/keep.log": "",
        "runs/1/x": "", "runs/best/x": "", "sub/cache/deep/x": "", "#odd": "", "sub/.gitignore": "!a.log\nkeep.log\n",
        "sub/a.log": "", "sub/keep.log": "", "sub/deeper/a.log": "", "sub/deeper/.gitignore": "*\n!.gitignore\n"})
    git = ["git", "-C", str(tmp_path), "-c", "core.excludesFile=/dev/null"]
    subprocess.run([*git, "init", "-q"], check=True)
    listed = subprocess.run([*git, "ls-files", "-z", "--others", "--exclude-standard"], check=True, capture_output=True)
    assert set(survey(str(tmp_path)).files) == set(listed.stdout.decode().split("\0")) - {""}
    below = subprocess.run([*git[:2], str(tmp_path / "sub"), *git[3:], "ls-files", "-z", "--others",
                            "--exclude-standard"], check=True, capture_output=True)
    assert set(survey(str(tmp_path / "sub")).files) == set(below.stdout.decode().split("\0")) - {""}


def test_tidewheelignore_adds_to_gitignore_and_overrules_it(tmp_path):
    write(tmp_path, {".gitignore": "*.bin\n", ".tidewheelignore": "!small.bin\ndocs/\n", "small.bin": "",
                     "large.bin": "", "docs/a.md": "", "sub/.tidewheelignore": "only-here\n", "sub/only-here": "",
                     "only-here": ""})
    assert set(survey(str(tmp_path)).files) == {".gitignore", ".tidewheelignore", "small.bin", "sub/.tidewheelignore",
                                                "only-here"}
    write(tmp_path, {".tidewheelignore": "!.env\n", ".env": "secret"})
    assert ".env" not in survey(str(tmp_path)).files  # only --include uploads what may hold a secret


def test_a_link_to_a_parent_folder_is_not_followed_for_ever(tmp_path):
    write(tmp_path, {"sub/a.txt": ""})
    (tmp_path / "sub/up").symlink_to(tmp_path)
    assert set(survey(str(tmp_path)).files) == {"sub/a.txt"}


def test_rows_are_largest_first(folder):
    listing = survey(str(folder))
    sizes = [row["KB"] for row in listing.rows()]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(row["files"] for row in listing.rows()) == len(listing.files)
    assert "MB from" in listing.summary()


def test_an_upload_that_is_too_large_is_refused_and_names_the_largest_files(folder, monkeypatch):
    (folder / "weights.bin").write_bytes(bytes(3000))
    monkeypatch.setattr(upload, "LIMIT_BYTES", 2000)
    with pytest.raises(ConfigError, match=r"weights\.bin.*\n.*\.tidewheelignore"):
        survey(str(folder))


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        survey(str(tmp_path / "nowhere"))


def test_the_runtime_environment_of_a_checkout_uses_its_code(tmp_path):
    assert "PYTHONPATH" not in Submission("x", str(tmp_path)).runtime_env()["env_vars"]
    (tmp_path / "platform/tidewheel").mkdir(parents=True)
    environment = Submission("x", str(tmp_path), environment={"A": "b"}).runtime_env()
    assert environment["env_vars"]["PYTHONPATH"] == "platform"
    assert environment["env_vars"]["A"] == "b"
    assert int(environment["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) > 30
    assert Submission("x", str(tmp_path)).runtime_env(tmp_path / "p.zip")["working_dir"] == str(tmp_path / "p.zip")
    assert "working_dir" not in Submission("x", "").runtime_env()
