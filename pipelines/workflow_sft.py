"""The workflow of `pipelines/workflow_sft.yaml`, written with the SDK: the same steps with the same keys.

    tidewheel workflow run pipelines/workflow_sft.py:flow --input my-folder --output out
"""

from __future__ import annotations

from pathlib import Path

import tidewheel as tw

CONFIGS = Path(__file__).parents[1] / "jobs" / "configs"
TEMPLATE = "chat_template.jinja"

tokenizer = tw.Tokenizer("tokenizer", "text/*.jsonl*", vocabulary_size=2048,
                         special_tokens=("<|im_start|>", "<|im_end|>"))
text = (
    tw.Pipeline("text")
    .set(max_bad_fraction=0.05)
    .read("text/*.jsonl*")
    .dedup_exact()
    .decontaminate("evals/*.jsonl")
    .tokenize(tokenizer)
    .pack(sequence_length=256, validation_fraction=0.03)
)
base = tw.Train(str(CONFIGS / "demo.yaml"), data=text, run={"id": "base"}, evaluation={"sample_tokens": 0})
conversations = (
    tw.Pipeline("sft_chat")
    .set(seed=0, max_bad_fraction=0.05)
    .read("chat/*.jsonl*", kind="chat", messages="messages")
    .dedup_exact()
    .decontaminate("evals/*.jsonl")
    .tokenize(tokenizer, chat_template=TEMPLATE)
    .pack(sequence_length=256, validation_fraction=0.02)
)
sft = tw.Train(str(CONFIGS / "sft.yaml"), data=conversations, init_from=base, run={"id": "sft"})
steps = (tw.Evaluate("sft-loss", sft), tw.Export("sft-model", sft))
flow = tw.Workflow("sft", *steps)
