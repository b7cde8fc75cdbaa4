"""Pinned bytes and a bill of materials, from `constraints.txt` and what is installed.

    python -m tests.security.dependencies lock [FILE]   # requirements.lock: every version with its hash
    python -m tests.security.dependencies sbom [FILE]   # sbom.json: CycloneDX 1.6

pip chooses the files, so a lock is for the Python and platform it is made on: make it where the image is built. Install
with `pip install --require-hashes --no-deps -r requirements.lock`.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
OURS = "tidewheel"


def report(constraints: Path) -> dict[str, Any]:
    """Return pip's report of what it would install for the pins, with the hashes that the index states.

    Raises:
        subprocess.CalledProcessError: pip finds a version missing; it says so itself.
    """
    done = subprocess.run([sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps",
                           "--quiet", "--report", "-", "-r", str(constraints)], check=True, stdout=subprocess.PIPE)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def lock(found: dict[str, Any]) -> str:
    """Return the text of requirements.lock for a report of pip's.

    Raises:
        ValueError: a file has no SHA-256.
    """
    lines = ["# Made by `python -m tests.security.dependencies lock` from constraints.txt."]
    entries = []
    for item in found["install"]:
        name, version = item["metadata"]["name"], item["metadata"]["version"]
        digest = item["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
        if not digest:
            raise ValueError(f"the index states no SHA-256 for {name} {version}")
        entries.append(f"{name.lower()}=={version} \\\n    --hash=sha256:{digest}")
    return "\n".join(lines + sorted(entries)) + "\n"


def sbom() -> dict[str, Any]:
    """Return a CycloneDX 1.6 document of the packages installed beside Tidewheel."""
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
    """Write what is asked for."""
    if arguments[:1] == ["lock"]:
        path = Path(*arguments[1:2] or [ROOT / "requirements.lock"])
        text = lock(report(CONSTRAINTS))
    elif arguments[:1] == ["sbom"]:
        path = Path(*arguments[1:2] or [ROOT / "sbom.json"])
        text = json.dumps(sbom(), indent=1) + "\n"
    else:
        print(__doc__)
        return 2
    path.write_text(text)
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
