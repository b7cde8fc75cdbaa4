"""Measure how fast groups of answers are sampled, and how far their log-probabilities are from those of training.

    python -m tests.benchmarks.rollouts [--groups 1 8 16] [--tokens 64] [--rounds 3] [--vllm PYTHON]

The same random Llama samples with `model.attention` exact and masked, with transformers' `generate`, and with vLLM if
there is an environment for it (cluster/vllm_environment.sh; TIDEWHEEL_VLLM_PYTHON names its Python, too), on one
thread. Speeds are tokens per processor second, the best of some rounds. `gap` is the largest difference between the
log-probability of a sampled token and that of a forward pass over whole sequences, as training computes it. The exit
code is 1 if it is not 0 with exact attention, or if an answer depends on its group.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tidewheel import engines
from tidewheel.console import print_table
from tidewheel.engines.serving.base import Decoding, EngineLost, EngineUse, Prefix, Weights
from tidewheel.engines.serving.process import ProcessRunning
from tidewheel.inference.group import Answer, Sampling, sample_group
from tidewheel.models import huggingface
from tidewheel.models.decoder import Decoder
from tidewheel.storage import store
from tidewheel.train.precision import Precision, precision_context

SHAPE = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.05,
         "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
PROMPT = list(range(100, 132))
TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")
"""Resolution of another process's processor time."""
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")


def models(folder: Path) -> tuple[Any, Decoder]:
    """Return a random Llama of transformers, written to a folder, and the same as a decoder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    theirs = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    theirs.save_pretrained(folder)
    source = store(folder)
    config, vocabulary_size = huggingface.read_config(source)
    ours = Decoder(config, vocabulary_size).requires_grad_(False)
    ours.load_state_dict(dict(huggingface.read_weights(source, config, vocabulary_size)))
    return theirs, ours


def with_attention(model: Decoder, attention: str) -> Decoder:
    """Return the decoder with another kernel, and the same weights."""
    other = Decoder(model.config.model_copy(update={"attention": attention}), model.vocabulary_size)
    other.load_state_dict(model.state_dict(), assign=True)
    return other.requires_grad_(False)


@torch.no_grad()
def gap(model: Decoder, answers: list[Answer], precision: Precision) -> float:
    """Return the largest difference of a log-probability to one forward pass over all answers with their prompt."""
    longest = max(len(answer.tokens) for answer in answers)
    tokens = torch.zeros(len(answers), len(PROMPT) + longest, dtype=torch.int64)
    segments = torch.full_like(tokens, -1)
    for row, answer in enumerate(answers):
        whole = PROMPT + answer.tokens
        tokens[row, :len(whole)] = torch.tensor(whole)
        segments[row, :len(whole)] = 0
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with precision_context(torch.device("cpu"), precision):
        every = model(tokens, positions, segments).float().log_softmax(-1)
    worst = 0.0
    for row, answer in enumerate(answers):
        rows = every[row, len(PROMPT) - 1:len(PROMPT) - 1 + len(answer.tokens)]
        found = rows.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        worst = max(worst, float((found - torch.tensor(answer.log_probabilities)).abs().max()))
    return worst


def speed(sample: Callable[[], int], rounds: int, clock: Callable[[], float] = time.process_time) -> float:
    """Return the tokens per processor second of the best round.

    Args:
        sample: samples once, and returns the number of tokens.
        rounds: number of rounds.
        clock: processor time so far, seconds.
    """
    best = 0.0
    for _ in range(rounds):
        began = clock()
        tokens = sample()
        best = max(best, tokens / max(clock() - began, TICK_SECONDS))
    return best


class Vllm:
    """vLLM with the benchmark's model.

    Args:
        engine: open, with the weights loaded.
        tokens: of an answer.
    """

    def __init__(self, engine: ProcessRunning, tokens: int) -> None:
        self._engine, self._tokens = engine, tokens
        self.name = engine.about()

    def sample(self, group: int) -> list[Answer]:
        """Return answers that no token ends."""
        prefixes = [Prefix(PROMPT, self._tokens, 1000 + sample) for sample in range(group)]
        return [Answer(list(completion.tokens), list(completion.log_probabilities), False)
                for completion in self._engine.complete(prefixes)]

    def seconds(self) -> float:
        """Return the processor time of vLLM's process with its threads, and of this one."""
        assert self._engine._process is not None
        fields = Path(f"/proc/{self._engine._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * TICK_SECONDS + time.process_time()


@contextlib.contextmanager
def vllm_of(python: str, model: Decoder, precision: Precision, tokens: int) -> Iterator[Vllm]:
    """Run a vLLM with the weights of a decoder during the block."""
    use = EngineUse(model.config, model.vocabulary_size, Decoding(1.0, 0, 1.0, frozenset(), precision), "cpu", 1, 0)
    engine = engines.Vllm(python=python, prefix_caching=False).open(use)
    assert isinstance(engine, ProcessRunning)
    try:
        engine.load(Weights("benchmark", model.state_dict()))
        yield Vllm(engine, tokens)
    finally:
        engine.close()


def with_vllm(rows: list[dict[str, Any]], python: str, model: Decoder, tokens: int, rounds: int) -> str:
    """Add vLLM's figures to the rows; return its version, or why there are none."""
    if not python:
        return "not measured: there is no environment (--vllm PYTHON)"
    if shutil.which(python) is None:
        return f"not measured: there is no {python}"
    name = ""
    for precision in PRECISIONS:
        with vllm_of(python, model, precision, tokens) as vllm:
            name = vllm.name
            alone = vllm.sample(1)
            for row in (row for row in rows if row["precision"] == precision):
                answers = vllm.sample(row["group"])
                row["vllm, tokens/s"] = round(speed(lambda vllm=vllm, row=row: sum(
                    len(answer.tokens) for answer in vllm.sample(row["group"])), rounds, vllm.seconds))
                row["vllm, gap"] = f"{gap(model, answers, precision):.1e}"
                row["vllm, same as alone"] = "yes" if answers[0] == alone[0] else "no"
    return name


def main() -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm", default=os.environ.get(engines.Vllm.PYTHON, ""), metavar="PYTHON",
                        help="Python of an environment with vLLM")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    exact = True
    with tempfile.TemporaryDirectory() as folder:
        theirs, ours = models(Path(folder))
        variants = {name: with_attention(ours, name) for name in ("exact", "masked")}
        for precision in PRECISIONS:
            sampling = Sampling(options.tokens, precision=precision)
            alone = {name: sample_group(model, PROMPT, [0], sampling, key=1, stream=2)[0]
                     for name, model in variants.items()}
            for group in options.groups:
                row: dict[str, Any] = {"precision": precision, "group": group}
                for name, model in variants.items():
                    def sample(model: Decoder = model, group: int = group, sampling: Sampling = sampling) -> int:
                        answers = sample_group(model, PROMPT, range(group), sampling, key=1, stream=2)
                        return sum(len(answer.tokens) for answer in answers)

                    answers = sample_group(model, PROMPT, range(group), sampling, key=1, stream=2)
                    difference, same = gap(model, answers, precision), answers[0] == alone[name]
                    row |= {f"{name}, tokens/s": round(speed(sample, options.rounds)),
                            f"{name}, gap": f"{difference:.1e}", f"{name}, same as alone": "yes" if same else "no"}
                    if name == "exact":
                        exact = exact and same and difference == 0
                row["transformers, tokens/s"] = "-"
                if precision == "fp32":
                    prompts = torch.tensor([PROMPT] * group)
                    row["transformers, tokens/s"] = round(speed(lambda prompts=prompts: theirs.generate(
                        prompts, do_sample=True, top_k=0, max_new_tokens=options.tokens).shape[0] * options.tokens,
                        options.rounds))
                rows.append(row)
        try:
            about = with_vllm(rows, options.vllm, ours, options.tokens, options.rounds)
        except EngineLost as error:
            about = f"not measured to the end: {error}"
    print_table(rows, title="groups of answers, one thread")
    print(f"vllm: {about}")
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
