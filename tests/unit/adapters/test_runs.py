"""Runs that train an adapter: what their checkpoints hold, how they resume, and what is made of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.train.helpers import Replaced, Script, config, write_shards
from tidewheel import storage
from tidewheel.checkpoint import adapter_files, conversion
from tidewheel.checkpoint.adapters import base_of
from tidewheel.checkpoint.manager import CheckpointManager
from tidewheel.checkpoint.manifest import CheckpointManifest, read_manifest
from tidewheel.checkpoint.verify import locate
from tidewheel.cli import run_command
from tidewheel.errors import CheckpointError, ConfigError
from tidewheel.inference.evaluate import Evaluator
from tidewheel.inference.writer import Writer
from tidewheel.models.adapting import peft_files
from tidewheel.train.config import TrainConfig
from tidewheel.train.loop import train
from tidewheel.train.parallel.kept_base import KeptBase
from tidewheel.train.runtime import Loaded, Runtime

LORA = ("adapter.kind=lora", "adapter.rank=4", "model.qk_norm=false", "model.dim=64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with data and a finished run `base` of two steps."""
    path = tmp_path_factory.mktemp("adapters")
    write_shards(path / "shards")
    write_shards(path / "validation", shards=1, rows=4, seed=1)
    run(settings(path, "base", "adapter=null"))
    return path


def settings(path: Path, name: str, *overrides: str) -> TrainConfig:
    return config(path, name, *LORA, "steps=2", "evaluation.every_steps=0", "checkpoint.every_steps=1", *overrides)


def run(wanted: TrainConfig, control: Script | None = None) -> Any:
    """Train in this process with checkpoints in the run's folder."""
    checkpoints = CheckpointManager(storage.store(f"{wanted.run_uri}/checkpoints"), asynchronous=False, keep_last=10)
    return train(wanted, Runtime(checkpoints=checkpoints, control=control or Script()))


def manifest_of(uri: str) -> CheckpointManifest:
    _, checkpoints, name = locate(uri)
    return read_manifest(checkpoints, name)


def values_of(uri: str) -> dict[str, torch.Tensor]:
    """Return the tensors of the model in a run's newest checkpoint, by name."""
    _, checkpoints, name = locate(uri)
    manifest = read_manifest(checkpoints, name)
    names = [path.removeprefix("model/") for path in manifest.tensors if path.startswith("model/")]
    return conversion.read_stored(checkpoints, name, manifest, names)


def test_a_checkpoint_holds_the_adapter_alone_and_names_its_base(folder: Path):
    wanted = settings(folder, "lora", f"model.init_from={folder}/runs/base")
    run(wanted)
    manifest = manifest_of(wanted.run_uri)
    assert all(".adapter." in path or path == "optimizer/step" for path in manifest.tensors)
    base = base_of(manifest)
    assert base is not None
    assert base.hash == manifest_of(f"{folder}/runs/base").model_hash
    assert base.uri == f"{folder}/runs/base/checkpoints/step_00000002"
    whole = manifest_of(f"{folder}/runs/base")
    assert manifest.total_bytes < whole.total_bytes / 2


def test_a_run_resumes_to_the_same_values(folder: Path):
    start = (f"model.init_from={folder}/runs/base", "adapter.start=pissa", "reproducible=true")
    run(settings(folder, "straight", *start))
    wanted = settings(folder, "resumed", *start)
    with pytest.raises(Replaced):
        run(wanted, Script(die=2))
    assert manifest_of(wanted.run_uri).step == 1
    run(wanted)
    expected, values = values_of(f"{folder}/runs/straight"), values_of(f"{folder}/runs/resumed")
    assert expected.keys() == values.keys()
    for name, value in expected.items():
        assert torch.equal(values[name], value), name
    assert any(name.endswith(".a0") for name in values)


class Counting(CheckpointManager):
    """Notes which checkpoints of other runs are read."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.read: list[str] = []

    def load_from(self, uri: str, state: dict[str, Any], head: str = "") -> Loaded:
        self.read.append(uri)
        return super().load_from(uri, state, head)


def test_a_process_reads_its_base_once(folder: Path):
    """A generation with the same shards takes the base from memory; other shards, or another process, read it."""
    base = f"{folder}/runs/base"
    start = (f"model.init_from={base}", "adapter.base=nf4", "reproducible=true")
    run(settings(folder, "reads", *start))
    wanted = settings(folder, "keeps", *start)
    kept = KeptBase()
    checkpoints = Counting(storage.store(f"{wanted.run_uri}/checkpoints"), asynchronous=False, keep_last=10)
    with pytest.raises(Replaced):
        train(wanted, Runtime(checkpoints=checkpoints, control=Script(die=2), kept=kept))
    train(wanted, Runtime(checkpoints=checkpoints, control=Script(), kept=kept, generation=1))
    assert checkpoints.read == [base]
    expected, values = values_of(f"{folder}/runs/reads"), values_of(wanted.run_uri)
    assert all(torch.equal(values[name], value) for name, value in expected.items())
    other = settings(folder, "wider", *start, "adapter.base=plain", "steps=1")
    checkpoints = Counting(storage.store(f"{other.run_uri}/checkpoints"), asynchronous=False)
    train(other, Runtime(checkpoints=checkpoints, control=Script(), kept=kept))
    assert checkpoints.read == [base]


def test_another_base_is_refused(folder: Path):
    run(settings(folder, "moved", f"model.init_from={folder}/runs/base", "steps=1"))
    run(settings(folder, "other-base", "adapter=null", "seed=5"))
    with pytest.raises(ConfigError, match="the base is now"):
        run(settings(folder, "moved", f"model.init_from={folder}/runs/other-base"))


def test_another_adapter_is_refused(folder: Path):
    run(settings(folder, "ranks", "steps=1"))
    with pytest.raises(ConfigError, match="adapter"):
        run(settings(folder, "ranks", "adapter.alpha=8"))


@pytest.mark.parametrize("kind", ["lora", "nf4", "prefix_tuning"])
def test_what_is_written_and_evaluated_is_the_trained_model(folder: Path, kind: str):
    chosen = {"lora": (), "nf4": ("adapter.base=nf4",),
              "prefix_tuning": ('adapter={"kind": "prefix_tuning", "tokens": 3}',)}[kind]
    wanted = settings(folder, f"whole-{kind}", f"model.init_from={folder}/runs/base", "optimizer.learning_rate=0.1",
                      *chosen)
    result = run(wanted)
    evaluation = Evaluator(wanted.run_uri).evaluate(wanted.run_uri)
    assert evaluation.loss == pytest.approx(result.validation_loss, rel=1e-5)
    assert abs(evaluation.loss - Evaluator(f"{folder}/runs/base").evaluate(f"{folder}/runs/base").loss) > 1e-3
    writer = Writer.open(wanted.run_uri)
    tokens = torch.arange(2, 12)[None]
    expected = writer.model(tokens, torch.arange(10)[None], torch.zeros_like(tokens))
    if kind == "prefix_tuning":
        with pytest.raises(ConfigError, match="cannot be merged"):
            adapter_files.merge_run(wanted.run_uri, str(folder / "runs/merged-prefix"))
        return
    merged = f"{folder}/runs/merged-{kind}"
    adapter_files.merge_run(wanted.run_uri, merged)
    whole = Writer.open(merged)  # its tokenizer is beside it
    assert whole.ends == writer.ends
    logits = whole.model(tokens, torch.arange(10)[None], torch.zeros_like(tokens))
    assert (logits - expected).abs().max() < 1e-5


def unmerged(folder: Path, source: str, out: str, *options: str) -> dict[str, torch.Tensor]:
    """Return the tensors of what `tidewheel checkpoint unmerge` writes."""
    assert run_command(["checkpoint", "unmerge", f"{folder}/runs/{source}", f"{folder}/runs/{out}", *options]) == 0
    return values_of(f"{folder}/runs/{out}")


def test_an_adapter_is_taken_out_of_a_merged_model(folder: Path, capsys: pytest.CaptureFixture[str]):
    run(settings(folder, "own-base", "adapter=null"))
    own = f"model.init_from={folder}/runs/own-base"
    base = values_of(f"{folder}/runs/own-base")
    kinds = {"exact-lora": (), "exact-dora": ("adapter.kind=dora",), "exact-nf4": ("adapter.base=nf4",)}
    for name, more in kinds.items():
        run(settings(folder, name, own, "optimizer.learning_rate=0.1", *more))
        adapter_files.merge_run(f"{folder}/runs/{name}", f"{folder}/runs/of-{name}")
        found = unmerged(folder, f"of-{name}", f"without-{name}")
        assert "the bits of" in capsys.readouterr().out
        assert found.keys() == base.keys()
        assert all(torch.equal(found[key], value) for key, value in base.items()), name
    assert Writer.open(f"{folder}/runs/without-exact-lora").ends  # its tokenizer is beside it
    # a merged model that was trained further
    further = f"model.init_from={folder}/runs/of-exact-lora"
    run(settings(folder, "further", further, "adapter=null", "steps=1"))
    found = unmerged(folder, "further", "without-further", "--adapter", f"{folder}/runs/exact-lora")
    assert "the adapter is subtracted" in capsys.readouterr().out
    trained, merged = values_of(f"{folder}/runs/further"), values_of(f"{folder}/runs/of-exact-lora")
    for key, value in base.items():
        expected = value.double() + trained[key].double() - merged[key].double()
        assert (found[key] - expected).abs().max() < 1e-6 * (1 + expected.abs().max()), key
    # a base that is lost
    shutil.rmtree(folder / "runs/own-base/checkpoints")
    found = unmerged(folder, "of-exact-lora", "without-lost")
    assert all(torch.allclose(found[key], value, rtol=0, atol=1e-6) for key, value in base.items())
    for source, options, message in (
            ("of-exact-dora", (), "the adapter dora cannot be computed"),
            ("of-exact-nf4", (), "a base in 4 bits cannot be computed"),
            ("further", (), "which adapter is merged"), ("exact-lora", (), "which adapter is merged"),
            ("exact-lora", ("--adapter", f"{folder}/runs/exact-lora"), "not merged")):
        arguments = ["checkpoint", "unmerge", f"{folder}/runs/{source}", f"{folder}/runs/nothing", *options]
        assert run_command(arguments) == 2
        assert message in " ".join(capsys.readouterr().err.split())


def test_a_merged_model_keeps_the_chat_template(folder: Path):
    wanted = settings(folder, "chat", f"model.init_from={folder}/runs/base", "steps=1")
    run(wanted)
    template = folder / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    merged = f"{folder}/runs/merged-chat"
    _, missing = adapter_files.merge_run(wanted.run_uri, merged, chat_template=str(template))
    assert missing == ""
    chat = Writer.open(merged).template
    assert chat is not None
    assert chat.text([{"role": "user", "content": "so it is"}]) == "so it is"


def test_the_balance_of_experts_goes_with_the_adapter(folder: Path):
    """The biases that balance experts move while the experts are frozen, and are saved with the adapter."""
    mixture = ('model={"kind": "mixtral", "dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 64,'
               ' "num_experts": 4, "balancing": "bias", "balancing_rate": 0.01}', "adapter.base=nf4",
               'adapter.targets=["wq", "experts"]', "optimizer.learning_rate=0.1")
    wanted = settings(folder, "experts", *mixture)
    result = run(wanted)
    assert Evaluator(wanted.run_uri).evaluate(wanted.run_uri).loss == pytest.approx(result.validation_loss, rel=1e-5)
    merged = f"{folder}/runs/merged-experts"
    adapter_files.merge_run(wanted.run_uri, merged)
    tokens = torch.arange(2, 12)[None]
    inputs = tokens, torch.arange(10)[None], torch.zeros_like(tokens)
    writer, whole = Writer.open(wanted.run_uri), Writer.open(merged)
    assert all(bias.any() for _, bias in whole.model.named_buffers())
    assert (whole.model(*inputs) - writer.model(*inputs)).abs().max() < 1e-5


def test_an_adapter_goes_to_peft_and_back(folder: Path):
    wanted = settings(folder, "there", f"model.init_from={folder}/runs/base")
    run(wanted)
    count = adapter_files.export_adapter(wanted.run_uri, str(folder / "peft"))
    values = values_of(wanted.run_uri)
    assert count == sum(value.numel() for value in values.values())
    adapter, read = peft_files.read(storage.store(str(folder / "peft")), wanted.model)
    assert adapter.canonical() | {"targets": ()} == wanted.adapter.canonical() | {"targets": ()}
    assert all(torch.equal(read[name], value) for name, value in values.items())
    adapter_files.import_adapter(str(folder / "peft"), f"{folder}/runs/base", f"{folder}/runs/back")
    again = settings(folder, "again", f"model.init_from={folder}/runs/base", f"adapter.init_from={folder}/runs/back",
                     "steps=1", "optimizer.learning_rate=1e-9")
    run(again)
    for name, value in values_of(again.run_uri).items():
        assert torch.allclose(value, values[name], atol=1e-6), name


def test_a_base_that_is_gone_or_changed_is_refused(folder: Path):
    wanted = settings(folder, "orphan", f"model.init_from={folder}/runs/base", "steps=1")
    run(wanted)
    manifest = manifest_of(wanted.run_uri)
    manifest.extra["base"]["hash"] = "another"
    base = base_of(manifest)
    assert base is not None
    with pytest.raises(CheckpointError, match="not the base"):
        base.read(wanted.model, {})
    with pytest.raises(ConfigError, match="whole model"):
        adapter_files.export_adapter(f"{folder}/runs/base", str(folder / "nothing"))
