"""Rendered job files are what their schedulers take, and what they start is the run."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.docs_pages import ROOT
from tests.unit.launch import stand_ins
from tidewheel.cli import run_command
from tidewheel.config import build
from tidewheel.errors import ConfigError
from tidewheel.launch import anyscale, sky, slurm, workers
from tidewheel.train.config import TrainConfig

DEMO = str(ROOT / "jobs/configs/demo.yaml")
#: Fields of a SkyPilot task, and of its resources that are rendered: https://docs.skypilot.co/en/latest/reference/yaml-spec.html
SKY_TASK = {"name", "workdir", "num_nodes", "resources", "file_mounts", "setup", "run", "envs", "secrets", "config",
            "volumes", "service", "pool"}
SKY_RESOURCES = {"infra", "accelerators", "accelerator_args", "cpus", "memory", "instance_type", "use_spot",
                 "disk_size", "disk_tier", "network_tier", "ports", "image_id", "labels", "any_of", "ordered",
                 "job_recovery", "autostop", "priority"}
#: https://docs.anyscale.com/reference/job-api#jobconfig and compute-config-api#computeconfig
ANYSCALE_JOB = {"name", "image_uri", "containerfile", "compute_config", "working_dir", "excludes", "requirements",
                "env_vars", "py_modules", "cloud", "project", "registry_login_secret", "ray_version", "entrypoint",
                "max_retries", "job_queue_config", "timeout_s", "tags"}
ANYSCALE_COMPUTE = {"cloud", "cloud_resource", "head_node", "worker_nodes", "min_resources", "max_resources", "zones",
                    "enable_cross_zone_scaling", "advanced_instance_config", "flags", "auto_select_worker_config"}
ANYSCALE_GROUP = {"name", "instance_type", "resources", "labels", "min_nodes", "max_nodes", "market_type", "flags",
                  "advanced_instance_config", "required_resources", "required_labels", "cloud_deployment"}


def config(**settings) -> TrainConfig:
    return build(TrainConfig, {"run": {"id": "my_run", "uri": "s3://bucket/runs"}, "elastic": {"max_workers": 2},
                               "batch": {"global_sequences": 144, "micro_sequences": 1, "virtual_ranks": 144},
                               **settings})


def job(**changes) -> slurm.Slurm:
    return slurm.Slurm(**{"config": config(), "nodes": 2, "cpus": 4, **changes})


def lint(text: str, folder: Path) -> None:
    """Check a script with bash, and with shellcheck where it is installed."""
    file = folder / "script.sh"
    file.write_text(text)
    subprocess.run(["bash", "-n", str(file)], check=True)
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program:
        checked = subprocess.run([program, "--shell", "bash", str(file)], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("changes", [
    {}, {"gpus": 8, "config": config(elastic={"gpus_per_worker": 1, "max_workers": 16})},
    {"interface": "ib0", "time": "1-00:00:00", "options": {"partition": "gpu"}, "setup": ("module load cuda",),
     "start": "symmetric-run"}])
def test_the_sbatch_script_is_a_clean_shell_script(changes, tmp_path):
    lint(slurm.render(job(**changes)), tmp_path)


def test_the_scripts_inside_the_script_are_clean_too(tmp_path):
    text = slurm.render(job())
    for name in ("TIDEWHEEL_NODE", "TIDEWHEEL_DRIVER"):
        inside = text.partition(f"<<'{name}'\n")[2].partition(f"\n{name}\n")[0]
        assert inside
        lint(f"#!/bin/bash\n{inside}\n", tmp_path)
    lint(sky.RUN, tmp_path)


def test_the_sbatch_script_holds_the_run_and_its_options(tmp_path):
    text = slurm.render(job(gpus=8, time="12:00:00", options={"partition": "gpu"}, grace=300,
                            config=config(elastic={"gpus_per_worker": 1, "max_workers": 16}, steps=7)))
    options = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --job-name=my_run", "#SBATCH --nodes=2", "#SBATCH --gpus-per-node=8", "#SBATCH --time=12:00:00",
            "#SBATCH --partition=gpu", "#SBATCH --requeue", "#SBATCH --signal=B:USR1@300"} <= set(options)
    inside = text.partition("<<'TIDEWHEEL_RUN'\n")[2].partition("TIDEWHEEL_RUN\n")[0]
    assert build(TrainConfig, yaml.safe_load(inside)) == config(
        elastic={"gpus_per_worker": 1, "max_workers": 16}, steps=7)
    assert "RAY_AUTH_MODE=token" in text
    assert "--include-dashboard=false" in text
    assert not re.search(r"@[A-Z]+@", text)


@pytest.mark.parametrize(("changes", "message"), [
    ({"options": {"partition": "gpu; rm -rf x"}}, "a shell interprets"), ({"interface": "$(x)"}, "a shell interprets"),
    ({"config": config(elastic={"min_workers": 9, "max_workers": 9})}, "hold 8 workers"),
    ({"gpus": 8}, "workers use none"), ({"config": config(run={"uri": "runs"})}, "relative to the folder")])
def test_what_cannot_run_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        slurm.render(job(**changes))


def test_a_folder_with_spaces_is_refused():
    with pytest.raises(ConfigError, match="a shell interprets"):
        slurm.state_folder("my folder")


@pytest.mark.parametrize("spot", [False, True])
def test_a_sky_task_has_known_fields_alone(spot):
    task = sky.Sky(config(elastic={"gpus_per_worker": 1, "max_workers": 16}), 2, "H100:8", spot=spot, infra="aws",
                   image="registry/tidewheel:1")
    values = yaml.safe_load(sky.render(task))
    assert set(values) <= SKY_TASK
    assert set(values["resources"]) <= SKY_RESOURCES
    assert values["resources"].get("use_spot", False) == spot
    assert build(TrainConfig, yaml.safe_load(values["envs"]["TIDEWHEEL_CONFIG"])) == task.config
    assert values["secrets"] == {"TIDEWHEEL_TOKEN": None}
    if importlib.util.find_spec("sky") is not None:
        import jsonschema
        from sky.utils import schemas

        jsonschema.validate(values, schemas.get_task_schema())
        jsonschema.validate(values["resources"], schemas.get_resources_schema())


def test_an_anyscale_job_has_known_fields_alone():
    text = anyscale.render(anyscale.Anyscale(
        config(elastic={"gpus_per_worker": 1, "min_workers": 8, "max_workers": 32}), "jobs/configs/x.yaml", 4,
        "p5.48xlarge", 192, 8, overrides=("steps=7", "run.id=a b"), spot=True))
    values = yaml.safe_load(text)
    assert set(values) <= ANYSCALE_JOB
    assert set(values["compute_config"]) <= ANYSCALE_COMPUTE
    group, = values["compute_config"]["worker_nodes"]
    assert set(group) <= ANYSCALE_GROUP
    assert (group["min_nodes"], group["max_nodes"], group["market_type"]) == (1, 4, "PREFER_SPOT")
    assert values["entrypoint"] == "tidewheel train jobs/configs/x.yaml --set steps=7 --set 'run.id=a b'"


def test_the_commands_write_files(tmp_path):
    run = ["--set", f"run.uri={tmp_path}", "--output"]
    assert run_command(["slurm", "render", DEMO, "--nodes", "2", "--cpus-per-node", "1", *run,
                        str(tmp_path / "job.sh")]) == 0
    assert run_command(["sky", "render", DEMO, "--nodes", "2", "--cpus-per-node", "4+", *run,
                        str(tmp_path / "task.yaml")]) == 0
    assert run_command(["anyscale", "render", DEMO, "--nodes", "2", "--instance-type", "m7i.large", "--cpus-per-node",
                        "2", *run, str(tmp_path / "job.yaml")]) == 0
    lint((tmp_path / "job.sh").read_text(), tmp_path)
    assert run_command(["slurm", "render", DEMO, "--nodes", "2", "--cpus-per-node", "1"]) == 2  # run.uri is relative


def test_symmetric_run_is_started_once_a_node_and_its_driver_decides_the_code(tmp_path):
    """With a stand-in for `ray`, because the real one ends with `ray stop`, for every Ray of this user."""
    environment = stand_ins.install(tmp_path / "bin")
    (tmp_path / "bin/ray").write_text("""#!/bin/bash
[ "$2" = --help ] && exit 0
echo "$*" >> "$STAND_IN_LOG"
[ "$SLURM_NODEID" -eq 0 ] || exit 9  # a lost node
while [ "$1" != -- ]; do shift; done
shift
exec "$@"
""")
    (tmp_path / "bin/tidewheel").write_text("""#!/bin/bash
echo "tidewheel $*" >> "$STAND_IN_LOG"
trap 'exit 143' TERM
kill -USR1 "$BATCH"  # the time limit is near
sleep 60 > /dev/null 2>&1 & wait
""")
    for name in ("ray", "tidewheel"):
        (tmp_path / "bin" / name).chmod(0o755)
    script = tmp_path / "job.sh"
    script.write_text(slurm.render(job(start="symmetric-run")).replace(
        "set -euo pipefail", "set -euo pipefail\nexport BATCH=$$", 1))
    done = subprocess.run(["bash", str(script)], cwd=tmp_path, timeout=120, capture_output=True, text=True, env={
        **environment, "SLURM_JOB_ID": "4242", "SLURM_JOB_NUM_NODES": "2", "SLURM_SUBMIT_DIR": str(tmp_path)})
    calls = (tmp_path / "bin/scontrol.log").read_text().splitlines()
    assert done.returncode == 143, done.stderr
    assert sum("symmetric-run --address 127.0.0.2:24242 --min-nodes 2" in line for line in calls) == 2
    assert sum(line.startswith("tidewheel train") for line in calls) == 1
    assert "scontrol requeue 4242" in calls


@pytest.mark.parametrize(("signal_name", "code", "requeued"), [
    ("USR1", 143, True), ("TERM", 143, False), ("", 3, False)])
def test_nodes_start_and_end_with_the_run(signal_name, code, requeued, tmp_path):
    """With stand-ins for `ray`, a head that listens and a node that joins, and for `tidewheel`."""
    environment = stand_ins.install(tmp_path / "bin")
    programs = {"ray": f"""#!/bin/bash
echo "$RAY_AUTH_MODE $(wc -c < "$RAY_AUTH_TOKEN_PATH") $(stat -c %a "$RAY_AUTH_TOKEN_PATH")" >> "$STAND_IN_LOG"
echo "ray $*" >> "$STAND_IN_LOG"
if [[ "$*" == *--head* ]]; then exec {sys.executable} -c "
import socket, time
server = socket.create_server(('127.0.0.2', 24243))
while True: server.accept()"; fi
exec sleep 600
""", "tidewheel": f"""#!/bin/bash
echo "tidewheel $* RAY_ADDRESS=$RAY_ADDRESS" >> "$STAND_IN_LOG"
until grep -q "^ray start --address" "$STAND_IN_LOG"; do sleep 0.1; done
trap 'exit 143' TERM
if [ -n "{signal_name}" ]; then kill "-{signal_name}" "$BATCH"; sleep 60 > /dev/null 2>&1 & wait; fi
exit 3
"""}
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    script = tmp_path / "job.sh"
    script.write_text(slurm.render(job()).replace("set -euo pipefail", "set -euo pipefail\nexport BATCH=$$", 1))
    done = subprocess.run(["bash", str(script)], cwd=tmp_path, timeout=120, capture_output=True, text=True, env={
        **environment, "SLURM_JOB_ID": "4243", "SLURM_JOB_NUM_NODES": "2", "SLURM_SUBMIT_DIR": str(tmp_path)})
    calls = (tmp_path / "bin/scontrol.log").read_text().splitlines()
    assert done.returncode == code, done.stderr
    assert sum("ray start --head --port=24243" in line and "--include-dashboard=false" in line for line in calls) == 1
    assert sum("ray start --address=127.0.0.2:24243" in line and "=127.0.0.3" in line for line in calls) == 1
    assert len([line for line in calls if line == "token 64 600"]) == 2
    assert any(line.endswith("RAY_ADDRESS=127.0.0.2:24243") for line in calls)
    assert ("scontrol requeue 4243" in calls) == requeued
    assert not (tmp_path / ".tidewheel-slurm/4243/token").exists()


def test_workers_per_node():
    workers.check(config(elastic={"min_workers": 8, "max_workers": 8}), nodes=2, cpus=4, gpus=0)
    with pytest.raises(ConfigError, match="hold 4 workers"):
        workers.check(config(elastic={"min_workers": 8, "max_workers": 8, "gpus_per_worker": 2}), nodes=1, cpus=64,
                      gpus=8)
