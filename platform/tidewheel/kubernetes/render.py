"""Compose an overlay, components and a job into manifests, with the run's configuration.

The result has the configuration as a ConfigMap that the head mounts, the job's command, the least and largest numbers
of pods of the groups that train (from `elastic` and the size of a pod), namespace, images, and annotations of the
service accounts. All of it is a kustomization in a temporary folder, built like any other.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidewheel.config import Config
from tidewheel.errors import ConfigError
from tidewheel.kubernetes import kustomize
from tidewheel.kubernetes.clusters import clusters, wanted
from tidewheel.kubernetes.documents import write
from tidewheel.kubernetes.problem import Manifest

logger = logging.getLogger(__name__)

JOBS = {"train": "train.yaml", "pipeline": "pipeline.yaml", "workflow": ""}
"""Jobs, and the file in /etc/tidewheel with the configuration of each."""
NEEDED = {"train": (), "pipeline": ("--output",), "workflow": ("--spec",)}
PLAIN = re.compile(r"[\w./:=@%+,-]+")
"""Arguments that no shell splits or expands: KubeRay passes the command through two shells."""
CACHE = "/cache"
HEAD = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
COMPONENT = {"apiVersion": "kustomize.config.k8s.io/v1alpha1", "kind": "Component"}


@dataclass(frozen=True)
class Request:
    """What to render.

    Args:
        overlay: folder of `tree`/overlays.
        tree: folder k8s/ of the repository, or a copy of it.
        components: folders of `tree`/components.
        job: one of `JOBS`; "" for a standing cluster.
        config: configuration of the training run or the pipeline.
        arguments: further arguments of the job's command, such as --output=s3://bucket/clean.
        namespace: namespace of the objects; "" for the overlay's.
        images: images to use instead of those in the manifests, by name, as registry/name:tag.
        accounts: annotations of the head's and workers' service accounts.
    """

    overlay: str
    tree: Path = Path("k8s")
    components: tuple[str, ...] = ()
    job: str = ""
    config: Config | None = None
    arguments: tuple[str, ...] = ()
    namespace: str = ""
    images: Mapping[str, str] = field(default_factory=dict)
    accounts: Mapping[str, str] = field(default_factory=dict)


def render(request: Request) -> list[Manifest]:
    """Return the manifests of a request.

    Raises:
        ConfigError: the request or a kustomization is wrong.
    """
    _check(request)
    with tempfile.TemporaryDirectory(prefix="tidewheel-k8s-") as name:
        folder = Path(name).resolve()
        _write(folder, request, sizes=[])
        sizes = _sizes(kustomize.build(folder), request)
        logger.debug("%d worker groups", len(sizes))
        if sizes:
            _write(folder, request, sizes=sizes)
        return kustomize.build(folder)


def _check(request: Request) -> None:
    for kind, names in (("overlays", (request.overlay,)), ("components", request.components)):
        available = sorted(path.name for path in (request.tree / kind).glob("*")
                           if (path / "kustomization.yaml").is_file())
        if not available:
            raise ConfigError("no manifests there", where=str(request.tree / kind),
                              fix="give the folder k8s of the repository with --tree")
        for name in names:
            if name not in available:
                raise ConfigError(f"{name!r} is not in {request.tree / kind}", where=kind,
                                  fix=f"choose from {', '.join(available)}")
    if request.job and request.job not in JOBS:
        raise ConfigError(f"no job {request.job!r}", where="--job", fix=f"choose from {', '.join(JOBS)}")
    if request.job in ("train", "pipeline") and request.config is None:
        raise ConfigError(f"the job {request.job} needs its configuration", where="--config", fix="give the YAML file")
    for needed in NEEDED.get(request.job, ()):
        if not any(argument.startswith(f"{needed}=") for argument in request.arguments):
            raise ConfigError(f"the job {request.job} needs {needed}", where="--argument",
                              fix=f"add --argument={needed}=s3://bucket/...")
    for argument in request.arguments:
        if not PLAIN.fullmatch(argument):
            raise ConfigError(f"{argument!r} has characters that a shell interprets", where="--argument",
                              fix="letters, digits and . / : = @ % + , - only; put the rest into the configuration")


def _sizes(manifests: list[Manifest], request: Request) -> list[dict[str, Any]]:
    """Return the operations that set the numbers of pods of a cluster's groups to those of the training run."""
    from tidewheel.train.config import TrainConfig

    if not isinstance(request.config, TrainConfig):
        return []
    operations = []
    for cluster in list(clusters(manifests))[:1]:
        for replicas in wanted(cluster, request.config):
            group = f"/spec/{'/'.join(map(str, replicas.template.path[len(cluster.path):-1]))}"
            operations += [{"op": "add", "path": f"{group}/{name}", "value": value}
                           for name, value in (("replicas", replicas.least), ("minReplicas", replicas.least),
                                               ("maxReplicas", replicas.most))]
    return operations


def _write(folder: Path, request: Request, *, sizes: list[dict[str, Any]]) -> None:
    """Write the kustomization: first the job, then the components, then the run, then the job's own cluster."""
    tree = Path(os.path.relpath(request.tree.resolve(), folder))
    components = [f"components/{name}" for name in request.components]
    if request.job:
        components = [f"jobs/{request.job}", *components]
    root: dict[str, Any] = {**HEAD, "resources": [str(tree / "overlays" / request.overlay)],
                            "components": [str(tree / name) for name in components]}
    (folder / "run").mkdir(exist_ok=True)
    run = _run(folder / "run", request, sizes)
    if run != COMPONENT:  # kustomize refuses an empty component
        (folder / "run/kustomization.yaml").write_text(write([run]))
        root["components"].append("run")
    if request.job:
        root["components"].append(str(tree / "jobs/own-cluster"))
    if request.namespace:
        root["namespace"] = request.namespace
    if request.images:
        root["images"] = [_image(name, new) for name, new in sorted(request.images.items())]
    (folder / "kustomization.yaml").write_text(write([root]))


def _run(folder: Path, request: Request, sizes: list[dict[str, Any]]) -> dict[str, Any]:
    run: dict[str, Any] = dict(COMPONENT)
    patches: list[dict[str, Any]] = []
    if request.config is not None and JOBS.get(request.job):
        name = JOBS[request.job]
        (folder / name).write_text(write([settings(request.config)]))
        run["configMapGenerator"] = [{"name": "tidewheel-run", "files": [name]}]
    if sizes:
        patches.append({"target": {"kind": "RayCluster"}, "patch": write([sizes])})
    if request.job:
        patches.append({"target": {"kind": "RayJob"}, "patch": write([[
            {"op": "replace", "path": "/metadata/name", "value": job_name(request)},
            {"op": "replace", "path": "/spec/entrypoint", "value": _command(request)}]])})
    if request.accounts:
        patches.append({"target": {"kind": "ServiceAccount", "name": "tidewheel-(head|worker)"}, "patch": write([[
            {"op": "add", "path": "/metadata/annotations", "value": dict(request.accounts)}]])})
    if patches:
        run["patches"] = patches
    return run


def _command(request: Request) -> str:
    module = {"train": "jobs.train", "pipeline": "jobs.prepare_data", "workflow": "jobs.workflow"}[request.job]
    name = JOBS[request.job]
    config = ["--config", f"/etc/tidewheel/{name}"] if name else []
    return " ".join(["python", "-m", module, *config, *request.arguments])


def job_name(request: Request) -> str:
    """Return the name of the RayJob: for a training, the run's id as a DNS name, so that two runs are two jobs."""
    run = getattr(request.config, "run", None)
    if request.job != "train" or run is None:
        return f"tidewheel-{request.job}"
    name = re.sub(r"[^a-z0-9]+", "-", run.id.lower()).strip("-")
    return (name if name[:1].isalpha() else f"run-{name}")[:47].rstrip("-")


def settings(config: Config) -> dict[str, Any]:
    """Return the configuration for the cluster: the settings that differ from defaults, as JSON values.

    Caches without a folder use the nodes' volume; they do not change the result.
    """
    from tidewheel.train.config import TrainConfig

    values = config.model_dump(mode="json", exclude_defaults=True)
    if isinstance(config, TrainConfig):
        if not config.data.cache:
            values["data"] = {**values.get("data", {}), "cache": f"{CACHE}/shards"}
        if config.compile and not config.compile_cache:
            values["compile_cache"] = f"{CACHE}/compiled"
    return values


def _image(name: str, new: str) -> dict[str, str]:
    new_name, separator, tag = kustomize.split_image(new)
    if separator != ":":
        raise ConfigError(f"{new!r} has no tag", where="--image", fix=f"write {name}=registry/{name}:1.2.3")
    return {"name": name, "newName": new_name, "newTag": tag}
