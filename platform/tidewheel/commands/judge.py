"""`tidewheel judge`: preference pairs of answers, made by a judge."""

from __future__ import annotations

import json
from typing import Annotated

from cyclopts import Parameter

from tidewheel.commands.options import AsJson
from tidewheel.console import bars
from tidewheel.errors import ConfigError


def judge(
    answers: Annotated[str, Parameter(help="JSONL file; each record has a prompt, and answers: a list of texts.")],
    *,
    output: Annotated[str, Parameter(help="Folder to write to: preferences/pairs.jsonl and verdicts/.")],
    reward_model: Annotated[str, Parameter(help="Judge with this run of a reward model, or checkpoint.")] = "",
    chat_template: Annotated[str, Parameter(help="With --reward-model: the Jinja file that it was trained with.")] = "",
    endpoint: Annotated[str, Parameter(help="Judge with a language model at this URL of OpenAI's chat completions. Its "
                                            "key is in TIDEWHEEL_JUDGE_KEY.")] = "",
    model: Annotated[str, Parameter(help="With --endpoint: name of the model.")] = "",
    device: Annotated[str, Parameter(help="cpu, cuda or cuda:1; default: the first GPU, or else cpu.")] = "",
    as_json: AsJson = False,
) -> int:
    """Make preference pairs of the best and the worst answer to each prompt, for pipelines/preferences.yaml.

    Every verdict is kept with the judge's prompt and answer. If the command is killed, give it again: it continues.
    """
    if bool(reward_model) == bool(endpoint) or bool(reward_model) != bool(chat_template) \
            or bool(endpoint) != bool(model):
        raise ConfigError("one judge is needed", where="tidewheel judge",
                          fix="give --reward-model with --chat-template, or --endpoint with --model")
    from tidewheel.inference.judges import EndpointJudge, Judge, RewardModelJudge
    from tidewheel.inference.judging import make_pairs

    if endpoint:
        chosen: Judge = EndpointJudge(endpoint, model)
    else:
        chosen = RewardModelJudge(reward_model, chat_template, device=device)
    with bars() as group, group.bar("judge", 1, unit="records") as bar:
        done = make_pairs(answers, chosen, output, on_progress=lambda count, total: bar.update(count, total=total))
    if as_json:
        print(json.dumps({"records": done.records, "pairs": done.pairs, "judged": done.judged,
                          "left_out": dict(done.left_out)}))
        return 0
    print(f"{done.records:,} records, {done.judged:,} judged now, {done.pairs:,} pairs")
    for reason, count in sorted(done.left_out.items()):
        print(f"left out, {reason}: {count:,}")
    return 0
