"""Run the contract and elastic tests on each release of Ray that is known to work: `make compat`.

    python -m tests.compat [RELEASE ...]

Each release has its own environment below .compat/ with its own Ray. All other packages come from the environment that
runs this command. The command prints a line for each release and exits with code 1 if a test fails on one of them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import time
from importlib import metadata
from pathlib import Path

from tidewheel.elastic.ray_contract import KNOWN_RELEASES

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".compat"
TESTS = ("tests/unit/elastic", "tests/cluster/test_elastic.py")


def environment(release: str) -> Path:
    """Create the environment of a release if it does not exist, and return the path of its Python."""
    folder = FOLDER / f"ray-{release}"
    python = folder / "bin/python"
    if (folder / "complete").exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
    command = [str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
    packages = Path(subprocess.run(command, check=True, text=True, capture_output=True).stdout.strip())
    if metadata.version("ray") != release:
        subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "--python", python, "install",
                        "--no-deps", f"ray=={release}"], check=True)
    (packages / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")  # searched after its own packages
    (folder / "complete").touch()
    return python


def run(release: str, options: list[str]) -> int:
    """Run the tests on a release and return pytest's exit code."""
    python = environment(release)
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "platform"), str(ROOT)])}
    probe = subprocess.run([str(python), "-c", "import ray; print(ray.__version__)"], env=variables, text=True,
                           capture_output=True, check=True)
    if probe.stdout.strip() != release:
        raise SystemExit(f"{python} has Ray {probe.stdout.strip()}, not {release}: remove {FOLDER} and try again")
    return subprocess.run([str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not long", *options,
                           *TESTS], env=variables, cwd=ROOT, check=False).returncode


def main() -> int:
    """Run the tests on the releases of the command line and print the outcomes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="*", default=KNOWN_RELEASES, help="releases of Ray; default: all known ones")
    parser.add_argument("--pytest", nargs=1, default=[], help="one more option for pytest")
    arguments = parser.parse_args()
    lines = []
    failed = False
    for release in arguments.releases:
        began = time.monotonic()
        code = run(release, arguments.pytest)
        failed |= code != 0
        lines.append(f"Ray {release}: {'passed' if code == 0 else f'failed (pytest exit code {code})'} "
                     f"after {time.monotonic() - began:.0f} s")
    print("\n".join(lines))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
