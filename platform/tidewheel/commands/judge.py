"""`tidewheel judge`: preference pairs of answers, made by a judge."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from tidewheel.commands.options import AsJson
from tidewheel.console import bars
from tidewheel.errors import ConfigError

if TYPE_CHECKING:
    from tidewheel.inference.judges import Judge


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
    chosen = judge_of(reward_model, chat_template, endpoint, model, device)
    from tidewheel.inference.judging import make_pairs

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


def judge_of(reward_model: str, chat_template: str, endpoint: str, model: str, device: str, *,
             command: str = "tidewheel judge", template: str = "--chat-template") -> Judge:
    """Return the judge that the options of a command name.

    Args:
        reward_model: run or checkpoint of a reward model, or "".
        chat_template: its Jinja file.
        endpoint: URL of a language model, or "".
        model: its name there.
        device: of the reward model.
        command: the command, for messages.
        template: the command's option for the Jinja file.

    Raises:
        ConfigError: not exactly one judge is named.
    """
    if bool(reward_model) == bool(endpoint) or bool(reward_model) != bool(chat_template) \
            or bool(endpoint) != bool(model):
        raise ConfigError("one judge is needed", where=command,
                          fix=f"give --reward-model with {template}, or --endpoint with --model")
    from tidewheel.inference.judges import EndpointJudge, RewardModelJudge

    if endpoint:
        return EndpointJudge(endpoint, model)
    return RewardModelJudge(reward_model, chat_template, device=device)
