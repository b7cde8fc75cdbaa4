"""`tidewheel score`: answers of a model judged by a reward."""

from __future__ import annotations

import json
from typing import Annotated

from cyclopts import Parameter

from tidewheel.commands.options import AsJson, Overrides
from tidewheel.console import print_table
from tidewheel.errors import ConfigError, InputError


def score(
    answers: Annotated[str, Parameter(help="JSONL file with a prompt, an answer and a reference in each record; "
                                           "s3://bucket/... and .gz too.")],
    *,
    reward: Annotated[str, Parameter(help="A built-in reward, an installed package's, or your own as module:name.")],
    set_: Overrides = None,
    output: Annotated[str, Parameter(help="Write the result of each record to this JSONL file.")] = "",
    prompt: Annotated[str, Parameter(help="Field with the prompt.")] = "prompt",
    answer: Annotated[str, Parameter(help="Field with the answer.")] = "answer",
    reference: Annotated[str, Parameter(help="Field with the reference.")] = "reference",
    seconds: Annotated[int, Parameter(help="Processor time for one answer, for a reward of your own.")] = 10,
    max_failed_fraction: Annotated[float, Parameter(help="Fail if a larger share of the records has no score.")] = 0.05,
    as_json: AsJson = False,
) -> int:
    """Score a file of answers with a reward: the mean, and why records have no score.

    A failure is never a reward: a record without a reference, or with an answer that takes too long to judge, has no
    score and does not count in the mean. --set changes settings of the reward. Exit code 2 if too many records have no
    score; the results are written anyway.
    """
    from tidewheel.config import build
    from tidewheel.rewards import KIND
    from tidewheel.rewards.scoring.file import Fields, score_file

    if seconds < 1 or not 0 <= max_failed_fraction <= 1:
        raise ConfigError("--seconds is 1 or more, --max-failed-fraction from 0 to 1", where="tidewheel score",
                          fix="correct the option")
    part = build(KIND.find(reward), {}, set_ or (), where=f"--reward {reward}")
    summary = score_file(answers, part, output=output, fields=Fields(prompt, answer, reference), seconds=seconds)
    failed = [{"no score because": reason, "records": count, "first": summary.examples[reason]}
              for reason, count in sorted(summary.failures.items())]
    if as_json:
        print(json.dumps({"reward": part.decisive(), "key": part.key(), "records": summary.records,
                          "scored": summary.scored, "mean": summary.mean, "failures": dict(sorted(
                              summary.failures.items())), "output": output}, indent=2))
    else:
        mean = "no score" if summary.mean is None else f"mean {summary.mean:.4f}"
        print(f"{reward}: {mean}, {summary.scored:,} of {summary.records:,} records scored")
        if failed:
            print_table(failed)
        if output:
            print(f"results: {output}")
    if summary.failures.total() > max_failed_fraction * summary.records:
        raise InputError(f"{summary.failures.total():,} of {summary.records:,} records have no score, more than "
                         f"{max_failed_fraction:.0%}", where=answers,
                         fix="see the reasons above, or raise --max-failed-fraction")
    return 0
