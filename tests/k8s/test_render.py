"""Rendering puts a run's configuration into manifests, and the built-in kustomize agrees with the real one."""

from __future__ import annotations

import itertools
import shlex
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tidewheel.cli import run_command
from tidewheel.config import build, load
from tidewheel.data.config import PipelineConfig
from tidewheel.errors import ConfigError
from tidewheel.kubernetes import kustomize
from tidewheel.kubernetes.documents import manifests, write
from tidewheel.kubernetes.problem import get, name_of
from tidewheel.kubernetes.render import Request, render, settings
from tidewheel.train.config import TrainConfig

ROOT = Path(__file__).parents[2]
TREE = ROOT / "k8s"
REMOTE = ["run.uri=s3://bucket/runs", "data.uri=s3://bucket/clean/shards"]
WITH_PROMPTS = [REMOTE[0], "rollouts.prompts=s3://bucket/prompts.jsonl", "model.init_from=s3://bucket/llama"]
REAL = kustomize.command()


def training(name: str = "llama_8b.yaml", *overrides: str) -> TrainConfig:
    remote = WITH_PROMPTS if name.startswith("grpo") else REMOTE
    return load(TrainConfig, ROOT / "jobs/configs" / name, [*remote, *overrides])


@pytest.fixture(autouse=True)
def _here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the built-in kustomize, except in the tests that compare it with the real one."""
    if "real" not in request.node.name:
        monkeypatch.setattr(kustomize, "command", lambda: None)


def groups(rendered: list[dict[str, Any]], kind: str = "RayJob") -> dict[str, tuple[int, int]]:
    cluster = next(manifest for manifest in rendered if manifest["kind"] == kind)
    spec = cluster["spec"] if kind == "RayCluster" else cluster["spec"]["rayClusterSpec"]
    return {group["groupName"]: (group["minReplicas"], group["maxReplicas"]) for group in spec["workerGroupSpecs"]}


def test_the_configuration_arrives_and_means_the_same() -> None:
    run_config = training()
    rendered = render(Request("gpu", tree=TREE, job="train", config=run_config))
    held = next(manifest for manifest in rendered if name_of(manifest).startswith("ConfigMap/tidewheel-run-"))
    arrived = build(TrainConfig, yaml.safe_load(held["data"]["train.yaml"]))
    assert arrived.recipe_hash() == run_config.recipe_hash()
    assert (arrived.run_uri, arrived.data.cache) == (run_config.run_uri, "/cache/shards")
    job = next(manifest for manifest in rendered if manifest["kind"] == "RayJob")
    volume = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["volumes"][0]
    assert volume["configMap"]["name"] == held["metadata"]["name"]
    assert job["spec"]["entrypoint"] == "python -m jobs.train --config /etc/tidewheel/train.yaml"
    assert job["metadata"]["name"] == "llama-8b"
    assert not any(manifest["kind"] == "RayCluster" for manifest in rendered), "the job has its own cluster"


@pytest.mark.parametrize("path", sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("jobs/configs/*.yaml")))
def test_every_training_configuration_keeps_its_recipe(path: str) -> None:
    config = load(TrainConfig, ROOT / path)
    assert build(TrainConfig, settings(config)).recipe_hash() == config.recipe_hash()


@pytest.mark.parametrize("path", sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("pipelines/*.yaml")
                                        if not path.name.startswith("workflow_")))
def test_every_pipeline_keeps_its_recipe(path: str) -> None:
    config = load(PipelineConfig, ROOT / path)
    assert build(PipelineConfig, yaml.safe_load(write([settings(config)]))).recipe_hash() == config.recipe_hash()


@pytest.mark.parametrize(("overlay", "config", "overrides", "expected"), [
    ("gpu", "llama_8b.yaml", (), {"gpu-on-demand": (1, 8)}),
    ("gpu-spot", "llama_8b.yaml", (), {"gpu-on-demand": (1, 1), "gpu-spot": (0, 7)}),
    ("gpu-spot", "llama_70b.yaml", (), {"gpu-on-demand": (8, 8), "gpu-spot": (0, 24)}),
    ("gpu", "llama_1b.yaml", (), {"gpu-on-demand": (1, 4)}),
    ("gpu-spot", "llama_8b.yaml", ("elastic.min_workers=12", "elastic.max_workers=40"),
     {"gpu-on-demand": (2, 2), "gpu-spot": (0, 2)}),  # of 64 virtual ranks, 16 and 32 workers are the legal numbers
    ("kind", "demo.yaml", (), {"data": (1, 2)}),
    ("rollouts", "grpo_8b.yaml", (), {"gpu-on-demand": (1, 2), "rollouts-spot": (0, 2)}),
    ("rollouts", "grpo_8b.yaml", ("rollouts.generators.gpus=2",), {"gpu-on-demand": (1, 2), "rollouts-spot": (0, 4)}),
])
def test_the_number_of_pods_follows_the_runs_limits(overlay: str, config: str, overrides: tuple[str, ...],
                                             expected: dict[str, tuple[int, int]]) -> None:
    rendered = render(Request(overlay, tree=TREE, job="train", config=training(config, *overrides)))
    assert expected.items() <= groups(rendered).items()


def test_a_standing_cluster_has_the_sites_images_and_accounts() -> None:
    rendered = render(Request("gpu", tree=TREE, namespace="ml",
                          images={"tidewheel-cuda": "reg:5000/tw:1", "tidewheel": "tw:2"},
                          accounts={"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/tidewheel"}))
    cluster = next(manifest for manifest in rendered if manifest["kind"] == "RayCluster")
    images = [get(group, "template", "spec", "containers", 0, "image") for group in cluster["spec"]["workerGroupSpecs"]]
    assert images == ["tw:2", "reg:5000/tw:1"]
    assert {manifest["metadata"].get("namespace", "ml") for manifest in rendered} == {"ml"}
    annotated = {name_of(manifest) for manifest in rendered if get(manifest, "metadata", "annotations",
                                                              "eks.amazonaws.com/role-arn")}
    assert annotated == {"ServiceAccount/tidewheel-head", "ServiceAccount/tidewheel-worker"}


def test_a_pipeline_and_a_workflow_have_their_entry_points() -> None:
    config = load(PipelineConfig, ROOT / "pipelines/demo.yaml")
    rendered = render(Request("gpu", tree=TREE, job="pipeline", config=config, arguments=("--output=s3://b/clean",)))
    job = next(manifest for manifest in rendered if manifest["kind"] == "RayJob")
    assert job["spec"]["entrypoint"] == ("python -m jobs.prepare_data --config /etc/tidewheel/pipeline.yaml "
                                         "--output=s3://b/clean")
    rendered = render(Request("gpu", tree=TREE, job="workflow", arguments=("--spec=s3://b/workflow.json",)))
    job = next(manifest for manifest in rendered if manifest["kind"] == "RayJob")
    assert job["spec"]["entrypoint"] == "python -m jobs.workflow --spec=s3://b/workflow.json"


@pytest.mark.parametrize(("request_", "words"), [
    (Request("gpuu", tree=TREE), "choose from gpu, gpu-spot, kind, rollouts"),
    (Request("gpu", tree=TREE, components=("kueu",)), "kueue"),
    (Request("gpu", tree=TREE / "nowhere"), "--tree"),
    (Request("gpu", tree=TREE, job="train"), "YAML file"),
    (Request("gpu", tree=TREE, job="workflow"), "--argument=--spec="),
    (Request("gpu", tree=TREE, job="workflow", arguments=("--spec=$(id)",)), "letters, digits"),
    (Request("gpu", tree=TREE, images={"tidewheel": "tidewheel"}), "registry/tidewheel:1.2.3"),
])
def test_requests_that_cannot_be_rendered_are_refused(request_: Request, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        render(request_)
    assert words in str(refused.value)


@pytest.mark.parametrize(("text", "words"), [
    ("resources: [a.yaml]\nhelmCharts: []\n", "helmCharts needs kustomize"),
    ("resources: [a.yaml]\n", "'a.yaml' does not exist"),
    ("patches: [{target: {kind: A}, patch: 'spec: {}'}]\n", "strategic-merge"),
    ("namespace: a\nnamespace: b\n", "twice"),
    ("resources: [../outside.yaml]\n", "outside of the folder"),
    ("configMapGenerator: [{name: a, files: [b=/etc/hostname]}]\n", "outside of the folder"),
])
def test_unsupported_kustomize_features_are_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "kustomization.yaml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        kustomize.build_here(tmp_path)
    assert words in str(refused.value)


def test_a_patch_for_another_list_is_refused() -> None:
    with pytest.raises(ConfigError, match="a patch is for 'b'"):
        kustomize.apply_operation({"a": ["c"]}, {"op": "test", "path": "/a/0", "value": "b"}, where="x")
    with pytest.raises(ConfigError, match="/a/3 does not exist"):
        kustomize.apply_operation({"a": ["c"]}, {"op": "remove", "path": "/a/3"}, where="x")


@pytest.mark.skipif(REAL is None, reason="neither kustomize nor kubectl is here")
@pytest.mark.parametrize(("overlay", "components", "job"), [
    ("kind", (), ""), ("rollouts", (), "train"), ("gpu", ("token-auth", "redis"), ""), ("gpu-spot", (), "train"),
    ("gpu-spot", ("kueue", "redis", "token-auth", "mtls"), "train"), ("gpu", ("volcano",), "workflow")])
def test_objects_equal_those_of_the_real_kustomize(overlay: str, components: tuple[str, ...], job: str,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    assert REAL is not None
    request = Request(overlay, tree=TREE, components=components, job=job,
                      config=training({"kind": "demo.yaml", "rollouts": "grpo_8b.yaml"}.get(overlay, "llama_8b.yaml")),
                      namespace="ml",
                      images={"tidewheel": "reg:5000/tw:1"},
                      arguments=("--spec=s3://b/w.json",) if job == "workflow" else ())
    theirs = render(request)
    monkeypatch.setattr(kustomize, "command", lambda: None)
    assert render(request) == theirs


def test_rendering_takes_less_than_two_seconds() -> None:
    """The test counts CPU seconds of the built-in kustomize, which other work on the machine does not change."""
    request = Request("gpu-spot", tree=TREE, components=("kueue", "redis"), job="train", config=training())
    before = time.process_time()
    render(request)
    assert time.process_time() - before < 2


def test_the_commands_in_the_docs_work(capsys: pytest.CaptureFixture[str], tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each `tidewheel k8s` command of docs/kubernetes.md."""
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs/kubernetes.md").read_text().replace("\\\n", " ")
    text = text.replace("rendered.yaml", str(tmp_path / "r.yaml"))
    commands = [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("    tidewheel k8s ")]
    assert len(commands) == 5
    assert run_command([*commands[2], "--output", str(tmp_path / "r.yaml")]) == 0
    for command in commands:
        assert run_command(command) == 0, command
    assert capsys.readouterr().out.count("objects: no problems") == 2


def test_the_command_line_renders_and_lints(capsys: pytest.CaptureFixture[str], tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    options = ["--job", "train", "--config", "jobs/configs/llama_8b.yaml",
               *itertools.chain.from_iterable(("--set", override) for override in REMOTE), "--component", "redis"]
    file = tmp_path / "all.yaml"
    assert run_command(["k8s", "render", "gpu-spot", *options, "--output", str(file)]) == 0
    assert len(manifests(file.read_text(), str(file))) > 15
    assert run_command(["k8s", "lint", "gpu-spot", *options]) == 0
    assert "no problems" in capsys.readouterr().out
    file.write_text(file.read_text().replace("terminationGracePeriodSeconds: 120", "terminationGracePeriodSeconds: 20"))
    assert run_command(["k8s", "lint", "--file", str(file)]) == 2
    assert "terminationGracePeriodSeconds" in capsys.readouterr().out
    assert run_command(["k8s", "lint"]) == 2
