"""A tiny model with a byte-level tokenizer, as a Hugging Face folder and as a checkpoint, and tasks for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.oracles import Oracle
from tidewheel.checkpoint.conversion import import_
from tidewheel.inference.folder import read_model
from tidewheel.models import adapters
from tidewheel.models.adapting import attach, peft_files
from tidewheel.storage import store

WORDS = ("the harbour is blue", "a lantern is yellow", "the meadow is green", "one window is white",
         "old copper is red", "a winter sky is grey")
VOCABULARY = 320
WIDTHS = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96, "rms_norm_eps": 1e-5,
          "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
TEMPLATE = ("{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content }}"
            "{{- '<|im_end|>\n' }}{%- endfor %}"
            "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}")


def write_tokenizer(folder: Path, length: int) -> None:
    """Write a byte-level tokenizer with merges of `WORDS` and the special tokens of `TEMPLATE`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(WORDS * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False, "model_max_length": length,
        "chat_template": TEMPLATE}))


def write_model(folder: Path, **widths: Any) -> Path:
    """Write a llama of transformers with random weights, and return its folder."""
    folder.mkdir(parents=True)
    shape = {**WIDTHS, **widths}
    Oracle("llama", "LlamaConfig", "LlamaForCausalLM", widths=shape).build(seed=3).save_pretrained(folder)
    write_tokenizer(folder, shape["max_position_embeddings"])
    return folder


def write_run(folder: Path, model: Path) -> str:
    """Write the same model as a checkpoint, and return the run's URI."""
    return import_(str(model), str(folder)).uri


def write_adapter(folder: Path, model: Path) -> str:
    """Write a LoRA of a model with random values, as peft does, and return its folder."""
    decoder = read_model(store(model))
    adapter = adapters.KIND.build("lora", {"rank": 2, "alpha": 8, "targets": ["wq", "ffn"]})
    attach.attach(decoder, adapter)
    generator = torch.Generator().manual_seed(1)
    values = {name: 0.2 * torch.randn(parameter.shape, generator=generator)
              for name, parameter in decoder.named_parameters() if parameter.requires_grad}
    peft_files.write(store(folder), decoder.config, adapter, values)
    return str(folder)


ITEMS = [{"question": f"What colour is {number}?", "options": ["blue", "yellow and green", "red ", "grëy"],
          "label": number % 4, "answer": ("blue", "yellow", "red", "grëy")[number % 4],
          "text": f"{WORDS[number % 6]} and {WORDS[(number + 1) % 6]}, {number}. " * (1 + number % 5)}
         for number in range(11)]


def write_task(folder: Path, name: str, settings: dict[str, Any], items: list[dict[str, Any]] | None = None) -> str:
    """Write a task file with its data beside it, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(item) + "\n" for item in (ITEMS if items is None else items)))
    values = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}},
              "test_split": "test", "metadata": {"version": 1.0}, **settings}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    return str(file)


CHOICES = {"output_type": "multiple_choice", "doc_to_text": "Q: {{question}}\nA:", "doc_to_choice": "options",
           "doc_to_target": "label", "num_fewshot": 2, "fewshot_split": "test", "description": "Colours.\n\n",
           "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True}
                           for name in ("acc", "acc_norm", "acc_bytes", "exact_match")]}
LETTERS = {"output_type": "multiple_choice", "doc_to_choice": ["A", "B", "C", "D"], "doc_to_target": "{{label}}",
           "doc_to_text": "{{question}}\n{% for option in options %}{{'ABCD'[loop.index0]}}. {{option}}\n{% endfor %}"
                          "Answer:", "num_fewshot": 1, "fewshot_config": {"sampler": "first_n", "samples": ITEMS[:3]}}
INPUTS = {"output_type": "multiple_choice", "doc_to_choice": "{{[question, text[:20]]}}",
          "doc_to_text": "{{label % 2}}", "doc_to_target": "{{answer}}", "num_fewshot": 0}
LAST = {"output_type": "loglikelihood", "doc_to_text": "{{text[:9]}}", "doc_to_target": "{{text[9:30]}}"}
ROLLING = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "text"}
WRITTEN = {"output_type": "generate_until", "doc_to_text": "{{text[:25]}}", "doc_to_target": "answer",
           "generation_kwargs": {"until": ["\n", " is"], "max_gen_toks": 12, "do_sample": False},
           "filter_list": [{"name": "first", "filter": [{"function": "regex", "regex_pattern": r"(\w+)"},
                                                        {"function": "take_first"}]},
                           {"name": "last", "filter": [{"function": "regex", "regex_pattern": r"(\w)(\w+)?",
                                                        "group_select": -1}, {"function": "take_first"}]}],
           "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True,
                            "ignore_case": True, "ignore_punctuation": True}]}
TASKS = {"choices": CHOICES, "letters": LETTERS, "inputs": INPUTS, "last": LAST, "rolling": ROLLING,
         "written": WRITTEN}
