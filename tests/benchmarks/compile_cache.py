"""Measure the cost of torch.compile at a first start and at a second one with a warm cache.

    python -m tests.benchmarks.compile_cache [--layers 4 --dim 256]

Each start is its own process, which builds the model, compiles its blocks and runs three steps. The first step's extra
seconds are the compilation. The losses of the compiled and the plain run are compared (1e-5 relative).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

STEPS = 5


def start(cache: str, layers: int, dim: int) -> None:
    """Run one start and print {"seconds": [seconds of each step], "losses": [...]}."""
    import torch

    from tidewheel.models.decoder import Decoder, next_tokens
    from tidewheel.models.families import Llama
    from tidewheel.models.initial_values import init_parameter
    from tidewheel.train.compile import compile_blocks, use_cache

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = Llama(dim=dim, num_layers=layers, num_heads=dim // 64)
    with torch.device("meta"):
        model = Decoder(config, 1024)
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(init_parameter(name, parameter.shape, config, 0))
    if cache:
        use_cache(cache)
        compile_blocks(model.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 1024, (2, 256), generator=torch.Generator().manual_seed(0)).to(device)
    segments, positions = torch.zeros_like(tokens), torch.arange(256, device=device).expand(2, 256)
    targets = next_tokens(tokens, segments)
    seconds, losses = [], []
    for _ in range(STEPS):
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = model(tokens, positions, segments, targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
    print(json.dumps({"seconds": seconds, "losses": losses}))


def measured(cache: str, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Run `start` in its own process and return its output."""
    command = [sys.executable, "-m", "tests.benchmarks.compile_cache", "--layers", str(arguments.layers), "--dim",
               str(arguments.dim), "--start", cache or "none"]
    process = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ)
    return json.loads(process.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--start", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.start:
        start("" if arguments.start == "none" else arguments.start, arguments.layers, arguments.dim)
        return 0
    with tempfile.TemporaryDirectory() as cache:
        runs = {"plain": measured("", arguments), "compiled, first start": measured(cache, arguments),
                "compiled, second start": measured(cache, arguments)}
    print(f"{'':24}{'first step s':>14}{'later step s':>14}{'compilation s':>15}")
    for name, run in runs.items():
        first, *later = run["seconds"]
        typical = sorted(later)[len(later) // 2]
        print(f"{name:24}{first:>14.2f}{typical:>14.3f}{first - typical:>15.2f}")
    worst = max(abs(a / b - 1) for name in list(runs)[1:]
                for a, b in zip(runs[name]["losses"], runs["plain"]["losses"]))
    print(f"worst relative difference of a loss from the plain run: {worst:.1e}, at most 1e-5")
    return 0 if worst <= 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
