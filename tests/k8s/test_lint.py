"""The lint accepts everything in k8s/ and refuses each manifest of a table that is broken in one place."""

from __future__ import annotations

import copy
import functools
import itertools
import json
from pathlib import Path

import pytest

from tests.k8s.refused import ROWS
from tidewheel.config import load
from tidewheel.kubernetes import kustomize, schemas
from tidewheel.kubernetes.clusters import quantity
from tidewheel.kubernetes.lint import lint
from tidewheel.kubernetes.problem import Manifest, name_of
from tidewheel.kubernetes.render import Request, render, settings
from tidewheel.kubernetes.rules import monitoring
from tidewheel.train.config import TrainConfig

ROOT = Path(__file__).parents[2]
REMOTE = ["run.uri=s3://bucket/runs", "data.uri=s3://bucket/clean/shards"]
WITH_PROMPTS = [REMOTE[0], "rollouts.prompts=s3://bucket/prompts.jsonl", "model.init_from=s3://bucket/llama"]
COMPONENTS = ("kueue", "redis", "token-auth", "volcano", "mtls")


@functools.cache
def config(name: str, *overrides: str) -> TrainConfig:
    """Return a run's configuration as it reaches the cluster, with the cache folders that rendering adds."""
    remote = WITH_PROMPTS if name.startswith("grpo") else REMOTE
    loaded = load(TrainConfig, ROOT / "jobs/configs" / name, [*remote, *overrides])
    return TrainConfig.model_validate(settings(loaded))


@functools.cache
def whole() -> tuple[list[Manifest], TrainConfig]:
    """Return a complete set of manifests: a training job on spot GPUs in a Kueue queue, with Redis."""
    run_config = config("llama_8b.yaml")
    command, kustomize.command = kustomize.command, lambda: None
    try:
        return render(Request("gpu-spot", tree=ROOT / "k8s", components=("kueue", "redis"), job="train",
                              config=run_config)), run_config
    finally:
        kustomize.command = command


@pytest.mark.parametrize("overlay", ["kind", "gpu", "gpu-spot", "rollouts"])
def test_everything_in_the_tree_is_clean(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kustomize, "command", lambda: None)
    run_config = config({"kind": "demo.yaml", "rollouts": "grpo_8b.yaml"}.get(overlay, "llama_8b.yaml"))
    chosen = [names for count in range(len(COMPONENTS) + 1) for names in itertools.combinations(COMPONENTS, count)
              if not {"kueue", "volcano"} <= set(names)]
    jobs = {"": (), "train": (), "workflow": ("--spec=s3://bucket/workflow.json",)}
    for components, job in itertools.product(chosen, ["train"] if overlay == "rollouts" else jobs):
        rendered = render(Request(overlay, tree=ROOT / "k8s", components=components, job=job, config=run_config,
                              arguments=jobs[job]))
        assert lint(rendered, run_config) == [], (components, job)


GENERATORS = "rollouts.generators"
ROLLOUTS = [
    ((), "gpu-spot", "the overlay rollouts", "workerGroupSpecs"),
    ((f"{GENERATORS}.placement.groups=[gpu-on-demand]",), "rollouts", "groups of their own", "groupName"),
    ((f"{GENERATORS}.cpus=100",), "rollouts", "cpus or gpus", "workerGroupSpecs"),
    (("rollouts.prompts=prompts.jsonl",), "rollouts", "s3://bucket/prompts.jsonl", "rollouts.prompts"),
]


@pytest.mark.parametrize(("overrides", "overlay", "fix", "path"), ROLLOUTS)
def test_generators_without_room_of_their_own_are_refused(overrides: tuple[str, ...], overlay: str, fix: str, path: str,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kustomize, "command", lambda: None)
    run_config = config("grpo_8b.yaml", *overrides)
    rendered = render(Request(overlay, tree=ROOT / "k8s", job="train", config=run_config))
    problems = lint(rendered, run_config)
    assert any(fix in problem.fix and problem.path.endswith(path) for problem in problems), problems


def test_too_few_pods_for_the_generators_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kustomize, "command", lambda: None)
    run_config = config("grpo_8b.yaml")
    rendered = render(Request("rollouts", tree=ROOT / "k8s", job="train", config=run_config))
    assert lint(rendered, run_config) == []
    job = next(manifest for manifest in rendered if manifest["kind"] == "RayJob")
    job["spec"]["rayClusterSpec"]["workerGroupSpecs"][2]["maxReplicas"] = 1
    [problem] = lint(rendered, run_config)
    assert "room for 8 generators, the run asks for 16" in problem.what
    assert problem.path == "spec.rayClusterSpec.workerGroupSpecs[2].maxReplicas"


def test_the_administrators_queues_are_clean() -> None:
    for name in ("kueue", "volcano"):
        assert lint(kustomize.build_here(ROOT / "k8s/components" / name / "cluster")) == []


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_broken_manifests_are_refused_where_they_are_broken(row) -> None:
    _, where, operations, path, fix = row
    manifests, run_config = copy.deepcopy(whole())
    broken = next(manifest for manifest in manifests if name_of(manifest) == where)
    for operation in operations:
        kustomize.apply_operation(broken, operation, where=where)
    problems = lint(manifests, run_config)
    assert any(problem.path == path and fix in problem.fix for problem in problems), "\n".join(map(str, problems))
    assert all(problem.what and problem.fix for problem in problems)


def test_the_table_is_long_and_its_names_are_unique() -> None:
    assert len({row[0] for row in ROWS}) == len(ROWS) >= 40


def test_a_run_that_does_not_fit_its_pods_is_reported() -> None:
    manifests, _ = whole()
    tensor = config("llama_8b.yaml", "parallel.tensor=3", "model.num_kv_heads=6", "model.num_heads=36",
                    "model.dim=4608", "elastic.min_workers=24", "elastic.max_workers=48", "model.ffn_dim=15360",
                    "batch.virtual_ranks=16", "batch.global_sequences=512")
    assert any("parallel.tensor 3 does not divide" in problem.what for problem in lint(manifests, tensor))
    local = TrainConfig.model_validate({**settings(config("llama_8b.yaml")), "run": {"uri": "runs"}})
    assert any(problem.path == "config: run.uri" for problem in lint(manifests, local))


def test_a_run_uses_the_groups_that_its_placement_names() -> None:
    manifests, _ = whole()
    both, stays, none = (config("llama_8b.yaml", f"elastic.placement.groups={groups}")
                         for groups in ("[gpu-on-demand, gpu-spot]", "[gpu-on-demand]", "[gpus]"))
    assert lint(manifests, both) == []
    assert ["maxReplicas" in problem.path for problem in lint(manifests, stays)] == [True]  # one group is not enough
    [problem] = lint(manifests, none)
    assert "no group with ray.io/node-group=gpus and with GPUs" in problem.what
    assert "elastic.placement" in problem.fix


def test_the_configuration_in_the_manifests_is_checked_and_used() -> None:
    manifests = copy.deepcopy(whole()[0])
    held = next(manifest for manifest in manifests if "train.yaml" in manifest.get("data", {}))
    text = held["data"]["train.yaml"]
    assert lint(manifests) == []
    held["data"]["train.yaml"] = text.replace("max_workers: 64", "max_workers: 32")
    assert [problem.path for problem in lint(manifests)] == [
        "spec.rayClusterSpec.workerGroupSpecs[2].maxReplicas"], "four pods too many for 32 workers"
    held["data"]["train.yaml"] = text.replace("max_workers", "max_worker")
    assert [(problem.path, "max_workers" in problem.what) for problem in lint(manifests)] == [
        ("data['train.yaml']", True)]


def test_a_secret_is_refused_and_never_shown() -> None:
    manifests = copy.deepcopy(whole()[0])
    manifests.append({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "a"}, "stringData": {"b": "hunter2"}})
    manifests.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"},
                      "data": {"d": "s3://user:hunter2@host/bucket"}})
    messages = [str(problem) for problem in lint(manifests)]
    assert sum("Secret/a" in text or "ConfigMap/c" in text for text in messages) == 2
    assert not any("hunter2" in text for text in messages)


def test_volcano_gangs_fit_their_queue() -> None:
    manifests, _ = copy.deepcopy(whole())
    job = next(manifest for manifest in manifests if manifest["kind"] == "RayJob")
    job["metadata"]["labels"] = {"volcano.sh/queue-name": "tidewheel"}
    queue = kustomize.build_here(ROOT / "k8s/components/volcano/cluster")
    assert lint([*manifests, *queue]) == []
    queue[0]["spec"]["capability"]["nvidia.com/gpu"] = "7"
    assert [problem.path for problem in lint([*manifests, *queue])] == ["spec.capability['nvidia.com/gpu']"]


def test_schemas_cover_every_kind_of_the_tree_and_refuse_unknown_ones() -> None:
    assert {"ray.io/v1/RayCluster", "ray.io/v1/RayJob"} <= set(schemas.kinds())
    unknown = {"apiVersion": "ray.io/v1", "kind": "RayClutser", "metadata": {"name": "a"}}
    assert "RayCluster" in next(schemas.check(unknown)).fix


def test_quantities_are_parsed() -> None:
    assert [quantity(text) for text in ("500m", "8", 8, "2Ki", "1G", "1.5")] == [0.5, 8, 8, 2048, 10**9, 1.5]
    assert quantity("8 GB") is None
    assert quantity("") is None


def test_tidewheels_metrics_are_those_that_a_run_reports() -> None:
    """The gauges themselves form the names, from a record with every figure that the loop writes."""
    from tidewheel.elastic.gauges import RayGauges
    from tidewheel.train.metrics.scalars import GROUPS

    names_reported = set()

    class Names(RayGauges):
        def _set(self, name: str, value: float, domain: str) -> None:
            names_reported.add(f"ray_tidewheel_{name}")

    training = ("loss", "gradient_norm", "learning_rate", "loss_scale", "tokens", "slowest_rank", "slowest_own_seconds")
    figures = [*training, *(name for names in GROUPS.values() for name in names)]
    Names("run").write({"step": 1, "time": 0.0, **dict.fromkeys(figures, 1.0), "validation": {
        "": dict.fromkeys(("loss", "perplexity", "bits_per_byte"), 1.0)}})
    assert names_reported == monitoring.TIDEWHEEL


def test_metrics_of_ray_are_in_its_source() -> None:
    import ray

    root = Path(ray.__file__).parent
    text = "".join((root / path).read_text() for path in (
        "dashboard/modules/reporter/reporter_agent.py", "autoscaler/_private/prom_metrics.py",
        "dashboard/modules/metrics/dashboards/default_dashboard_panels.py"))
    for name in monitoring.RAY:
        bare = name.removeprefix("ray_").removeprefix("autoscaler_")
        assert f'"{bare}"' in text or name in text, name


def test_promql_names_are_extracted() -> None:
    expression = 'sum by (ray_io_cluster) (autoscaler_pending_nodes{a="ray_x"}) + tidewheel:goodput:ratio30m'
    assert monitoring.names(expression) == {"autoscaler_pending_nodes", "tidewheel:goodput:ratio30m"}


def test_dashboards_have_the_fields_that_grafana_needs() -> None:
    for path in sorted((ROOT / "k8s/base/monitoring/dashboards").glob("*.json")):
        dashboard = json.loads(path.read_text())
        assert dashboard["title"]
        assert all(panel["targets"] for panel in dashboard["panels"])
