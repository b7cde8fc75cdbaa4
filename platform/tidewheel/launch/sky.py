"""Render a SkyPilot task: a Ray cluster over its nodes, and a training run on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from tidewheel.launch import workers
from tidewheel.train.config import TrainConfig

PORT = 6390
"""Port of the head. SkyPilot's own Ray has 6380."""
RUN = r"""set -euo pipefail
umask 077
head="$(echo "$SKYPILOT_NODE_IPS" | head -n1)"
mine="$(echo "$SKYPILOT_NODE_IPS" | sed -n "$((SKYPILOT_NODE_RANK + 1))p")"
# The address is that of the private network. Ray's processes refuse everyone without the token, which all nodes derive
# from the secret; there is no dashboard.
mkdir -p "$HOME/.tidewheel"
printf '%s' "$TIDEWHEEL_TOKEN" | sha256sum | cut -d ' ' -f 1 > "$HOME/.tidewheel/token"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$HOME/.tidewheel/token" RAY_USAGE_STATS_ENABLED=0
printf '%s' "$TIDEWHEEL_CONFIG" > "$HOME/.tidewheel/run.yaml"
options=("--node-ip-address=$mine" --min-worker-port=0 --max-worker-port=0 --disable-usage-stats
    "--temp-dir=/tmp/tw-ray" "--num-gpus=$SKYPILOT_NUM_GPUS_PER_NODE")
if [ "$SKYPILOT_NODE_RANK" -ne 0 ]; then
    until (exec 3<> "/dev/tcp/$head/@PORT@") 2> /dev/null; do sleep 1; done
    unset 'options[4]'
    exec ray start "--address=$head:@PORT@" --block "${options[@]}"
fi
ray start --head --port=@PORT@ --include-dashboard=false "${options[@]}"
RAY_ADDRESS="$head:@PORT@" exec tidewheel train "$HOME/.tidewheel/run.yaml" --address "$head:@PORT@"
"""


@dataclass(frozen=True)
class Sky:
    """One task.

    Args:
        config: of the run.
        nodes: number of nodes.
        accelerators: SkyPilot's name and number per node, "H100:8"; "": CPUs alone.
        cpus: CPUs of a node, as SkyPilot has them: "8" or "8+"; "": its default.
        spot: use spot machines; `sky jobs launch` starts the task again when they go.
        infra: where, "aws/us-east-1"; "": SkyPilot chooses.
        image: container image with Tidewheel; "": `setup` installs it.
        setup: shell lines that prepare a node.
    """

    config: TrainConfig
    nodes: int
    accelerators: str = ""
    cpus: str = ""
    spot: bool = False
    infra: str = ""
    image: str = ""
    setup: Sequence[str] = ()


def render(task: Sky) -> str:
    """Return the YAML of a task.

    Raises:
        ConfigError: the nodes do not hold the run's workers.
    """
    number = task.accelerators.partition(":")[2] or "1"
    gpus = int(number) if task.accelerators else 0
    cpus = int(task.cpus.rstrip("+")) if task.cpus.rstrip("+").isdigit() else 1_000_000
    workers.check(task.config, nodes=task.nodes, cpus=cpus, gpus=gpus)
    resources: dict[str, Any] = {
        "accelerators": task.accelerators, "cpus": task.cpus, "infra": task.infra,
        "image_id": f"docker:{task.image}" if task.image else "", "use_spot": task.spot}
    values = {
        "name": task.config.run.id.lower().replace("_", "-").replace(".", "-"), "num_nodes": task.nodes,
        "resources": {name: value for name, value in resources.items() if value},
        "workdir": ".", "envs": {"TIDEWHEEL_CONFIG": workers.text(task.config)},
        "secrets": {"TIDEWHEEL_TOKEN": None},  # sky asks for it: --secret TIDEWHEEL_TOKEN
        "setup": "\n".join(task.setup or ["python -m pip install ."]) + "\n",
        "run": RUN.replace("@PORT@", str(PORT)),
    }
    head = ("# Written by `tidewheel sky render`. Start it with a token of your own:\n"
            "#   TIDEWHEEL_TOKEN=$(openssl rand -hex 32) sky jobs launch --secret TIDEWHEEL_TOKEN THIS_FILE\n")
    return head + yaml.dump(values, Dumper=_Dumper, sort_keys=False, width=120)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)
