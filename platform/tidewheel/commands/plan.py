"""`tidewheel plan`: layouts for a cluster, and the cost of failures."""

from __future__ import annotations

import json
from typing import Annotated

import cyclopts
from cyclopts import Parameter

from tidewheel.commands.options import AsJson, Overrides
from tidewheel.console import print_table

app = cyclopts.App(name="plan", help="Plan a run before it starts: layouts, memory, step time, goodput and cost.")


@app.default
def plan_layouts(
    config: Annotated[str, Parameter(help="Training configuration, a YAML file; jobs/configs/ has examples.")],
    *,
    gpus: Annotated[int, Parameter(help="Number of GPUs, with one worker on each.")],
    gpu: Annotated[str, Parameter(help="h100, h200, h800, a100, b200, l40s, a10g, a6000, rtx3090, rtx4090, t4 or "
                                              "mi300x.")] = "h100",
    nodes_of: Annotated[int, Parameter(help="GPUs per node.")] = 8,
    sequence_length: Annotated[int | None, Parameter(help="Tokens of a sequence; default: the shard set's.")] = None,
    vocabulary_size: Annotated[int | None, Parameter(help="Default: the configuration's or the shard set's.")] = None,
    set_: Overrides = None,
    assume: Annotated[list[str] | None, Parameter(negative="", consume_multiple=False, help="Change what is assumed "
                      "of the cluster, such as network_gbytes=25, price_per_gpu_hour=2.5 or failures.rate=llama3; "
                      "docs/planning.md lists them. May be repeated.")] = None,
    top: Annotated[int, Parameter(help="Number of layouts to show.")] = 16,
    as_json: AsJson = False,
) -> int:
    """Rank the layouts of a model on a cluster by step time, with memory, MFU, communication, goodput and cost.

    This starts nothing and needs no GPU. docs/planning.md has the formulas. Exit code 2 if nothing fits.
    """
    from tidewheel.config import build, load
    from tidewheel.plan.hardware import ClusterConfig
    from tidewheel.train.config import TrainConfig

    settings = load(TrainConfig, config, set_ or ())
    cluster = build(ClusterConfig, {"gpus": gpus, "gpu": gpu, "nodes_of": nodes_of}, assume or (), where="--assume")
    from tidewheel.plan import tables
    from tidewheel.plan.layouts import rank
    from tidewheel.plan.summary import summary

    job, notes = tables.job_of(settings, vocabulary_size, sequence_length)
    ranking = rank(job, cluster)
    first = ranking.fitting[0] if ranking.fitting else None
    whole = summary(job, first, cluster) if first else None
    if as_json:
        print(json.dumps(tables.as_json(job, cluster, ranking, whole), indent=2))
    else:
        tables.show(job, cluster, ranking, whole, notes=notes, top=top)
    return 0 if first else 2


@app.command(name="budget")
def plan_budget(
    *,
    flops: Annotated[float | None, Parameter(help="Training FLOPs, 6 x parameters x tokens, such as 1e21.")] = None,
    gpus: Annotated[int | None, Parameter(help="Number of GPUs, instead of --flops.")] = None,
    days: Annotated[float | None, Parameter(help="Days of training on them.")] = None,
    gpu: Annotated[str, Parameter(help="Kind of the GPUs, as in `tidewheel plan`.")] = "h100",
    mfu: Annotated[float | None, Parameter(help="Share of their bf16 peak that the run reaches; default: 0.4. "
                                                "`tidewheel plan` shows a run's own.")] = None,
    law: Annotated[str, Parameter(help="Scaling law that sets the size: besiroglu (default), chinchilla1, chinchilla2, "
                                       "chinchilla3, or the law.json of a tw.ScalingLaw.")] = "",
    parameters: Annotated[float | None, Parameter(help="Size of the model, such as 8e9, instead of the law's.")] = None,
    batch_tokens: Annotated[float | None, Parameter(help="Tokens of a step, for the learning rate; default: Step "
                                                         "Law's.")] = None,
    as_json: AsJson = False,
) -> int:
    """Show how many parameters and tokens to train with a budget, at which learning rate and batch size.

    docs/planning.md has the formulas. Every row has its source.
    """
    from tidewheel.config import build
    from tidewheel.errors import ConfigError
    from tidewheel.plan.hardware import ClusterConfig
    from tidewheel.plan.scaling import budget as scaling

    if (flops is None) == (gpus is None) or (gpus is None) != (days is None):
        raise ConfigError("the budget is either FLOPs, or GPUs and days", where="--flops, --gpus, --days",
                          fix="give --flops 1e21, or --gpus 64 --days 7")
    how = "--flops"
    if gpus is not None and days is not None:
        cluster = build(ClusterConfig, {"gpus": gpus, "gpu": gpu, "nodes_of": 1}, where="--gpu")
        share = scaling.DEFAULT_MFU if mfu is None else mfu
        flops = scaling.flops_of(cluster, days, share)
        how = f"{gpus:,} x {cluster.gpu} for {days:g} days at {100 * share:g} % MFU"
    item = scaling.budget(flops or 0.0, how, law=law, parameters=parameters, batch_tokens=batch_tokens)
    if as_json:
        print(json.dumps(scaling.as_json(item), indent=2))
        return 0
    best = item.chosen.optimum
    print_table(scaling.law_rows(item), title=f"{item.flops:.3g} FLOPs ({item.how})")
    print_table(scaling.rate_rows(item.rates, best.tokens),
                title=f"{scaling.short(best.parameters)} parameters on {scaling.short(best.tokens)} tokens "
                      f"({item.chosen.law})")
    for note in item.notes:
        print(note)
    return 0


@app.command(name="goodput")
def plan_goodput(
    config: Annotated[str | None, Parameter(help="A YAML file with the sizes, intervals and constants; the defaults "
                                                 "without it.")] = None,
    *,
    set_: Overrides = None,
    plot: Annotated[str, Parameter(help="Also plot it to this SVG file.")] = "",
    run: Annotated[list[str] | None, Parameter(name="--run", negative="", consume_multiple=False, help="URI of a real "
                   "run with failures; given twice or more, each is predicted with the others' constants.")] = None,
    measured: Annotated[list[str] | None, Parameter(negative="", consume_multiple=False, help="Take times from a "
                        "file that tests.benchmarks.measured_times wrote, or one of its benchmarks (--output). May be "
                        "repeated.")] = None,
    mechanisms: Annotated[bool, Parameter(negative="", help="Instead show what each mechanism of recovery contributes, "
                                          "by switching it off.")] = False,
    as_json: AsJson = False,
) -> int:
    """Show the share of time not lost to failures, by size of the run, checkpoint interval and way to recover.

    This simulates failures and recoveries of long runs; docs/goodput.md has the assumptions. With --run, it compares
    predictions with real runs.
    """
    from dataclasses import asdict

    from tidewheel.config import build, load
    from tidewheel.plan.config import GoodputConfig

    settings = load(GoodputConfig, config, set_ or ()) if config else build(GoodputConfig, {}, set_ or ())
    if measured:
        from tidewheel.plan.measured import applied

        settings = applied(settings, measured)
    if mechanisms:
        from tidewheel.plan.mechanisms import effective_times

        times = effective_times(settings)
        if as_json:
            print(json.dumps([asdict(item) for item in times], indent=2))
            return 0
        print_table([{
            "GPUs": f"{item.gpus:,}", "failure every": f"{item.mtbf_seconds / 3600:.2f} h",
            "all": f"{100 * item.whole:.2f} %",
            **{f"without {name}": f"{100 * share:.2f} %" for name, share in item.without.items()},
            "without any": f"{100 * item.none:.2f} %"} for item in times],
            title=f"effective time, {settings.failures.rate}, the best interval of each")
        return 0
    if run:
        from tidewheel.plan.validation import predicted_beside_measured

        lines = predicted_beside_measured(run)
        print(json.dumps(lines, indent=2)) if as_json else print_table(lines, title="goodput of real runs")
        return 0
    from tidewheel.plan import recovery

    rows = recovery.table(settings)
    if plot:
        from tidewheel.plan.plots import lost_figure
        from tidewheel.storage import split

        folder, name = split(plot)
        folder.write(name, lost_figure(rows).encode())
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return 0
    print_table([{
        "GPUs": f"{row.gpus:,}", "failure every": f"{row.mtbf_seconds / 3600:.1f} h", "recovery": row.tier,
        "best interval": f"{row.interval_seconds / 60:g} min", "goodput": f"{100 * row.goodput:.2f} %",
        **{name.replace("_", " "): f"{100 * share:.2f} %" for name, share in row.parts.items()}}
        for row in recovery.best(rows)], title=f"the best interval of each, {settings.days:g} days")
    return 0


@app.command(name="spares")
def plan_spares(
    *,
    nodes: Annotated[list[int], Parameter(consume_multiple=True, negative="", help="Nodes that the run needs; several "
                                          "sizes may be given.")],
    rate: Annotated[str, Parameter(help="llama3, rsc1, rsc2, rsc1_1024, ft_hsdp, or failures per GPU and hour (8 GPUs "
                                        "a node).")] = "rsc1",
    run: Annotated[list[str] | None, Parameter(name="--run", negative="", consume_multiple=False, help="URI of a real "
                   "run: measure the rate of its nodes instead. May be repeated.")] = None,
    replace_hours: Annotated[float, Parameter(help="Hours until a failed node is repaired or replaced.")] = 24.0,
    quantile: Annotated[float, Parameter(help="Share of the time in which the spares must suffice.")] = 0.99,
    as_json: AsJson = False,
) -> int:
    """Show how many spare nodes a run needs: a quantile of the number of nodes that are away, which is binomial."""
    from tidewheel.config import build
    from tidewheel.errors import ConfigError
    from tidewheel.plan.config import FailureConfig
    from tidewheel.plan.spares import measured_rate, published_rate, spare_nodes

    if not 0 < quantile < 1 or replace_hours <= 0 or min(nodes) < 1:
        raise ConfigError("the quantile is between 0 and 1, hours and nodes are more than 0",
                          where="--quantile, --replace-hours, --nodes", fix="such as --nodes 128 --quantile 0.99")
    observed = measured_rate(run) if run else None
    failures = build(FailureConfig, {}, [f"rate={rate}"], where="--rate")
    source = f"{observed.failures} failures in {observed.node_hours:,.1f} node hours" if observed else rate
    rows = []
    for count in nodes:
        hourly = observed.per_node_hour if observed else published_rate(failures, count)
        rows.append({"nodes": count, "rate": source, "per_1000_node_days": round(24_000 * hourly, 3),
                     "spares": spare_nodes(count, hourly, replace_hours, quantile)})
    if as_json:
        print(json.dumps(rows, indent=2))
        return 0
    print_table([{"nodes": f"{row['nodes']:,}", "failures": row["rate"],
                  "per 1,000 node-days": f"{row['per_1000_node_days']:g}", "spare nodes": row["spares"]}
                 for row in rows],
                title=f"spares that suffice {100 * quantile:g} % of the time, {replace_hours:g} h to replace a node")
    return 0
