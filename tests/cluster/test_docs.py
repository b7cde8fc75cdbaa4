"""Run every command of the task pages in `docs/` as a reader types it, one shell per page, in a copy of the checkout.

`tests/docs_pages.py` says how each kind of block is tested. All pages but the first build on the first block of
`docs/README.md`, which runs once for them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.docs_pages import DOCS, ROOT, TASKS, blocks, commands, script
from tidewheel.cluster import background
from tidewheel.cluster.local import LocalCluster
from tidewheel.cluster.s3_server import S3Server

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(7200)]
CHECKOUT = ("platform", "jobs", "pipelines", "cluster", "k8s", "docs", "tests", "pyproject.toml", "constraints.txt",
            "Makefile", "README.md", ".gitignore")
FIRST = "first_run"
SILENT_SECONDS = 500
"""A page that prints nothing for so long hangs. A busy machine may take far longer for a whole page."""
#: Pages that train several runs, start clusters of their own, run many pipelines or take a minute in another way. The
#: other pages, `tests/unit/rewards`, `tests/k8s`, `tests/unit/data/readers`, `tests/unit/data/test_outputs.py`,
#: `test_elastic.py`, `test_jobs.py`, `test_wheel.py`, `test_background.py` and `test_demo.py` also hold what they rely
#: on. `make long` runs them.
LONG = ("csv_to_model", "pretrain_on_a_cluster", "spot_training", "recover", "add_a_model", "bring_your_data", "inputs",
        "clean_text", "write_a_filter", "write_an_optimizer", "write_an_objective", "write_a_callback", "long_context",
        "sft", "preferences", "adapters", "distillation", "evaluation", "reinforcement", "write_a_reward",
        "on_kubernetes", "write_an_environment", "coming_from", "diloco")
#: Pages that run many pipelines: on one cluster, as where RAY_ADDRESS is set. The others start a Ray for each command.
ON_ONE_CLUSTER = ("first_run", "bring_your_data", "clean_text", "csv_to_model", "inputs", "write_a_filter",
                  "write_an_optimizer", "write_an_objective", "write_a_callback", "long_context", "sft", "preferences",
                  "adapters", "distillation", "evaluation", "reinforcement")


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """Start an S3-protocol server on loopback and point the environment to it."""
    with S3Server() as server:
        yield server.create_bucket("bucket")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, bucket: str) -> Path:
    """Return a copy of this checkout with the tests' environment.

    The compiled filters are copied too: `copy2` keeps the times that show them to be up to date.
    """
    folder = tmp_path_factory.mktemp("docs") / "checkout"
    folder.mkdir()
    for name in CHECKOUT:
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy2)(source, folder / name)
    (folder / ".venv").mkdir()
    (folder / ".venv/bin").symlink_to(Path(sys.executable).parent)
    (folder / ".venv/.installed").touch()  # as `make` leaves it: newer than its prerequisites
    return folder


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> Path:
    """Return a copy of the checkout after the block that all pages but the first build on."""
    folder = tmp_path_factory.mktemp("start") / "checkout"
    shutil.copytree(checkout, folder, symlinks=True)
    run("\n".join(["set -eo pipefail", blocks(DOCS / "README.md")[0].text]), folder)
    return folder


@pytest.fixture(scope="module")
def cluster(bucket: str) -> Iterator[dict[str, str]]:
    """Return the environment of a running cluster."""
    with LocalCluster(nodes=0, head_cpus=2) as running:
        yield {"RAY_ADDRESS": running.address, **running.client_environment}


@pytest.mark.parametrize("page", [pytest.param(page, marks=pytest.mark.long) if page in LONG else page
                                  for page in TASKS])
def test_every_command_of_the_page(tmp_path, page, request):
    folder = tmp_path / "checkout"
    shutil.copytree(request.getfixturevalue("checkout" if page == FIRST else "start"), folder, symlinks=True)
    cluster = request.getfixturevalue("cluster") if page in ON_ONE_CLUSTER else {}
    output = run(script(DOCS / f"{page}.md"), folder, cluster)
    assert output.rstrip().endswith("--- end")


def test_the_first_page_runs_what_the_other_pages_build_on():
    first = [command for block in blocks(DOCS / f"{FIRST}.md") for command in commands(block.text)]
    assert set(commands(blocks(DOCS / "README.md")[0].text)) <= set(first)


@pytest.mark.parametrize("page", TASKS)
def test_every_diff_of_the_page_applies(page):
    """Diffs of the long pages too, so that a change of the code they patch shows at once."""
    for block in blocks(DOCS / f"{page}.md"):
        if block.language == "diff":
            subprocess.run(["git", "apply", "-C1", "--check", "-"], input=block.text, text=True, cwd=ROOT, check=True)


def run(text: str, place: Path, cluster: Mapping[str, str] = MappingProxyType({})) -> str:
    """Run a script with bash in `place`, and return its output. Fail with that output unless the script succeeds.

    Processes that the script leaves behind are killed. `cluster` is added to its environment.
    """
    state = place.parent / f"{place.name}-state"
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "MAKE", "MFLAGS"))}
    environment |= {"HOME": str(place.parent), "TIDEWHEEL_STATE": str(state), "PYTHONPATH": str(place / "platform"),
                    "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}", "PAGER": "cat", **cluster}
    log = place.parent / f"{place.name}.log"
    with log.open("w") as out:
        shell = subprocess.Popen(["bash", "-c", text], cwd=place, env=environment, stdin=subprocess.DEVNULL, stdout=out,
                                 stderr=subprocess.STDOUT, start_new_session=True)
    try:
        code = wait(shell, log)
    finally:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TIDEWHEEL_STATE", str(state))
            left = [background.find(file.stem) for file in state.glob("*.json")]
            for cluster in filter(None, left):
                background.down(cluster)
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(shell.pid, number)
                shell.wait(20)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
    output = log.read_text(errors="replace")
    assert code == 0, f"exit code {code} ({'it hangs' if code == -1 else 'see the end'}):\n{output[-6000:]}"
    assert not any(left), f"the page leaves a cluster behind:\n{output[-2000:]}"
    return output


def wait(shell: subprocess.Popen[bytes], log: Path) -> int:
    """Return the exit code of a shell, or -1 if it adds nothing to its log for `SILENT_SECONDS`."""
    size = -1
    while True:
        try:
            return shell.wait(SILENT_SECONDS)
        except subprocess.TimeoutExpired:
            if log.stat().st_size == size:
                return -1
            size = log.stat().st_size
