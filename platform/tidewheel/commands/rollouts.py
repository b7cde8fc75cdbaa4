"""`tidewheel rollouts`: what a run of reinforcement learning has sampled."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import cyclopts
from cyclopts import Parameter

from tidewheel.commands.options import Address, AsJson, Overrides
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
        print(json.dumps({"step": entry.step, "version": entry.version, "versions": entry.versions, "groups": [
            {"prompt_id": group.prompt_id, "prompt": group.prompt, "answers": [
                {"sample": answer.sample, "reward": answer.reward, "advantage": answer.advantage, "text": answer.text,
                 "turns": [{"by": by, "text": text} for by, text in answer.turns]}
                for answer in group.answers]} for group in chosen],
            "dropped": [asdict(group) for group in entry.dropped]}))
        return 0
    oldest = min(entry.versions, default=entry.version)
    policies = f"policy after step {entry.version}"
    if oldest < entry.version:
        policies = f"policies after steps {oldest} to {entry.version}"
    print(f"step {entry.step}: {len(entry.admitted)} groups, sampled by the {policies}")
    for reason, number in entry.reasons().most_common():
        print(f"  dropped: {number} {printable(reason)}")
    if entry.again:
        print(f"  sampled anew after a loss: {len(entry.again)}")
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


@app.command
def replay(
    run: Annotated[str, Parameter(help="URI of a run that is over.")],
    *,
    to: Annotated[str, Parameter(help="URI of the new run's folder; its last part becomes run.id.")],
    set_: Overrides = None,
    address: Address = None,
    local: Annotated[bool, Parameter(negative="", help="Train in this process, without Ray.")] = False,
    device: Annotated[str, Parameter(help="With --local: cpu, cuda or cuda:1.")] = "",
) -> int:
    """Train again on a run's rollouts, in the order of its ledger, without any generator.

    In reproducible mode the parameters must come out the same; exit code 2 if not. A killed replay continues when it is
    started again.
    """
    from tidewheel.commands.fitting import fit_here, print_result
    from tidewheel.errors import CheckpointError
    from tidewheel.post.replay import replayed, same_parameters
    from tidewheel.post.running import prepare
    from tidewheel.train.run import Run

    settings = replayed(run, to, set_ or ())
    opened = Run.open(settings)
    prepare(opened)
    opened.check()  # before a cluster starts for it
    print_result(fit_here(opened, local=local, device=device, address=address))
    sha, same = same_parameters(opened.uri, run)
    print(f"parameters: SHA-256 {sha}, {'the same as' if same else 'other than'} those of {printable(run)}")
    if settings.reproducible and not same:
        raise CheckpointError("the replay has other parameters than the run", where=opened.uri,
                              fix="use the same kind of processor and the library versions in the run's run.json")
    return 0
