"""Write locks with hashes and a bill of materials, from `constraints.txt` and the installed packages.

    python -m tests.security.dependencies lock           # requirements.lock, which `make install` uses
    python -m tests.security.dependencies lock ci        # .ci/requirements.lock, which .ci/run uses
    python -m tests.security.dependencies lock cpu       # requirements-cpu.lock, which cluster/Dockerfile uses; or cuda
    python -m tests.security.dependencies sbom [FILE]    # sbom.json: CycloneDX 1.6

pip chooses the files, so a lock is valid for the Python, the platform and the index with which it is made. A lock also
names the packages that build Tidewheel, so that an installation downloads only files whose hashes are in the lock.
Making a lock needs only Python and pip.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OURS = "tidewheel"
EDITABLE_BUILDS = "editables"
"""Package that hatchling needs for an editable installation."""


@dataclass(frozen=True)
class Target:
    """An environment for which there is a lock.

    Args:
        file: path of the lock, relative to the repository.
        extras: extras of Tidewheel to install.
        more: further requirements.
        index: a further package index; "" for none.
    """

    file: str
    extras: tuple[str, ...]
    more: tuple[str, ...] = ()
    index: str = ""


_LAUNCHER = ("boto3", "google-api-python-client==2.149.0")
TARGETS = {
    "dev": Target("requirements.lock", ("dev",)),
    "ci": Target(".ci/requirements.lock", ("dev",)),
    "cpu": Target("requirements-cpu.lock", ("tokenizers", "classify", "web"), _LAUNCHER,
                  "https://download.pytorch.org/whl/cpu"),
    "cuda": Target("requirements-cuda.lock", ("tokenizers", "quantized"), _LAUNCHER),
}


def report(target: Target) -> dict[str, Any]:
    """Return pip's report of what it would install for a target, with the hash of each file.

    Raises:
        subprocess.CalledProcessError: pip finds no version, and prints why.
    """
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    ours = f"{ROOT}[{','.join(target.extras)}]"
    index = ["--extra-index-url", target.index] if target.index else []
    process = subprocess.run([sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet",
                           "--report", "-", "-c", str(ROOT / "constraints.txt"), *index,
                           ours, *target.more, *build, EDITABLE_BUILDS], check=True, stdout=subprocess.PIPE)
    answer: dict[str, Any] = json.loads(process.stdout)
    return answer


def tag() -> str:
    """Return the Python and the platform of a lock made here, such as "cpython-311 linux-x86_64"."""
    return f"{sys.implementation.cache_tag} {sys.platform}-{platform.machine()}"


def lock(pip_report: dict[str, Any], index: str = "") -> str:
    """Return the text of a lock for a report of pip.

    Raises:
        ValueError: a file has no SHA-256.
    """
    lines = ["# Made by `python -m tests.security.dependencies lock`, for one Python, platform and index."]
    lines.append(f"# {tag()}")
    lines += [f"--extra-index-url {index}"] if index else []
    entries = []
    for item in pip_report["install"]:
        name, version = item["metadata"]["name"], item["metadata"]["version"]
        if "dir_info" in item["download_info"]:  # this checkout
            continue
        digest = item["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
        if not digest:
            raise ValueError(f"the index states no SHA-256 for {name} {version}")
        entries.append(f"{name.lower()}=={version} \\\n    --hash=sha256:{digest}")
    return "\n".join(lines + sorted(entries)) + "\n"


def sbom() -> dict[str, Any]:
    """Return a CycloneDX 1.6 document of the installed packages other than Tidewheel."""
    components = {}
    for distribution in importlib.metadata.distributions():
        name, version = distribution.metadata["Name"], distribution.version
        if not name or name.lower() == OURS:
            continue
        purl = f"pkg:pypi/{re.sub(r'[-_.]+', '-', name).lower()}@{version}"
        licence = distribution.metadata.get("License-Expression")
        components[purl] = {
            "type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl,
            **({"licenses": [{"expression": licence}]} if licence else {})}
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    return {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1,
            "metadata": {"component": {"type": "application", "bom-ref": OURS, "name": OURS, "version": version}},
            "components": [components[purl] for purl in sorted(components)]}


def main(arguments: list[str]) -> int:
    """Write the lock or the bill of materials that the command line names."""
    match arguments:
        case ["lock", *rest] if len(rest) < 2 and set(rest) <= set(TARGETS):
            target = TARGETS[rest[0] if rest else "dev"]
            path = ROOT / target.file
            text = lock(report(target), target.index)
        case ["sbom", *rest] if len(rest) < 2:
            path = Path(*rest or [ROOT / "sbom.json"])
            text = json.dumps(sbom(), indent=1) + "\n"
        case _:
            print(__doc__)
            return 2
    path.write_text(text)
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
