"""`tidewheel rollouts`: what a run of reinforcement learning has sampled."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import cyclopts
from cyclopts import Parameter

from tidewheel.commands.options import AsJson
from tidewheel.printable import printable, printable_lines

app = cyclopts.App(name="rollouts", help="Rollouts of reinforcement learning: answers, rewards and their ledger.")
SHOWN = 4
"""Groups that `show` prints by default."""


@app.command
def show(
    run: Annotated[str, Parameter(help="URI of a run.")],
    *,
    step: Annotated[int, Parameter(help="Step that trained on them; default: the newest.")] = 0,
    prompt: Annotated[str, Parameter(help="Only the group of the prompt with this id.")] = "",
    groups: Annotated[int, Parameter(help="Number of groups to print.")] = SHOWN,
    as_json: AsJson = False,
) -> int:
    """Print the rollouts that a step trained on: each prompt, its answers, rewards and advantages."""
    from tidewheel.post.reading import step_rollouts

    entry, found = step_rollouts(run, step)
    chosen = [group for group in found if not prompt or group.prompt_id == prompt]
    if as_json:
        print(json.dumps({"step": entry.step, "version": entry.version, "groups": [
            {"prompt_id": group.prompt_id, "prompt": group.prompt, "answers": [
                {"sample": answer.sample, "reward": answer.reward, "advantage": answer.advantage, "text": answer.text,
                 "turns": [{"by": by, "text": text} for by, text in answer.turns]}
                for answer in group.answers]} for group in chosen],
            "dropped": [asdict(group) for group in entry.dropped]}))
        return 0
    print(f"step {entry.step}: {len(entry.admitted)} groups, sampled by the policy after step {entry.version}")
    for reason, number in entry.reasons().most_common():
        print(f"  dropped: {number} {printable(reason)}")
    for group in chosen[:groups]:
        print(f"\n{printable(group.prompt_id)}: mean reward {group.reward:.3f}")
        print("  " + printable_lines(group.prompt).replace("\n", "\n  "))
        for answer in group.answers:
            begin = f"  {answer.reward:8.3f} {answer.advantage:+9.3f}"
            for by, text in answer.turns:
                shown = printable_lines(text.rstrip("\n")).replace("\n", "\n" + " " * 24)
                print(f"{begin} {'>' if by == 'environment' else ' '} {shown}")
                begin = " " * len(begin)
    if len(chosen) > groups:
        print(f"\nand {len(chosen) - groups} more groups: --groups {len(chosen)}")
    return 0
