"""Configurations of other tools become ours, with an account of every key."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path

import pytest

from tests.docs_pages import DOCS
from tests.source import parsed
from tests.unit.imports import published
from tidewheel.cli import run_command
from tidewheel.config import load
from tidewheel.errors import ConfigError
from tidewheel.imports import TABLES
from tidewheel.imports.__main__ import page
from tidewheel.imports.convert import PARTS, Imported, convert
from tidewheel.imports.reading import arguments, parse
from tidewheel.imports.table import Mapped, Meaningless, keys_of
from tidewheel.imports.writing import as_yaml
from tidewheel.models import families
from tidewheel.models.moe.family import MixtureFamily
from tidewheel.parts import name_of
from tidewheel.train.config import TrainConfig


def imported(tool: str, text: str, **options) -> Imported:
    table = TABLES[tool]
    return convert(table, parse(table, text, f"a.{table.formats[0]}"), **options)


def loaded(result: Imported, folder: Path) -> TrainConfig:
    """Return the configuration of the YAML as a user loads it."""
    file = folder / "run.yaml"
    file.write_text(as_yaml(result, "their.file"))
    return load(TrainConfig, file)


def verdicts(result: Imported) -> dict[str, str]:
    return {row.key: row.verdict for row in result.rows}


def fields(package: str, file: str, *classes: str) -> dict[str, ast.expr | None]:
    """Return {field: default} of dataclasses in an installed package, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    tree = parsed(Path(spec.origin).parent / file)
    return {statement.target.id: statement.value for node in tree.body
            if isinstance(node, ast.ClassDef) and node.name in classes for statement in node.body
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
            and "ClassVar" not in ast.unparse(statement.annotation)}


def field_default(default: ast.expr | None) -> object:
    """Return the default of a dataclass's field as written: a literal, or field(default=literal)."""
    if isinstance(default, ast.Call):
        default = next((word.value for word in default.keywords if word.arg == "default"), None)
    return ast.literal_eval(default) if isinstance(default, ast.Constant) else None


def test_every_documented_key_of_deepspeed_is_known():
    for key in published.DEEPSPEED_KEYS:
        entry = TABLES["deepspeed"].find(key)
        assert entry.to if isinstance(entry, Mapped) else entry.reason, key


@pytest.mark.parametrize(("tool", "package", "file", "classes"), [
    ("transformers", "transformers", "training_args.py", ("TrainingArguments",)),
    ("accelerate", "accelerate", "commands/config/config_args.py", ("BaseConfig", "ClusterConfig", "SageMakerConfig"))])
def test_every_field_of_the_installed_tool_is_known(tool, package, file, classes):
    names = fields(package, file, *classes)
    assert len(names) > 30
    table = TABLES[tool]
    assert [name for name in names if name not in table.by_key and not table.is_group(name)] == []


def test_absent_keys_of_transformers_have_its_defaults():
    names = fields("transformers", "training_args.py", "TrainingArguments")
    ours = convert(TABLES["transformers"], {}).settings
    for name, value in {
            "learning_rate": ours["optimizer"]["learning_rate"], "weight_decay": ours["optimizer"]["weight_decay"],
            "adam_beta1": ours["optimizer"]["betas"][0], "adam_beta2": ours["optimizer"]["betas"][1],
            "max_grad_norm": ours["optimizer"]["clip_norm"], "seed": ours["seed"],
            "per_device_train_batch_size": ours["batch"]["micro_sequences"],
            "lr_scheduler_type": ours["schedule"]["kind"], "save_steps": ours["checkpoint"]["every_steps"]}.items():
        assert value == field_default(names[name]), name


def test_every_target_is_a_setting_of_ours():
    """A renamed setting of ours is renamed in the tables too."""
    for table in TABLES.values():
        for entry in table.entries:
            for name in entry.to.split() if isinstance(entry, Mapped) else ():
                group, _, setting = name.partition(".")
                assert group in TrainConfig.model_fields, f"{table.tool}: {name}"
                if group in PARTS and setting not in ("kind", ""):
                    kinds = PARTS[group].KIND
                    known = {field for kind in kinds.names() for field in kinds.find(kind).model_fields}
                    assert setting in known or kinds.noun == "optimizer", f"{table.tool}: {name}"
                elif setting:
                    values = TrainConfig().canonical()[group]
                    assert setting in values, f"{table.tool}: {name}"


@pytest.mark.parametrize("tool", TABLES)
def test_every_key_has_a_reason_or_a_target(tool):
    for entry in TABLES[tool].entries:
        assert keys_of(entry)
        assert entry.to if isinstance(entry, Mapped) else entry.reason.strip()


def test_the_page_of_keys_is_up_to_date():
    written = (DOCS / "coming_from_keys.md").read_text()
    assert written == page(), "run python -m tidewheel.imports > docs/coming_from_keys.md"


@pytest.mark.parametrize(("tool", "key", "nearest"), [
    ("deepspeed", "zero_optimisation.stage", "zero_optimization.stage"),
    ("deepspeed", "train_batch_sise", "train_batch_size"), ("megatron", "num-layer", "num-layers"),
    ("transformers", "learning_rat", "learning_rate"), ("torchtitan", "training.sequence_len", "training.seq_len")])
def test_an_unknown_key_names_the_nearest(tool, key, nearest):
    with pytest.raises(ConfigError, match=f"did you mean '{nearest}'"):
        TABLES[tool].find(key)


def test_zero3_with_automatic_values(tmp_path):
    result = imported("deepspeed", published.ZERO3_AUTO)
    settings = loaded(result, tmp_path)
    assert settings.parallel.data == "zero3"
    assert settings.parallel.offload
    assert settings.batch == TrainConfig().batch
    assert settings.optimizer.learning_rate == TrainConfig().optimizer.learning_rate
    assert settings.metrics.every_steps == 1000
    assert result.lost == []
    assert verdicts(result)["train_batch_size"] == "default"


def test_the_batch_of_deepspeed_gives_the_gpus(tmp_path):
    text = json.dumps({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
                       "bf16": {"enabled": True}, "zero_optimization": {"stage": 2},
                       "scheduler": {"type": "WarmupCosineLR", "params": {
                           "warmup_num_steps": 30, "total_num_steps": 1000, "cos_min_ratio": 0.05}}})
    settings = loaded(imported("deepspeed", text), tmp_path)
    assert (settings.batch.global_sequences, settings.batch.micro_sequences, settings.batch.virtual_ranks) == (64, 2, 8)
    assert (settings.elastic.max_workers, settings.elastic.gpus_per_worker) == (8, 1)
    assert (settings.precision, settings.parallel.data, settings.steps) == ("bf16", "zero2", 1000)
    assert settings.schedule.decisive() == {"kind": "cosine", "warmup_steps": 30, "final_fraction": 0.05}


def test_contradicting_batches_are_refused():
    text = json.dumps({"train_batch_size": 60, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4})
    with pytest.raises(ConfigError, match="60 sequences"):
        imported("deepspeed", text, gpus=8)


def test_decay_in_the_gradient_is_another_optimizer(tmp_path):
    for decoupled, kind in ((True, "adamw"), (False, "adam")):
        text = json.dumps({"optimizer": {"type": "Adam", "params": {"lr": 0.001, "adam_w_mode": decoupled}}})
        assert name_of(type(loaded(imported("deepspeed", text), tmp_path).optimizer)) == kind


def test_stage_1_with_offload_is_sharded_further(tmp_path):
    text = json.dumps({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}})
    assert loaded(imported("deepspeed", text), tmp_path).parallel.data == "zero2"


def test_what_would_change_the_run_is_named():
    result = imported("deepspeed", published.ONE_BIT_ADAM, gpus=64)
    assert [row.key for row in result.lost] == [
        "optimizer.type", "optimizer.params.freeze_step", "optimizer.params.bias_correction"]
    assert "# not available: optimizer.type: OneBitAdam" in as_yaml(result, "ds.json")
    assert result.settings["precision"] == "fp16"


def test_nvme_is_not_silently_the_host(tmp_path):
    text = json.dumps({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}}})
    result = imported("deepspeed", text)
    assert [row.key for row in result.lost] == [
        "zero_optimization.offload_param.device", "zero_optimization.offload_param.nvme_path"]
    assert not loaded(result, tmp_path).parallel.offload


def test_an_optimizer_on_nvme_is_on_disk(tmp_path):
    offload = {"device": "nvme", "nvme_path": "/nvme"}
    text = json.dumps({"zero_optimization": {"stage": 3, "offload_optimizer": offload}})
    settings = loaded(imported("deepspeed", text), tmp_path)
    assert settings.parallel.offload
    assert settings.memory.optimizer_disk == "/nvme"


def test_a_pipeline_example_loads(tmp_path):
    settings = loaded(imported("deepspeed", published.PIPELINE, gpus=4), tmp_path)
    assert settings.batch.global_sequences == 256
    assert settings.optimizer.decisive()["betas"] == [0.9, 0.999]


def test_training_arguments(tmp_path):
    text = json.dumps({
        "output_dir": "out", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 500,
        "learning_rate": 2e-5, "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "warmup_steps": 0.1, "bf16": True, "gradient_checkpointing": True, "optim": "paged_adamw_8bit",
        "fsdp": "full_shard auto_wrap", "save_strategy": "epoch", "label_smoothing_factor": 0.1,
        "report_to": ["tensorboard", "mlflow"], "num_train_epochs": 3.0})
    result = imported("transformers", text, gpus=8)
    settings = loaded(result, tmp_path)
    assert settings.batch.global_sequences == 64
    assert settings.schedule.decisive() == {"kind": "cosine", "warmup_steps": 50}
    assert settings.optimizer.decisive()["kind"] == "adamw8bit"
    assert (settings.parallel.data, settings.checkpoint.every_steps) == ("zero3", 0)
    assert settings.memory.activation_checkpointing == "full"
    assert [row.key for row in result.lost] == ["label_smoothing_factor", "report_to", "num_train_epochs"]


@pytest.mark.parametrize(("given", "expected"), [
    ({"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 5e-6}, "learning_rate": 2e-5},
     {"kind": "cosine", "final_fraction": 0.25}),
    ({"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 30}},
     {"kind": "wsd", "decay_steps": 30, "decay_form": "cosine", "final_fraction": 0.0}),
    ({"lr_scheduler_type": "warmup_stable_decay",
      "lr_scheduler_kwargs": {"num_decay_steps": 30, "decay_type": "linear", "min_lr_ratio": 0.2}},
     {"kind": "wsd", "decay_steps": 30, "decay_form": "linear", "final_fraction": 0.2})])
def test_arguments_of_a_schedule_of_transformers(tmp_path, given, expected):
    result = imported("transformers", json.dumps({"max_steps": 100, **given}))
    assert result.lost == []
    assert loaded(result, tmp_path).schedule.decisive() == {"warmup_steps": 0, **expected}


def test_arguments_of_a_schedule_that_we_lack_are_named():
    given = {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 2}}
    [lost] = imported("transformers", json.dumps(given)).lost
    assert "num_cycles 2" in lost.note


def test_optimizers_that_we_have_are_known():
    result = imported("transformers", json.dumps({"optim": "ademamix"}))
    assert result.settings["optimizer"]["kind"] == "ademamix"
    assert result.lost == []


@pytest.mark.parametrize(("lines", "expected"), [
    ("", {"kind": "linear"}), ("min_lr_factor = 0.2", {"kind": "linear", "final_fraction": 0.2}),
    ("lr_min = 0.2", {"kind": "linear", "final_fraction": 0.2}), ("decay_type = 'cosine'", {"kind": "cosine"}),
    ("decay_type = 'sqrt'", {"kind": "wsd", "decay_fraction": 1.0}),
    ("decay_type = 'cosine'\ndecay_ratio = 0.1", {"kind": "wsd", "decay_fraction": 0.1, "decay_form": "cosine"}),
    ("decay_type = 'sqrt'\ndecay_ratio = 0.1", {"kind": "wsd", "decay_fraction": 0.1}),
    ("decay_ratio = 0.0", {"kind": "constant"})])
def test_schedules_of_torchtitan(tmp_path, lines, expected):
    result = imported("torchtitan", f"[lr_scheduler]\n{lines}")
    final = {} if expected["kind"] == "constant" else {"final_fraction": 0.0}
    assert loaded(result, tmp_path).schedule.decisive() == {"warmup_steps": 200, **final, **expected}


@pytest.mark.parametrize(("line", "expected"), [
    ("--lr-decay-style WSD --lr-wsd-decay-iters 20 --lr-wsd-decay-style cosine",
     {"kind": "wsd", "decay_form": "cosine", "final_fraction": 0.0}),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 20",
     {"kind": "wsd", "decay_form": "linear", "final_fraction": 0.0}),
    ("--lr-decay-style cosine --lr-decay-iters 100", {"kind": "cosine", "final_fraction": 0.0}),
    ("--lr-decay-style cosine --lr-decay-iters 80 --min-lr 1e-4", {"kind": "piecewise", "pieces": [
        {"until": 80, "form": "cosine", "final_fraction": 0.1}, {"until": 100, "final_fraction": 0.1}]}),
    ("--lr-decay-style linear --lr-decay-iters 120", {"kind": "piecewise", "pieces": [
        {"until": 100, "form": "linear", "final_fraction": 0.0, "decay_until": 120}]})])
def test_schedules_of_megatron(tmp_path, line, expected):
    result = imported("megatron", f"--train-iters 100 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 {line}")
    assert result.lost == []
    assert loaded(result, tmp_path).schedule.decisive() == {"warmup_steps": 0, **expected}


def test_the_exponential_decay_of_megatron_is_named():
    line = "--train-iters 100 --lr-decay-style WSD --lr-wsd-decay-iters 20 --lr-wsd-decay-style exponential"
    assert [row.key for row in imported("megatron", line).lost] == ["lr-wsd-decay-style"]


@pytest.mark.parametrize(("tool", "text", "key", "absent"), [
    ("megatron", "--fp8-format e5m2", "fp8-format", "precision"),
    ("torchtitan", "[lr_scheduler]\ndecay_type = 'exponential'", "lr_scheduler.decay_type", "decay_form")])
def test_a_value_without_a_counterpart_sets_nothing(tool, text, key, absent):
    result = imported(tool, text)
    assert [row.key for row in result.lost] == [key]
    assert absent not in {**result.settings, **result.settings["schedule"]}


def test_accelerate_with_copies_and_tensor_parallelism(tmp_path):
    settings = loaded(imported("accelerate", published.ACCELERATE_HSDP), tmp_path)
    layout = settings.parallel
    assert (layout.data, layout.tensor, layout.replicate) == ("zero3", 2, 2)
    assert (settings.elastic.max_workers, settings.precision) == (8, "bf16")
    assert settings.memory.activation_checkpointing == "full"


def test_torchtitan_trains_the_same_model(tmp_path):
    settings = loaded(imported("torchtitan", published.TORCHTITAN_8B, gpus=8), tmp_path)
    preset = families.KIND.build("llama", {"preset": "llama3_8b"})
    assert settings.model.shape() == preset.shape()
    assert settings.batch.global_sequences == 8
    assert (settings.memory.activation_checkpointing, settings.precision) == ("selective", "bf16")


def test_megatron_has_the_model_and_the_schedule(tmp_path):
    result = imported("megatron", published.MEGATRON_8B, gpus=8)
    settings = loaded(result, tmp_path)
    preset = families.KIND.build("llama", {"preset": "llama3_8b"})
    assert settings.model.parameters(128_256) == preset.parameters(128_256)
    assert settings.steps == -(-1953125000 // 128)
    assert settings.schedule.decisive()["warmup_steps"] == 3906252 // 128
    assert (settings.parallel.tensor, settings.parallel.context, settings.parallel.data) == (2, 2, "zero1")
    assert settings.batch.virtual_ranks == 2
    assert [row.key for row in result.lost] == ["apply-layernorm-1p"]


@pytest.mark.parametrize(("line", "kind"), [
    ("--num-experts 8 --moe-router-topk 2", "mixtral"), ("--num-experts 8 --qk-layernorm", "qwen3_moe")])
def test_megatron_experts(line, kind):
    text = ("pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --swiglu --normalization RMSNorm "
            "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights " + line)
    settings = imported("megatron", text).settings
    assert settings["model"]["kind"] == kind
    assert isinstance(families.KIND.build(kind), MixtureFamily)


def test_arguments_of_a_shell_line():
    text = "torchrun --nnodes 2 train.py --a 1 --b \\\n  --c 0.5 --d x y  # a comment\n--e=true"
    assert arguments(text) == {"a": 1, "b": True, "c": 0.5, "d": ["x", "y"], "e": True}


@pytest.mark.parametrize(("tool", "text", "message"), [
    ("deepspeed", '{"seed": 1, "seed": 2}', "occurs twice"), ("deepspeed", "[]", "expected keys and values"),
    ("torchtitan", "[a", "not valid toml"), ("megatron", "--a 1 --a 2", "occurs twice")])
def test_files_that_are_not_the_tools(tool, text, message):
    with pytest.raises(ConfigError, match=message):
        parse(TABLES[tool], text, "file")


def test_settings_of_ours_win_and_reach_the_file(tmp_path):
    result = imported("deepspeed", published.PIPELINE, gpus=4, overrides=["model.preset=debug", "steps=7"])
    settings = loaded(result, tmp_path)
    assert (settings.model.dim, settings.steps) == (64, 7)


def test_meaningless_values_say_why():
    result = imported("deepspeed", '{"wall_clock_breakdown": true, "aio": {"queue_depth": 8}}')
    assert set(verdicts(result).values()) == {"no meaning here"}
    assert all(row.note for row in result.rows)
    assert isinstance(TABLES["deepspeed"].find("aio.queue_depth"), Meaningless)


def test_the_command_prints_writes_and_plans(tmp_path, capsys):
    file = tmp_path / "ds_config.json"
    file.write_text(published.PIPELINE)
    output = tmp_path / "run.yaml"
    code = run_command(["import-config", "deepspeed", str(file), "--gpus", "8", "--set", "model.preset=125m",
                        "--output", str(output), "--plan", "--sequence-length", "1024", "--vocabulary-size", "32000"])
    printed = capsys.readouterr().out
    assert code == 0
    assert "batch.global_sequences: 256" in printed
    assert "the fastest layout of each mesh" in printed
    assert load(TrainConfig, output).elastic.max_workers == 8
    assert run_command(["import-config", "deepspeed", str(file), "--gpus", "7"]) == 2
