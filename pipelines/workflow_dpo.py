"""The workflow of `pipelines/workflow_dpo.yaml`, written with the SDK: the same steps with the same keys.

    tidewheel workflow run pipelines/workflow_dpo.py:flow --input my-folder --output out
"""

from __future__ import annotations

import tidewheel as tw
from pipelines.workflow_sft import CONFIGS, TEMPLATE, sft, tokenizer
from pipelines.workflow_sft import steps as sft_steps

pairs = (
    tw.Pipeline("preferences")
    .set(seed=0, max_bad_fraction=0.05)
    .read("preferences/*.jsonl*", kind="preferences")
    .dedup_exact()
    .decontaminate("evals/*.jsonl")
    .tokenize(tokenizer, chat_template=TEMPLATE)
    .pack(sequence_length=256, validation_fraction=0.02)
)
reference = tw.Reference("reference", sft, pairs)
dpo = tw.Train(str(CONFIGS / "dpo.yaml"), data=pairs, init_from=sft, reference=reference, run={"id": "dpo"})
flow = tw.Workflow("dpo", *sft_steps, tw.Evaluate("dpo-margins", dpo), tw.Export("dpo-model", dpo))
