"""A run on conversations keeps its chat template and the end of its turns through an export and an import."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from tests.unit.train.chat_run import TEMPLATE, chat_config, chats, write_chats
from tidewheel.checkpoint.conversion import export
from tidewheel.cli import run_command
from tidewheel.elastic.trainer import fit_local
from tidewheel.errors import ConfigError
from tidewheel.shards.reader import ShardSet

ASKED = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "ask 3"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run on conversations, and its export in hf/."""
    folder = tmp_path_factory.mktemp("chat")
    write_chats(folder, chats(20))
    fit_local(chat_config(folder, "run"))
    assert run_command(["checkpoint", "export", str(folder / "runs/run"), str(folder / "hf")]) == 0
    return folder


def check(exported: Path) -> None:
    """Check an export as transformers reads it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    text = tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    assert text == ("<|bos|><|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nask 3<|im_end|>\n"
                    "<|im_start|>assistant\n")
    ids = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False)
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 3
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|im_end|>", "<|bos|>")
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|endoftext|>")]
    assert transformers.AutoConfig.from_pretrained(exported).eos_token_id == ends
    assert transformers.GenerationConfig.from_pretrained(exported).eos_token_id == ends
    model = transformers.AutoModelForCausalLM.from_pretrained(exported)
    assert model.generation_config.eos_token_id == ends


def test_an_export_has_the_chat_template_and_ends_at_the_end_of_a_turn(folder: Path):
    assert json.loads(ShardSet.open(str(folder / "out/shards")).manifest.chat_template)["template"] == TEMPLATE
    check(folder / "hf")


def test_the_template_survives_an_import(folder: Path):
    assert run_command(["checkpoint", "import", str(folder / "hf"), str(folder / "back")]) == 0
    assert run_command(["checkpoint", "export", str(folder / "back"), str(folder / "again")]) == 0
    check(folder / "again")


def test_another_template_can_be_given(folder: Path):
    (folder / "own.jinja").write_text("{% for m in messages %}{{ m.content + '<|pad|>' }}{% endfor %}")
    export(str(folder / "runs/run"), str(folder / "own"), chat_template=str(folder / "own.jinja"))
    assert transformers.AutoTokenizer.from_pretrained(folder / "own").eos_token == "<|pad|>"
    with pytest.raises(ConfigError, match="no such file"):
        export(str(folder / "runs/run"), str(folder / "none"), chat_template=str(folder / "none.jinja"))
