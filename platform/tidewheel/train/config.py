"""Configuration of a training run. Nothing here imports torch or ray."""

from __future__ import annotations

from typing import Any, Literal

import pydantic
from pydantic import Field

from tidewheel import storage
from tidewheel.config import Config, recipe_hash
from tidewheel.engines.serving.base import Decoding
from tidewheel.models import adapters, families
from tidewheel.models.family import KERNELS
from tidewheel.parts import Code, Part, name_of
from tidewheel.train import compressions, objectives, optimizers, schedules, stage_schedules
from tidewheel.train.average import Average
from tidewheel.train.batch_config import BatchConfig
from tidewheel.train.branching import Branch
from tidewheel.train.callbacks import DEFAULT as CALLBACKS
from tidewheel.train.callbacks import ChosenCallback
from tidewheel.train.checkpoint_config import CheckpointConfig
from tidewheel.train.data_config import DataConfig
from tidewheel.train.elastic_config import ElasticConfig
from tidewheel.train.evaluation_config import EvaluationConfig
from tidewheel.train.fp8_config import Fp8Config
from tidewheel.train.guards.config import REPORTING, GuardsConfig
from tidewheel.train.logs.config import LogsConfig
from tidewheel.train.memory.config import MemoryConfig
from tidewheel.train.metrics.config import MetricsConfig, ProfileConfig
from tidewheel.train.outer_config import UNDECISIVE as OUTER_UNDECISIVE
from tidewheel.train.outer_config import OuterConfig
from tidewheel.train.parallel.config import ParallelConfig
from tidewheel.train.policy.config import RolloutsConfig
from tidewheel.train.policy.objective import PolicyObjective


class RunConfig(Config):
    """Where the run writes. A start with the same id resumes it."""

    id: str = Field(default="train", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)
    """Name of the run, one folder."""
    uri: str = "runs"
    """Folder of runs, local or s3://; the run is below it under its id."""
    branch: str = ""
    """Begin with the whole state of another run, which is only read: RUN@STEP, with the URI of the run, or its id if it
    is in the same folder, and the step of one of its checkpoints. The data go on where the parent stood."""

    @pydantic.field_validator("branch")
    @classmethod
    def _parent(cls, value: str) -> str:
        if value:
            Branch.parse(value)
        return value


class TrainConfig(Config):
    """One training run."""

    run: RunConfig = RunConfig()
    """Where the run writes."""
    data: DataConfig = DataConfig()
    """The data to train on."""
    model: families.ChosenModel = families.KIND.build(families.DEFAULT)
    """The model: settings of the family whose name is in `kind`."""
    adapter: adapters.ChosenAdapter | None = None
    """Train an adapter alone, on a model whose own parameters are frozen: settings of the adapter whose name is in
    `kind`."""
    rollouts: RolloutsConfig | None = None
    """Reinforcement learning: the run samples its own data, and `data` needs no set."""
    objective: objectives.ChosenObjective = objectives.KIND.build(objectives.DEFAULT)
    """What to minimise: settings of the objective whose name is in `kind`. `loss` is its former name."""
    optimizer: optimizers.ChosenOptimizer = optimizers.KIND.build(optimizers.DEFAULT)
    """Settings of the optimizer whose name is in `kind`."""
    schedule: schedules.ChosenSchedule = schedules.KIND.build(schedules.DEFAULT)
    """Learning rate over time: settings of the schedule whose name is in `kind`."""
    batch: BatchConfig = BatchConfig()
    """The global batch of each step."""
    parallel: ParallelConfig = ParallelConfig()
    """How the model is distributed over the workers."""
    compression: compressions.ChosenCompression | None = None
    """Send less than whole gradients between workers: settings of the compression whose name is in `kind`, see
    docs/compression.md. It changes the result."""
    stage_schedule: stage_schedules.ChosenStageSchedule | None = None
    """Experimental: run the passes and updates of a pipeline's stages in another way than synchronous steps, such as
    PipeDream: settings of the stage schedule whose name is in `kind`, see docs/pipeline_parallel.md. It changes the
    result."""
    steps: int = Field(default=100, ge=1)
    """Optimizer steps of the whole run."""
    seed: int = Field(default=0, ge=0)
    """Seed of the initial weights and the text sample."""
    neftune_alpha: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Add noise to the embeddings of tokens while training, uniform within alpha / sqrt(L d) for documents of L tokens
    (NEFTune, https://arxiv.org/abs/2310.05914, which takes 5 to 15 for fine-tuning). 0: none."""
    precision: Literal["fp32", "bf16", "fp16", "fp8"] = "fp32"
    """Matrix products in this type; weights, moments, norms, loss and reductions stay fp32. fp16 scales the loss
    dynamically; fp8 (blocks' linear layers, the rest bf16) needs an NVIDIA GPU, Ada, Hopper or later."""
    fp8: Fp8Config = Fp8Config()
    """Scales and layers of precision fp8."""
    parameters: Literal["fp32", "bf16"] = "fp32"
    """Type of the model's weights in memory. With bf16 the optimizer has fp32 master weights, and gradients stay fp32:
    with AdamW 2 + 4 + 12 bytes a parameter instead of 4 + 4 + 8."""
    tf32: bool = True
    """Compute the fp32 matrix products of NVIDIA GPUs in TF32: 10 bits of mantissa instead of 23, and several times as
    fast. Reproducible mode never does."""
    reproducible: bool = False
    """Parameters and losses are bit for bit the same for every number of data-parallel workers and every history of
    losses and resizes: sums over workers have one order, see docs/reproducible.md. A few percent slower."""
    compile: bool = False
    """torch.compile each block."""
    run_ahead: bool | Literal["auto"] = "auto"
    """Start a step before the result of the last one is read back, so that a GPU never waits for the host. A step that
    a save, an evaluation or a request follows is waited for. auto: on NVIDIA GPUs, and with a `stage_schedule`.
    Precision fp16 never does it: its loss scale follows from the last step."""
    compile_cache: str = ""
    """Local folder for compiled code, for a quick next start on this machine; default: torch's own."""
    memory: MemoryConfig = MemoryConfig()
    """Activation checkpointing: what to keep for the backward pass."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Validation loss and text sample."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When to save."""
    guards: GuardsConfig = GuardsConfig()
    """Policies for bad steps and for ranks that hang."""
    metrics: MetricsConfig = MetricsConfig()
    """Where the figures of each step go."""
    profile: ProfileConfig = ProfileConfig()
    """Which steps to trace."""
    logs: LogsConfig = LogsConfig()
    """What workers log."""
    callbacks: tuple[ChosenCallback, ...] = CALLBACKS
    """Callbacks of the loop: their names, or their settings with the name in `kind`."""
    elastic: ElasticConfig = ElasticConfig()
    """Number of workers."""
    outer: OuterConfig | None = None
    """Train in several groups that meet over storage every so many steps (DiLoCo, local SGD); this run is one of
    them."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _former_names(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "loss" not in values:
            return values
        present = {name: value for name, value in values.items() if name != "loss"}
        before = present.get("objective") or {}
        if not isinstance(before, dict) or not isinstance(values["loss"] or {}, dict):
            raise ValueError("loss is the former name of objective: give one of them")
        return {**present, "objective": {**before, **(values["loss"] or {})}}

    @pydantic.field_validator("compile_cache")
    @classmethod
    def _local(cls, value: str) -> str:
        if "://" in value:
            raise ValueError("compiled code is unpickled when it is used, so it stays on local disk: give a folder")
        return value

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        if self.parallel.offload and self.optimizer.NOT_OFFLOADABLE:
            offloadable = optimizers.where(lambda optimizer: not optimizer.NOT_OFFLOADABLE)
            raise ValueError(f"parallel.offload keeps optimizer state in host memory, but optimizer.kind "
                             f"{name_of(type(self.optimizer))} {self.optimizer.NOT_OFFLOADABLE}; nearest legal "
                             f"choice: optimizer.kind {offloadable}")
        if self.memory.optimizer_disk and not self.parallel.offload:
            raise ValueError("memory.optimizer_disk keeps the state of an update on the host on disk, but "
                             "parallel.offload is false; nearest legal choice: parallel.offload true")
        if self.memory.optimizer_disk and self.checkpoint.memory_tier.every_steps != 0:
            raise ValueError("memory.optimizer_disk is for state that host memory has no room for, but the memory tier "
                             "keeps copies of it there; nearest legal choice: checkpoint.memory_tier.every_steps 0")
        if self.parameters == "bf16" and self.precision not in ("bf16", "fp8"):
            raise ValueError(f"parameters bf16 with precision {self.precision}: nearest legal choice: precision bf16")
        if self.evaluation.separate and self.checkpoint.keep_best:
            raise ValueError("checkpoint.keep_best needs the validation loss when a checkpoint is saved, but "
                             "evaluation.separate finds it later; nearest legal choice: evaluation.separate false")
        if self.evaluation.separate and any(isinstance(callback, Average) for callback in self.callbacks):
            raise ValueError("averages of the parameters are evaluated by the run's own workers, but "
                             "evaluation.separate leaves that to another process; nearest legal choice: "
                             "evaluation.separate false")
        if self.objective.VALUES and self.adapter is not None:
            raise ValueError(f"objective.kind {name_of(type(self.objective))} trains a value head on the whole model; "
                             "nearest legal choice: no adapter")
        if self.rollouts is not None and self.run.branch:
            raise ValueError("run.branch goes on in its parent's data, but rollouts are given, which a run samples "
                             "itself; start from the parent's weights alone: model.init_from")
        from tidewheel.train.parallel import legal
        from tidewheel.train.policy import legal as legal_rollouts

        if self.rollouts is not None and (problem := legal_rollouts.problem(self, self.rollouts)):
            raise ValueError(problem)

        if (reason := legal.reason_against(self)) is not None:
            raise ValueError(reason)
        if self.evaluation.answers.prompts and self.objective.HEAD:
            raise ValueError(f"evaluation.answers.prompts needs logits, but objective.kind "
                             f"{name_of(type(self.objective))} replaces them by a head; leave the prompts out")
        if self.metrics.loss_by_source and self.data.mixture is None:
            raise ValueError("metrics.loss_by_source reports the domains of data.mixture, and there is no mixture; "
                             "nearest legal choice: metrics.loss_by_source false")
        if self.metrics.loss_by_source and name_of(type(self.objective)) != objectives.DEFAULT:
            raise ValueError(f"metrics.loss_by_source adds up token losses, which objective.kind "
                             f"{name_of(type(self.objective))} does not have; nearest legal choice: "
                             "metrics.loss_by_source false")
        if self.model.attention == "varlen" and self.precision == "fp32":
            raise ValueError("model.attention varlen takes 16-bit precision, but precision is fp32; nearest legal "
                             "choice: flex")
        if self.model.fused_products and self.precision == "fp8":
            raise ValueError("model.fused_products with precision fp8, which scales each matrix by itself; nearest "
                             "legal choice: fused_products false")
        return self

    @property
    def base_is_reference(self) -> bool:
        """Whether the frozen base of an adapter is the reference model, and is computed beside the training."""
        return self.objective.needs_reference and self.adapter is not None and not self.data.reference

    def decoding(self) -> Decoding:
        """Return how rollouts are sampled, for an engine; the tokens that end an answer are not known yet."""
        rollouts = self.rollouts
        assert rollouts is not None
        precision = "bf16" if self.precision == "fp8" else self.precision
        return Decoding(rollouts.temperature, rollouts.top_k, rollouts.top_p, frozenset(), precision)

    @property
    def wave_groups(self) -> int:
        """Return the groups of a wave of rollouts."""
        assert self.rollouts is not None
        return self.batch.global_sequences // self.rollouts.group * self.rollouts.minibatches

    @property
    def start_is_reference(self) -> bool:
        """Whether rollouts have log-probabilities under the policy before the first step, the reference model."""
        in_loss = isinstance(self.objective, PolicyObjective) and self.objective.reference_weight > 0
        return self.rollouts is not None and (in_loss or self.rollouts.kl_weight > 0)

    def own_parts(self) -> dict[str, Code]:
        """Return where the source of each part outside this package is, by the field that holds the part."""
        parts = {name: getattr(self, name) for name in type(self).model_fields}
        if self.rollouts is not None:
            parts |= {"rollouts.reward": self.rollouts.reward, "rollouts.environment": self.rollouts.environment,
                      "rollouts.engine": self.rollouts.engine}
        codes = {name: Code.of(type(part)) for name, part in parts.items() if isinstance(part, Part)}
        return {name: code for name, code in codes.items() if code is not None}

    def code(self) -> list[Code]:
        """Return the locations of the source of all parts outside this package, also of parts that decide no result."""
        watching = [Code.of(type(part)) for part in (*self.metrics.trackers, *self.callbacks)]
        return [*self.own_parts().values(), *(code for code in watching if code is not None)]

    def versions(self) -> dict[str, int]:
        """Return {name: version} of the parts that decide the result and of what they use."""
        parts = [getattr(self, name) for name in type(self).model_fields]
        parts += [] if self.rollouts is None else [*self.rollouts.judging(), self.rollouts.engine]
        declared = [part.VERSION for part in parts if isinstance(part, Part) and part.VERSION is not None]
        return dict(sorted(item for version in declared for item in version.numbers().items()))

    def recipe_hash(self) -> str:
        """Return the hash of what decides the result: not where the run writes, nor the cluster and layout, nor how
        often it saves."""
        values = self.decisive()
        reduce_dtype = values.get("parallel", {}).get("reduce_dtype")
        if reduce_dtype is not None:  # the one setting of the layout that rounds
            values["reduce_dtype"] = reduce_dtype
        for group in ("run", "checkpoint", "elastic", "parallel", "compile", "compile_cache", "run_ahead", "memory",
                      "metrics", "profile", "logs", "callbacks"):
            values.pop(group, None)
        for group, names in (("model", KERNELS), ("objective", self.objective.UNDECISIVE),
                             ("evaluation", ("separate", "gpus", "answers", "tasks")), ("guards", REPORTING)):
            kept = {name: value for name, value in values.pop(group, {}).items() if name not in names}
            if kept:
                values["loss" if group == "objective" else group] = kept  # its former name: recipes keep their hash
        for name in ("generators", "prompts", "tokenizer", "replay"):  # the set of rollouts has the content's hashes
            values.get("rollouts", {}).pop(name, None)
        if self.run.branch:
            values["branch"] = self.run.branch
        if self.stage_schedule is not None:
            values["pipeline"] = self.parallel.pipeline
        for name in OUTER_UNDECISIVE:
            values.get("outer", {}).pop(name, None)
        for name in self.rollouts.engine.UNDECISIVE if self.rollouts is not None else ():
            values["rollouts"].get("engine", {}).pop(name, None)
        values["data"] = {"seed": self.data.seed}  # the shard sets' own hashes stand beside this one in run.json
        if self.data.mixture is not None:
            mixture = self.data.mixture.decisive()
            for domain in mixture["domains"].values():
                domain.pop("shards", None)
            values["data"]["mixture"] = mixture
        raised = {part: version for part, version in self.versions().items() if version > 1}
        if raised:  # absent while all are 1: recipes from before there were versions keep their hash
            values["versions"] = raised
        return recipe_hash(values)

    @property
    def run_uri(self) -> str:
        """The run's own folder: run.uri/run.id."""
        return storage.join(self.run.uri, self.run.id)
