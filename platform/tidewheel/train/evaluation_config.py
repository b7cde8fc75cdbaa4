"""Settings of what a run evaluates while it trains."""

from __future__ import annotations

import pydantic
from pydantic import Field

from tidewheel.config import Config
from tidewheel.train.tasks_config import TasksConfig


class AnswersConfig(Config):
    """Prompts that the model answers while it trains, always with the most likely token."""

    prompts: str = ""
    """File of JSON lines, each {"messages": [...]} for the assistant's next turn or {"prompt": "..."} to be continued.
    The model answers them before the first step and at each evaluation, and the report compares the answers. Empty:
    none."""
    new_tokens: int = Field(default=64, ge=1, le=4096)
    """Largest number of tokens of an answer."""


class EvaluationConfig(Config):
    """Validation loss and the text sample."""

    every_steps: int = Field(default=0, ge=0)
    """Compute the validation loss at multiples of this many steps and at the end; 0: at the end only."""
    sequences: int = Field(default=0, ge=0)
    """Number of validation sequences to use, from the first; 0: all."""
    separate: bool = False
    """On a cluster, evaluate committed checkpoints in a process of its own on the driver's node, so that training never
    waits. It evaluates the newest checkpoint once `every_steps` have passed."""
    gpus: float = Field(default=0.0, ge=0)
    """GPUs of the separate process, beside the workers'; 0: use the CPU."""
    answers: AnswersConfig = AnswersConfig()
    """Prompts to answer at each evaluation, side by side over time."""
    prompt: str = "def "
    """Beginning of the text sample."""
    sample_tokens: int = Field(default=60, ge=0, le=4096)
    """Length of the text sample; 0: none."""
    sample_every_steps: int = Field(default=0, ge=0)
    """Write a text sample at multiples of this many steps and at the end; 0: at the end only."""
    temperature: float = Field(default=0.8, ge=0)
    """Sampling temperature; 0: take the most likely token."""
    top_k: int = Field(default=50, ge=0)
    """Sample from the `top_k` most likely tokens; 0: from all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the smallest set of most likely tokens whose probabilities add up to this."""
    tasks: TasksConfig = TasksConfig()
    """Evaluation tasks: multiple choice, likelihoods and generated answers, from task files."""

    @pydantic.model_validator(mode="after")
    def _possible(self) -> EvaluationConfig:
        if self.separate and not self.every_steps:
            raise ValueError("separate is true, but every_steps is 0: nothing is evaluated before the end; set "
                             "every_steps, or leave separate out")
        if self.separate and self.answers.prompts:
            raise ValueError("answers.prompts are answered by the run's own workers at each evaluation, but separate "
                             "is true, so that training never waits; nearest legal choice: separate false")
        if self.gpus and not self.separate:
            raise ValueError("gpus is for the separate process; nearest legal choice: separate true")
        return self
