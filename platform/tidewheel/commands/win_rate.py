"""`tidewheel win-rate`: how often a judge prefers one model's answers to another's."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

from cyclopts import Parameter

from tidewheel.commands.judge import judge_of
from tidewheel.commands.options import AsJson
from tidewheel.console import bars, print_table
from tidewheel.errors import ConfigError


def win_rate(
    first: Annotated[str, Parameter(help="A run, a checkpoint or a Hugging Face folder: the model whose wins count.")],
    second: Annotated[str, Parameter(help="The model to compare it with.")],
    prompts: Annotated[str, Parameter(help="JSONL file; each record has a prompt.")],
    *,
    output: Annotated[str, Parameter(help="Folder to write to: answers/, verdicts/ and win_rate.json.")],
    endpoint: Annotated[str, Parameter(help="Judge with a language model at this URL of OpenAI's chat completions. Its "
                                            "key is in TIDEWHEEL_JUDGE_KEY.")] = "",
    model: Annotated[str, Parameter(help="With --endpoint: name of the model.")] = "",
    reward_model: Annotated[str, Parameter(help="Judge with this run of a reward model, or checkpoint.")] = "",
    reward_template: Annotated[str, Parameter(help="With --reward-model: the Jinja file that it was trained "
                                                   "with.")] = "",
    chat: Annotated[bool, Parameter(negative="", help="Put each prompt into the models' chat templates.")] = False,
    tokens: Annotated[int, Parameter(help="Tokens of an answer, at most.")] = 256,
    temperature: Annotated[float, Parameter(help="Of the answers; 0 always takes the most likely token.")] = 0.0,
    seed: Annotated[int, Parameter(help="Seed of the answers.")] = 0,
    device: Annotated[str, Parameter(help="cpu, cuda or cuda:1; default: the first GPU, or else cpu.")] = "",
    as_json: AsJson = False,
) -> int:
    """Let two models answer the same prompts, and a judge compare the answers, each pair in both orders.

    A tie counts as half a win. The interval is a 95 % percentile bootstrap over prompts. If the command is killed,
    give it again: it continues.
    """
    if tokens < 1 or temperature < 0:
        raise ConfigError("--tokens is 1 or more, --temperature 0 or more", where="tidewheel win-rate",
                          fix="correct the option")
    judge = judge_of(reward_model, reward_template, endpoint, model, device, command="tidewheel win-rate",
                     template="--reward-template")
    from tidewheel.inference.scorer import evaluated_checkpoint, open_scorer
    from tidewheel.inference.win_rates import Writing, compare

    names = [evaluated_checkpoint(first), evaluated_checkpoint(second)]
    scorers = [open_scorer(name, device=device) for name in names]
    with bars() as group, group.bar("answers and verdicts", 1, unit="prompts") as bar:
        result = compare(scorers[0], scorers[1], prompts, judge, output, Writing(tokens, temperature, seed, chat),
                         about={"first": names[0], "second": names[1]},
                         on_progress=lambda what, done, total: bar.update(done, total=total))
    if as_json:
        print(json.dumps({"first": names[0], "second": names[1], **asdict(result)}))
        return 0
    print_table([{"wins": result.wins, "ties": result.ties, "losses": result.losses,
                  "win rate": round(result.win_rate, 4), "95 % interval": f"{result.low:.4f} to {result.high:.4f}"}],
                title=f"{names[0]} against {names[1]}, {result.prompts:,} prompts")
    print(f"{result.judged:,} judged now, {result.equal:,} pairs of equal answers; verdicts in {output}")
    return 0
