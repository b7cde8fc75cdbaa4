"""Export a run's checkpoint to transformers and import it again."""

from pathlib import Path

import pytest
import torch
import transformers

from tests.unit.train.helpers import LENGTH, VOCABULARY, config, write_shards
from tidewheel import storage
from tidewheel.checkpoint.conversion import export, import_, model_of
from tidewheel.checkpoint.manager import CheckpointManager
from tidewheel.checkpoint.manifest import read_manifest
from tidewheel.checkpoint.verify import locate
from tidewheel.cli import run_command
from tidewheel.errors import CheckpointError, ConfigError
from tidewheel.models import huggingface
from tidewheel.models.decoder import Decoder
from tidewheel.train.loop import train
from tidewheel.train.runtime import Runtime


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a finished run, its shard sets and its export in hf/."""
    folder = tmp_path_factory.mktemp("exchange")
    write_shards(folder / "shards")
    write_shards(folder / "validation", shards=1, rows=4, seed=1)
    settings = config(folder, "run", "steps=4", "evaluation.sample_tokens=0")
    checkpoints = storage.store(settings.run_uri).child("checkpoints")
    train(settings, Runtime(checkpoints=CheckpointManager(checkpoints, asynchronous=False)))
    assert run_command(["checkpoint", "export", str(folder / "runs/run"), str(folder / "hf")]) == 0
    return folder


def weights_of(uri: Path) -> dict[str, torch.Tensor]:
    """Return the model in the newest checkpoint of a run."""
    _, checkpoints, name = locate(str(uri))
    manifest = read_manifest(checkpoints, name)
    settings, vocabulary_size = model_of(manifest, name)
    with torch.device("meta"):
        model = Decoder(settings, vocabulary_size)
    state = {name: torch.empty(parameter.shape) for name, parameter in model.named_parameters()}
    assert CheckpointManager(checkpoints).load_latest({"model": state}) is not None
    return state


def test_an_exported_run_computes_the_same_in_transformers(folder: Path):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf").eval()
    assert isinstance(theirs, transformers.Qwen3ForCausalLM)
    settings = config(folder)
    model = Decoder(settings.model, VOCABULARY)
    model.load_state_dict(weights_of(folder / "runs/run"))
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model(tokens, positions, torch.zeros_like(tokens)), rtol=0,
                                   atol=1e-4)


def test_the_tokenizer_is_exported_too(folder: Path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "hf")
    assert tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer("abc")["input_ids"] == [2, 3, 4]
    assert transformers.AutoConfig.from_pretrained(folder / "hf").eos_token_id == 0


def test_export_and_import_are_exact(folder: Path, capsys: pytest.CaptureFixture[str]):
    capsys.readouterr()
    assert run_command(["checkpoint", "import", str(folder / "hf"), str(folder / "back")]) == 0
    printed = capsys.readouterr().out
    assert "init_from" in printed
    assert "num_layers: 2" in printed
    before, after = weights_of(folder / "runs/run"), weights_of(folder / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (folder / "back/tokenizer.json").read_bytes() == (folder / "shards/tokenizer.json").read_bytes()
    assert export(str(folder / "back"), str(folder / "again")).tokenizer
    assert (folder / "again/model.safetensors").read_bytes() == (folder / "hf/model.safetensors").read_bytes()


def test_a_vocabulary_can_be_padded_and_never_cut(folder: Path):
    result = import_(str(folder / "hf"), str(folder / "wide"), vocabulary_size=VOCABULARY + 32)
    assert result.vocabulary_size == VOCABULARY + 32
    embedding = weights_of(folder / "wide")["embedding.weight"]
    assert torch.equal(embedding[:VOCABULARY], weights_of(folder / "runs/run")["embedding.weight"])
    with pytest.raises(ConfigError, match=f"100 rows are fewer than the model's {VOCABULARY}"):
        import_(str(folder / "hf"), str(folder / "narrow"), vocabulary_size=100)
    assert not (folder / "narrow").exists()


def test_training_starts_from_imported_weights(folder: Path):
    """With a learning rate near zero, the new run's validation loss is the last one of the imported run."""
    settings = config(folder, "next", "steps=1", "evaluation.sample_tokens=0", "optimizer.learning_rate=1.0e-12",
                      f"model.init_from={folder}/wide", f"model.vocabulary_size={VOCABULARY + 32}", "seed=5")
    import_(str(folder / "hf"), str(folder / "wide"), vocabulary_size=VOCABULARY + 32)
    checkpoints = storage.store(settings.run_uri).child("checkpoints")
    result = train(settings, Runtime(checkpoints=CheckpointManager(checkpoints, asynchronous=False)))
    before = storage.store(folder / "runs/run").read_json("result.json")["validation_loss"]
    assert before < result.validation_loss < before + 0.3, "the new tokens get a little of the probability"
    torch.testing.assert_close(weights_of(folder / "runs/next"), weights_of(folder / "wide"))

    with pytest.raises(CheckpointError, match=r"embedding.weight is float32 \[160, 32\] in the checkpoint, .*128, 32"):
        train(config(folder, "misfit", f"model.init_from={folder}/wide"), Runtime(
            checkpoints=CheckpointManager(storage.store(folder / "misfit"))))


def test_one_checkpoint_is_exported_in_half_precision(folder: Path):
    result = export(str(folder / "runs/run/checkpoints/step_00000003"), str(folder / "third"), dtype="bfloat16")
    assert result.tokenizer
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "third")
    assert model.dtype == torch.bfloat16


def test_of_bf16_parameters_the_fp32_masters_are_exported(folder: Path):
    settings = config(folder, "half", "steps=2", "evaluation.sample_tokens=0", "precision=bf16", "parameters=bf16")
    checkpoints = storage.store(settings.run_uri).child("checkpoints")
    train(settings, Runtime(checkpoints=CheckpointManager(checkpoints, asynchronous=False)))
    export(settings.run_uri, str(folder / "masters"))
    weights = dict(huggingface.read_weights(storage.store(folder / "masters"), settings.model, VOCABULARY))
    name = "blocks.0.ffn.w1.weight"
    saved = {"model": {name: torch.empty(64, 32, dtype=torch.bfloat16)}}
    CheckpointManager(checkpoints).load_latest(saved)
    assert torch.equal(weights[name].bfloat16(), saved["model"][name])
    assert not torch.equal(weights[name], saved["model"][name].float())


def test_runs_that_cannot_be_exported_are_refused(folder: Path, tmp_path: Path):
    with pytest.raises(CheckpointError, match="there is no complete checkpoint"):
        export(str(folder / "shards"), str(tmp_path / "out"))
    with pytest.raises(CheckpointError, match="no checkpoint 'step_00000099'"):
        export(str(folder / "runs/run/checkpoints/step_00000099"), str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="no such file"):
        export(str(folder / "runs/run"), str(tmp_path / "out"), tokenizer=str(tmp_path / "tokenizer.json"))
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_damaged_checkpoint_is_not_exported(folder: Path, tmp_path: Path):
    damaged = import_(str(folder / "hf"), str(tmp_path / "damaged"))
    (file,) = Path(damaged.uri, "checkpoints/step_00000000").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="hash differs"):
        export(damaged.uri, str(tmp_path / "out"))
