"""TRL's GRPO on sums, for comparison.

    python -m tests.benchmarks.trl_grpo FOLDER STEPS.jsonl

It trains until it is killed, from the newest checkpoint in FOLDER, which also has the model, exported to Hugging Face's
format, and the prompts of `tests.sums`. STEPS.jsonl gets a line for each step.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.sums import EOS, PAD

SAVE_EVERY = 10


def trainer_of(folder: Path, *, groups: int, answers: int, answer_tokens: int, **settings: Any) -> Any:
    """Return TRL's trainer for the model and the prompts in a folder, with the loss that Tidewheel's `grpo` has.

    Args:
        folder: with `exported/` and `prompts.jsonl`.
        groups: prompts of a step.
        answers: to each prompt.
        answer_tokens: most tokens of an answer.
        settings: more of `trl.GRPOConfig`.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, PrinterCallback
    from transformers.utils.logging import disable_progress_bar
    from trl import GRPOConfig, GRPOTrainer

    disable_progress_bar()
    exported = folder / "exported"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(exported / "tokenizer.json"), eos_token="<|endoftext|>",
                                        pad_token="<|pad|>", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    model.generation_config.update(pad_token_id=PAD, eos_token_id=EOS)
    lines = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]

    def right(completions: list[str], reference: list[str], **_: Any) -> list[float]:
        return [float(" ".join(text.split()) == expected) for text, expected in zip(completions, reference)]

    config = GRPOConfig(
        output_dir=str(folder / "trl"), lr_scheduler_type="constant_with_warmup", warmup_steps=2,
        per_device_train_batch_size=groups * answers, num_generations=answers, max_completion_length=answer_tokens,
        beta=0.0, loss_type="grpo", scale_rewards="group", temperature=1.0, top_k=0, max_grad_norm=1.0, adam_beta2=0.95,
        weight_decay=0.0, use_cpu=True, bf16=False, report_to="none", logging_steps=1, disable_tqdm=True,
        gradient_checkpointing=False, **settings)
    data = Dataset.from_list([{key: line[key] for key in ("prompt", "reference")} for line in lines])
    trainer = GRPOTrainer(model=model, reward_funcs=right, args=config, train_dataset=data, processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)
    return trainer


def main() -> int:
    """Train until the process is killed."""
    from transformers import TrainerCallback

    folder, log = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            with log.open("a") as file:
                file.write(json.dumps({"step": state.global_step, "time": time.time()}) + "\n")

    trainer = trainer_of(folder, groups=8, answers=4, answer_tokens=4, learning_rate=1e-3, max_steps=10_000,
                         save_steps=SAVE_EVERY, seed=0)
    trainer.add_callback(Steps())
    trainer.train(resume_from_checkpoint=any((folder / "trl").glob("checkpoint-*")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
