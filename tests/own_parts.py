"""Parts as users write them, in a folder outside the package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

OWN_PARTS = '''
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import tidewheel as tw

HERE = Path(__file__).parent


class Momentum(tw.Optimizer):
    """Gradient descent with momentum."""
    STATE = ("momentum_buffer",)
    NOT_REPRODUCIBLE = ""
    learning_rate: float = 0.1
    momentum: float = 0.9

    def build(self, groups):
        return torch.optim.SGD(groups, lr=self.learning_rate, momentum=self.momentum, foreach=True)


class Stairs(tw.Schedule):
    """Halve the learning rate every few steps; at step 6 wait while a file "hold" exists beside this one."""
    every: int = 3

    def factor(self, done, total, start):
        if done == 6 and (HERE / "hold").exists():
            (HERE / f"waits-{os.getpid()}").touch()
            while (HERE / "hold").exists():
                time.sleep(0.02)
        return 0.5 ** ((done - start) // self.every)


class Smooth(tw.Objective):
    """Cross-entropy with label smoothing."""
    METRICS = ("accuracy",)
    smoothing: float = 0.1

    def sums(self, outputs, batch):
        known = batch.targets >= 0
        logits, targets = outputs.logits()[known].float(), batch.targets[known]
        loss = F.cross_entropy(logits, targets, label_smoothing=self.smoothing, reduction="sum")
        return tw.Sums(loss, {"accuracy": (logits.argmax(-1) == targets).sum()})


class Mlp(nn.Module):
    """down(gelu(up(x))), with biases."""

    def __init__(self, dim, inner):
        super().__init__()
        self.up = nn.Linear(dim, inner)
        self.down = nn.Linear(inner, dim)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Gelu(tw.Model):
    """A decoder whose feed-forward has GELU and biases."""
    PRESETS = {"tiny": {"dim": 32, "num_layers": 2, "num_heads": 4}}
    FEED_FORWARD = tw.FeedForwardShape(inputs=1, kept=2, kept_compiled=1)
    RESIDUAL_OUTPUTS = ("attention.wo.weight", "ffn.down.weight")

    def block(self, layer):
        from tidewheel.models.blocks import Attention, Block

        return Block(self, Attention(self, bias=True), Mlp(self.dim, self.ffn_width))

    def tensor_parallel(self, layer):
        return {**super().tensor_parallel(layer), "ffn.up": "columns", "ffn.down": "rows"}

    def extra_parameters(self):
        queries_keys_values = (self.num_heads + 2 * self.kv_heads) * self.head_width
        return queries_keys_values + self.ffn_width, self.dim


class Diary(tw.Callback):
    """Print each step on every rank."""
    EVERY_RANK = True

    def on_step_end(self, worker, step):
        print(f"told of step {step.step}", "again" if step.redone else "first")


class Table(tw.Tracker):
    """Append the accuracy of each step to a file."""
    path: str

    def write(self, record):
        if "objective" in record:
            with open(self.path, "a") as file:
                file.write(f"{record['step']} {record['objective']['accuracy']}\\n")
'''


def write_parts(folder: Path) -> str:
    """Write a module of parts into `folder`, under a name that no other test imports, and return the name."""
    name = "parts_" + "".join(letter if letter.isalnum() else "_" for letter in folder.name)
    (folder / f"{name}.py").write_text(OWN_PARTS)
    return name


def overrides(module: str) -> tuple[str, ...]:
    """Return the settings of a reproducible run that uses these parts."""
    return (f"optimizer.kind={module}:Momentum", "optimizer.learning_rate=0.05", "optimizer.clip_norm=1.0",
            f"schedule={{kind: '{module}:Stairs', warmup_steps: 0}}",
            f"objective={{kind: '{module}:Smooth', smoothing: 0.2}}", f"model.kind={module}:Gelu", "reproducible=true")


OWN_FILTERS = '''
import pyarrow.compute as pc

import tidewheel as tw


class Opens(tw.Filter):
    """Drop documents that start with a letter, and cut texts at a mark."""
    EDITS = "cut_behind_mark"
    letter: str = "q"
    mark: str = "|"

    def limits(self):
        return {"own_characters": (None, None)}

    def apply(self, batch):
        first = pc.utf8_slice_codeunits(batch.texts, 0, 1).to_pylist()
        return tw.Verdicts(["opens" if letter == self.letter else "" for letter in first],
                           {"own_characters": pc.utf8_length(batch.texts).to_numpy()},
                           [text.partition(self.mark)[0] for text in batch.texts.to_pylist()])


def odd_words(document):
    return len(document["text"].split()) % 7 != 0 or "sevens"
'''


def write_filters(folder: Path, name: str = "own_filters") -> str:
    """Write a module of filters into `folder`, and return its name."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(OWN_FILTERS)
    return name


def without_sevens(document: Mapping[str, str]) -> bool:
    """Return whether to keep a document, or the reason to drop it, as a filter for `tw.Pipeline.filter`."""
    return len(document["text"].split()) % 7 != 0
