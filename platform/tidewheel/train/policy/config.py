"""Configuration of rollouts, with which a run makes its own training data. Nothing here imports torch or ray."""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic
from pydantic import Field

from tidewheel import environments, rewards, storage
from tidewheel.config import Config
from tidewheel.engines import DEFAULT as ENGINE
from tidewheel.engines import ChosenEngine, Native
from tidewheel.environments.episode.base import Environment
from tidewheel.parts import Chosen
from tidewheel.placement import PlacementConfig
from tidewheel.rewards.scoring.base import Reward
from tidewheel.shards.manifest import ROLLOUTS

ChosenReward = Annotated[Reward, Chosen(rewards.KIND)]
ChosenEnvironment = Annotated[Environment, Chosen(environments.KIND)]


class GeneratorsConfig(Config):
    """Processes that sample and judge rollouts."""

    processes: int = Field(default=1, ge=1, le=4096)
    """Number of processes; fewer run while the cluster has less room."""
    min_processes: int = Field(default=0, ge=0, le=4096)
    """If above 0, a cluster has this many to `processes`: fewer while rollouts are `look_ahead` steps ahead of
    training, more while training waits for them."""
    cpus: float = Field(default=1.0, gt=0)
    """CPUs reserved for, and threads used by, each."""
    gpus: float = Field(default=0.0, ge=0)
    """GPUs reserved for each; 0: sample on the CPU."""
    lease_seconds: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """A process that has not returned a group after this time is ended, and the group is sampled again elsewhere."""
    stall_seconds: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """On a cluster, end a process before its lease is over if it does not answer for this long, or if one pass of its
    model takes this long. Longer than the pass over the longest prompt."""
    most_tries: int = Field(default=3, ge=1)
    """A group that has ended this many processes, or used up their leases, is dropped."""
    placement: PlacementConfig = PlacementConfig()
    """Nodes that they run on, spot nodes for example."""
    colocated: bool = False
    """Sample in the process that trains, with its own weights, in turns: for training without Ray. Memory of sampling
    is given back before each step."""

    @pydantic.model_validator(mode="after")
    def _bounds(self) -> GeneratorsConfig:
        if self.min_processes > self.processes:
            raise ValueError(f"min_processes {self.min_processes} is above processes {self.processes}; nearest legal "
                             f"choice: {self.processes}")
        if self.colocated and (self.processes > 1 or self.gpus):
            raise ValueError("colocated samples in the process that trains, so it has no other processes and no GPUs; "
                             "leave out processes, min_processes and gpus")
        return self


class OverlongConfig(Config):
    """DAPO's penalty for answers near the limit (https://arxiv.org/abs/2503.14476, equation 13)."""

    buffer_tokens: int = Field(default=0, ge=0)
    """From this many tokens below `answer_tokens` on, each token of an answer costs `penalty` / `buffer_tokens`."""
    penalty: float = Field(default=1.0, gt=0)
    """Of an answer of `answer_tokens` tokens."""


class RolloutsConfig(Config):
    """Prompts, sampling, rewards and schedule of reinforcement learning.

    With schedule in_order, the rollouts of step n come from the policy after step n - 1 - `look_ahead`, and the prompts
    of a step follow from their order and the rewards alone. So the data of a run are the same for any number of
    processes and any failures. With `epochs` or `minibatches` that is true of waves of `wave_steps` steps.
    """

    prompts: str
    """JSONL file of prompts: {"prompt": text, "reference": text for the reward, "id": unique name}; the last two may be
    left out."""
    tokenizer: str = ""
    """File of the tokenizer; default: that of the run or imported model in `model.init_from`."""
    special_tokens: bool = False
    """Encode special tokens that prompts spell out ("<|im_start|>") as such."""
    reward: ChosenReward | None = None
    """Judges answers: settings of the reward whose name is in `kind`. With an environment it judges the last turn, is
    added to the environment's rewards, and may be left out."""
    engine: ChosenEngine = ENGINE
    """What samples: settings of the engine whose name is in `kind`. native: the model as training computes it. vllm:
    vLLM, in an environment of its own."""
    environment: ChosenEnvironment | None = None
    """The other side of answers of several turns: settings of the environment whose name is in `kind`."""
    reward_seconds: int = Field(default=10, ge=1)
    """Processor time to judge one answer; an answer that needs more has no reward."""
    group: int = Field(default=8, ge=1, le=1024)
    """Answers to each prompt."""
    sequence_length: int = Field(default=0, ge=0)
    """Most tokens of a prompt with an answer; 0: `model.max_sequence_length`."""
    answer_tokens: int = Field(default=256, ge=1)
    """Most tokens of an answer, with those of an environment."""
    temperature: float = Field(default=1.0, gt=0)
    """Divides the logits."""
    top_k: int = Field(default=0, ge=0)
    """Sample from this many most likely tokens; 0: from all. Log-probabilities stay those of all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the fewest tokens whose probabilities add up to this."""
    advantage: Literal["group", "group_mean", "leave_one_out", "batch", "reward", "gae"] = "group"
    """From rewards to advantages. group: minus the group's mean, divided by its deviation (GRPO). group_mean: minus the
    mean (Dr. GRPO). leave_one_out: minus the mean of the others (RLOO). batch: of each token the return from it on,
    minus the mean over the step's tokens, divided by their deviation (REINFORCE++). reward: the reward itself. gae: of
    each token the generalised advantage estimate, normalised as in batch (PPO)."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Of advantage batch and gae: discount of a reward for each token before it."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Of advantage gae (https://arxiv.org/abs/1506.02438): 1 sums the rewards alone, 0 trusts the next token's
    value."""
    kl_weight: float = Field(default=0.0, ge=0)
    """Subtract this times log(p / p of the policy before the first step) from the rewards: with advantage batch and gae
    from that of each token, otherwise their sum from the answer's. `objective.reference_weight` has it in the loss."""
    overlong: OverlongConfig = OverlongConfig()
    """Penalty for long answers. `resample` and the figures of a step take rewards without it and without the KL."""
    resample: bool = False
    """Drop groups whose rewards are all equal, and go on to the next prompts until the step is full (DAPO's dynamic
    sampling)."""
    most_resampled: int = Field(default=8, ge=1)
    """End the run when a step would need more than this many times its groups."""
    most_failed_fraction: float = Field(default=0.05, ge=0, le=1)
    """End the run when more than this fraction of a step's groups fails, and at least two: a failure is never a
    reward, the group is dropped."""
    schedule: Literal["in_order", "recorded"] = "in_order"
    """in_order: a step has the next prompts in order, all sampled by one policy, so data do not depend on speed.
    recorded: groups are admitted in the order in which they are done, sampled by the newest policy of their time; the
    choice is written down, and `replay` repeats it."""
    look_ahead: int = Field(default=0, ge=0, le=1024)
    """Waves that the sampling policy is behind, at most with schedule recorded; a wave is a step unless it has `epochs`
    or `minibatches`. With 0 sampling and training take turns, with 1 they overlap."""
    weights: Literal["trained", "bf16"] = "trained"
    """Matrices that generators get. trained: as the trainer has them, so that both compute the same. bf16: rounded, for
    half of the bytes and much smaller deltas; the gap between trainer and generator is then not 0."""
    replay: str = ""
    """URI of a run: train on its rollouts, in the order of its ledger, without any generator."""
    epochs: int = Field(default=1, ge=1, le=64)
    """Passes over the rollouts that a version of the policy sampled, a wave, before the next wave. From the second
    optimizer step of a wave on the policy is not the one that sampled, so clipping has an effect."""
    minibatches: int = Field(default=1, ge=1, le=1024)
    """Optimizer steps of a pass: a wave has the groups of this many global batches, and each pass shuffles them."""
    seed: int = Field(default=0, ge=0)
    """Of the order of the prompts and of the draws."""
    generators: GeneratorsConfig = GeneratorsConfig()
    """Processes that sample and judge."""

    @pydantic.model_validator(mode="after")
    def _possible(self) -> RolloutsConfig:
        if self.group < 2 and self.advantage in ("group", "group_mean", "leave_one_out"):
            raise ValueError(f"advantage {self.advantage} compares the answers of a group, but group is {self.group}; "
                             "nearest legal choice: group 2")
        if self.resample and self.group < 2:
            raise ValueError("resample drops groups whose rewards are equal, but a group is one answer; nearest legal "
                             "choice: resample false")
        if self.gae_lambda != 0.95 and self.advantage != "gae":
            raise ValueError(f"gae_lambda has no effect on advantage {self.advantage}; leave it out")
        if self.gamma != 1 and not self.by_token:
            raise ValueError(f"gamma has no effect on advantage {self.advantage}, which all tokens of an answer share; "
                             "leave it out")
        if self.overlong.buffer_tokens > self.answer_tokens:
            raise ValueError(f"overlong.buffer_tokens {self.overlong.buffer_tokens} is more than answer_tokens "
                             f"{self.answer_tokens}; nearest legal choice: {self.answer_tokens // 4}")
        if self.generators.colocated and (self.look_ahead or self.schedule != "in_order"):
            raise ValueError("generators.colocated takes turns with training, so schedule is in_order and look_ahead "
                             "is 0")
        if self.generators.colocated and not isinstance(self.engine, Native):
            raise ValueError("generators.colocated samples with the weights that train, so engine.kind is native")
        if self.reward is None and self.environment is None:
            raise ValueError("reward: what judges the answers? Name a reward, or an environment that gives rewards")
        return self

    @property
    def by_token(self) -> bool:
        """Whether tokens have advantages of their own."""
        return self.advantage in ("batch", "gae")

    def judging(self) -> tuple[Reward | Environment, ...]:
        """Return the parts that rewards follow from."""
        return tuple(part for part in (self.reward, self.environment) if part is not None)

    def judge_keys(self) -> tuple[str, str]:
        """Return the keys of the reward and the environment, "" for one that is not there."""
        return (self.reward.key() if self.reward is not None else "",
                self.environment.key() if self.environment is not None else "")

    @property
    def wave_steps(self) -> int:
        """Return the optimizer steps that train on a wave."""
        return self.epochs * self.minibatches

    def wave_of(self, step: int) -> int:
        """Return the wave that a step trains on; both count from 1."""
        return -(-step // self.wave_steps)

    def first_step(self, wave: int) -> int:
        """Return the first step that trains on a wave."""
        return (wave - 1) * self.wave_steps + 1

    def version_for(self, step: int) -> int:
        """Return the step after which the oldest policy samples that may sample for `step`; 0: before the first."""
        return max(0, self.wave_of(step) - 1 - self.look_ahead) * self.wave_steps

    def is_sampled_with(self, version: int, steps: int) -> bool:
        """Return whether a run of `steps` steps samples with the policy after step `version`."""
        if self.replay or version % self.wave_steps:
            return False
        lag = self.look_ahead if self.schedule == "in_order" and version else 0
        return version + (1 + lag) * self.wave_steps <= steps

    def folder(self, run_uri: str) -> str:
        """Return the URI of the shard set that a run trains on."""
        return storage.join(self.replay or run_uri, ROLLOUTS)
