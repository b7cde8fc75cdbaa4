"""Recipes of published models: they load, have as many parameters as published, and fit the published GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.benchmarks.recipes import small_table, table
from tidewheel.config import load
from tidewheel.plan.hardware import ClusterConfig
from tidewheel.plan.layout import Job
from tidewheel.plan.layouts import own
from tidewheel.train.batch_size import BatchSizes
from tidewheel.train.config import TrainConfig

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "jobs/configs/recipes"


class Published(NamedTuple):
    """What is published about a model, and the GPUs of the recipe's layout, which the recipe says to be published or
    ours."""

    parameters: float
    tokens: float
    gpus: int
    gpu: str


PUBLISHED = {
    "gpt3_125m": Published(125e6, 300e9, 8, "a100"), "gpt3_350m": Published(356e6, 300e9, 16, "a100"),
    "gpt3_760m": Published(760e6, 300e9, 16, "a100"), "gpt3_1.3b": Published(1.32e9, 300e9, 32, "a100"),
    "gpt3_2.7b": Published(2.65e9, 300e9, 32, "a100"), "gpt3_6.7b": Published(6.66e9, 300e9, 64, "a100"),
    "gpt3_13b": Published(12.85e9, 300e9, 128, "a100"), "gpt3_175b": Published(174.6e9, 300e9, 1024, "a100"),
    "nanogpt_124m": Published(124.44e6, 295e9, 8, "a100"),
    "llama2_7b": Published(6_738_415_616, 2.0e12, 256, "a100"),
    "llama2_70b": Published(68_976_648_192, 2.0e12, 2048, "a100"),
    "chinchilla_70b": Published(70e9, 1.4e12, 512, "a100"),
    "mistral_7b": Published(7_241_732_096, 2.0e12, 256, "h100"),
    "llama3_8b": Published(8_030_261_248, 15e12, 512, "h100"),
    "llama3_70b": Published(70_553_706_496, 15e12, 1024, "h100"),
    "llama3_405b": Published(405_853_388_800, 15.6e12, 16_384, "h100"),
    "olmo2_7b": Published(7_298_637_824, 3.9e12, 256, "h100"),
    "deepseek_v3": Published(671_026_419_200, 14.8e12, 2048, "h800"),
    "qwen3_30b_a3b": Published(30_532_122_624, 30e12, 256, "h100"),
    "finetune_7b_4x80gb": Published(6_738_415_616, 2 * 27_540 * 4096, 4, "a100"),
    "pretrain_70b_64xh100": Published(68_976_648_192, 2.0e12, 64, "h100"),
    "pretrain_10b_2x24gb": Published(10.4e9, 10e9, 2, "rtx4090"),
}
"""Parameters of GPT-3: arXiv:2005.14165, table D.1; of the others: the weights at Hugging Face, without DeepSeek-V3's
multi-token prediction; of Chinchilla: its name."""


def job_of(name: str) -> Job:
    config = load(TrainConfig, str(FOLDER / f"{name}.yaml"))
    assert config.model.vocabulary_size is not None
    return Job(config, config.model.vocabulary_size, config.model.max_sequence_length)


def test_every_recipe_is_compared():
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_tokens_are_the_published_ones(name: str):
    job, published = job_of(name), PUBLISHED[name]
    assert job.parameters == pytest.approx(published.parameters, rel=0.005)
    sizes = BatchSizes.of(job.config.batch, job.sequence_length)
    assert sizes.total(job.config.steps) * job.sequence_length == pytest.approx(published.tokens, rel=0.005)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_layout_is_legal_and_fits_the_gpus(name: str):
    job, published = job_of(name), PUBLISHED[name]
    elastic = job.config.elastic
    assert elastic.min_workers == elastic.max_workers == published.gpus
    nodes_of = min(8, published.gpus)
    planned, reason = own(job, ClusterConfig(gpus=published.gpus, gpu=published.gpu, nodes_of=nodes_of))  # type: ignore[arg-type]
    assert planned is not None, reason
    assert not reason
    command = f"tidewheel plan jobs/configs/recipes/{name}.yaml --gpus {published.gpus} --gpu {published.gpu}"
    assert command in (FOLDER / f"{name}.yaml").read_text()


def test_the_page_has_the_tables_of_the_files():
    """`python -m tests.benchmarks.recipes` prints them."""
    page = (ROOT / "docs/recipes.md").read_text()
    assert table() in page
    assert small_table() in page


def test_settings_have_sources():
    """Each setting of the optimizer, the batch and the length, and the number of layers, has a comment on its line."""
    settings = ("learning_rate:", "betas:", "weight_decay:", "clip_norm:", "global_sequences:", "steps:", "num_layers:")
    for path in FOLDER.glob("*.yaml"):
        for line in path.read_text().splitlines():
            if line.strip().startswith(settings) and "{" not in line:
                assert "#" in line, f"{path.name}: {line}"
