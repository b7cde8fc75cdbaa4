"""Measure time and memory of a long prompt and of long replies of a tool, by the size of a chunk.

    python -m tests.benchmarks.prefill [--chunks 16 1024 1000000] [--prompt 2048] [--reply 256] [--answers 8]

Each size has a process of its own, which samples a group of answers with two turns of one token and a reply between
them. Memory is the largest resident set less that of the process before the first pass. With a chunk of as many tokens
as a batch has rows, replies are computed one token after the other; with a huge one the prompt and each reply are one
pass. The exit code is 1 if the answers of two sizes differ in a bit.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence

import torch

from tidewheel.console import print_table
from tidewheel.inference import prefill
from tidewheel.inference.group import Sampling, sample_group
from tidewheel.models import families
from tidewheel.models.decoder import Decoder
from tidewheel.storage import content_hash

SHAPE = {"num_layers": 4, "dim": 256, "num_heads": 8, "num_kv_heads": 2, "attention": "exact"}
VOCABULARY = 32_768


class Tool:
    """The other side of answers: it replies once, at length.

    Args:
        reply: tokens of the reply.
    """

    turn_tokens = 1

    def __init__(self, reply: int) -> None:
        self._reply, self._replied = reply, set[int]()

    def opening(self, answer: int) -> Sequence[int]:
        """See `Partner`."""
        return []

    def ends(self, turn: Sequence[int]) -> bool:
        """See `Partner`."""
        return False

    def reply(self, answer: int, turn: Sequence[int]) -> Sequence[int] | None:
        """See `Partner`."""
        if answer in self._replied:
            return None
        self._replied.add(answer)
        return [5 + (turn[0] + index) % 1000 for index in range(self._reply)]


def measure(chunk: int, prompt: int, reply: int, answers: int) -> dict[str, object]:
    """Return the figures of one size of chunk, in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    settings = {**SHAPE, "max_sequence_length": prompt + reply + 16}
    model = Decoder(families.KIND.build("llama", settings), VOCABULARY).requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(0, 0.05) if parameter.ndim > 1 else parameter.fill_(1)
    prefill.CHUNK_TOKENS = chunk
    tokens = [5 + index % 1000 for index in range(prompt)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    sampled = sample_group(model, tokens, range(answers), Sampling(reply + 8), key=1, stream=2, partner=Tool(reply))
    seconds = time.process_time() - began
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    values = json.dumps([[answer.tokens, answer.log_probabilities] for answer in sampled])
    return {"chunk": chunk, "CPU seconds": round(seconds, 1), "memory, MiB": round((after - before) / 1024),
            "answers": content_hash(values.encode())[7:23]}


def main() -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, nargs="+", default=[16, 1024, 1_000_000])
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--reply", type=int, default=256)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--here", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = (options.prompt, options.reply, options.answers)
    if options.here:
        print(json.dumps(measure(options.here, *sizes)))
        return 0
    rows = []
    for chunk in options.chunks:
        command = [sys.executable, "-m", "tests.benchmarks.prefill", "--here", str(chunk)]
        command += [f"--{name}={value}" for name, value in zip(("prompt", "reply", "answers"), sizes)]
        rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    print_table(rows, title=f"a prompt of {options.prompt:,} tokens, {options.answers} answers, and a reply of "
                            f"{options.reply:,} tokens to each")
    return int(len({row["answers"] for row in rows}) > 1)


if __name__ == "__main__":
    sys.exit(main())
