"""`Engine`, the base of all engines: a part that continues token sequences with a version of the policy.

    class Mine(tw.Engine):
        def open(self, use):
            return MyRunningEngine(use.model, use.vocabulary_size)

An open engine loads versions of the weights, and completes sequences of tokens: token ids go in, token ids and their
log-probabilities come out. Prompts, rewards, turns of an environment and the ledger are not its concern.
The built-in engines are the modules of `tidewheel.engines`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tidewheel.config import recipe_hash
from tidewheel.models.family import Model
from tidewheel.parts import Part
from tidewheel.versions import Version

if TYPE_CHECKING:
    import torch

OWN = Version("own_engines")
"""Version of how engines from outside the package are used. Keys also contain the engine's source."""


class EngineLost(Exception):
    """The engine's process has ended or hangs. Its work is done again after another `load`.

    Args:
        reason: what is known of its end.
    """


@dataclass(frozen=True)
class Decoding:
    """How tokens are drawn, the same for a whole run.

    Args:
        temperature: divides the logits.
        top_k: draw from this many most likely tokens; 0: from all.
        top_p: draw from the fewest tokens whose probabilities sum to at least this.
        stop: tokens that end a completion, which then has the token as its last.
        precision: fp32 or bf16, of the matrix products.
    """

    temperature: float
    top_k: int
    top_p: float
    stop: frozenset[int]
    precision: str


@dataclass(frozen=True)
class EngineUse:
    """What an engine is opened for.

    Args:
        model: the run's model.
        vocabulary_size: rows of its embedding.
        decoding: how tokens are drawn.
        device: cpu or cuda.
        cpus: threads that the engine may use.
        gpus: number of GPUs that it may use.
    """

    model: Model
    vocabulary_size: int
    decoding: Decoding
    device: str
    cpus: float
    gpus: float


@dataclass(frozen=True)
class Weights:
    """A version of the policy. The hash of the file that it came from was checked.

    Args:
        digest: of the version.
        tensors: of the whole model by the names of `models.Decoder`, in host memory. `models.huggingface.write` writes
            them with the names of Hugging Face.
    """

    digest: str
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Prefix:
    """A sequence to complete.

    Args:
        tokens: ids, at least one.
        most: most tokens of the completion, at least 1.
        seed: below 2^63, for the draws. An engine that draws with it, and depends on nothing else, mostly repeats a
            completion that was lost.
    """

    tokens: Sequence[int]
    most: int
    seed: int


@dataclass(frozen=True)
class Completion:
    """How a sequence goes on.

    Args:
        tokens: ids: `most` of them, or fewer with one of `stop` as the last.
        log_probabilities: of each token, in nats: under the logits divided by the temperature, over the whole
            vocabulary, whatever `top_k` and `top_p` are.
    """

    tokens: Sequence[int]
    log_probabilities: Sequence[float]


class RunningEngine:
    """Base of an open engine, which one thread uses."""

    def about(self) -> str:
        """Return what samples, with its version, for the log of the run."""
        return type(self).__name__

    def load(self, weights: Weights) -> None:
        """Serve a version of the weights from now on; start again what `EngineLost` told of.

        Raises:
            EngineLost: the process has ended or hangs.
            ConfigError: the engine cannot serve this model, or is not installed.
        """
        raise NotImplementedError

    def complete(self, prefixes: Sequence[Prefix]) -> Sequence[Completion]:
        """Return a completion of each sequence, sampled with the weights loaded last.

        Raises:
            EngineLost: the process has ended or hangs.
        """
        raise NotImplementedError

    def health(self) -> None:
        """Return if the engine can take work.

        Raises:
            EngineLost: it cannot.
        """

    def close(self) -> None:
        """End what was started."""


class Engine(Part):
    """Base of an engine: its fields are its settings."""

    REPEATS: ClassVar[bool] = False
    """Whether a completion follows from weights, tokens and seed alone, bit for bit, on any machine and in any batch.
    If not, rollouts are stored by their hash before a step may have them, and a lost one that is made again is another
    one, which the ledger says."""
    UNDECISIVE: ClassVar[tuple[str, ...]] = ()
    """Settings that do not belong to the recipe of a run, such as paths."""

    def problem(self, model: Model, decoding: Decoding, gpus: float) -> str:
        """Return why the engine cannot serve a run with these settings, "" if it can. It starts and imports nothing.

        Args:
            model: the run's model.
            decoding: how tokens are drawn; `stop` is not known yet.
            gpus: number of GPUs of each generator.
        """
        return ""

    def open(self, use: EngineUse) -> RunningEngine | None:
        """Return the engine, ready for `load`; None to sample with the generator's own decoder."""
        raise NotImplementedError

    def key(self) -> str:
        """Return the hash of the name, version, settings and own source."""
        version = self.VERSION or OWN
        values: dict[str, Any] = {name: value for name, value in self.decisive().items() if name not in self.UNDECISIVE}
        return recipe_hash({"engine": values, "versions": version.numbers()})
