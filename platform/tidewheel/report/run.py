"""The report of a training run on one page, with its pipeline's if that is known."""

from __future__ import annotations

import json
import logging
import math
import re
import time
from dataclasses import dataclass
from typing import Any

from tidewheel import jsonlog, storage
from tidewheel.errors import StorageError, TidewheelError
from tidewheel.printable import printable_lines
from tidewheel.report import answers, experts, lineage, mixture, rollouts, sources, tasks, validation
from tidewheel.report.disturbances import disturbance_table, disturbances
from tidewheel.report.events import QUIET, Event, bad_steps, checkpoints, marks, read_events
from tidewheel.report.explain import account as accounts
from tidewheel.report.explain import section as explained
from tidewheel.report.page import (
    Html,
    Page,
    badge,
    cards,
    columns,
    count,
    details,
    join,
    note,
    percent,
    seconds,
    shorten,
    table,
    tag,
)
from tidewheel.report.pipeline import add_sections, pipeline_cards
from tidewheel.report.training_plots import CATEGORIES, COUNTED, clock_figure, loss_figure, time_bar, worker_names
from tidewheel.storage import Store
from tidewheel.train.metrics.hidden import examine

logger = logging.getLogger(__name__)

SECRET = re.compile(r"secret|passw|credential|api_?key|access_?key|authori[sz]ation|(^|_)token$", re.I)
MAX_EVENTS = 200
BADGES = {**dict.fromkeys(("node_lost", "failure", "worker_left_out", "checkpoint_refused", "guard", "rollback",
                           "hang", "corruption"), "bad"),
          **dict.fromkeys(("node_joined", "worker_readmitted", "finish"), "good")}
DAY = 86_400


@dataclass
class _Run:
    """The files of a run's folder, as far as they exist."""

    place: Store
    run: dict[str, Any]
    result: dict[str, Any]
    metrics: list[dict[str, Any]]
    ledger: list[dict[str, Any]]
    events: list[Event]
    pipeline: dict[str, Any]
    output: Store | None
    """Output of the pipeline."""
    checkpoints: list[str]
    answers: list[dict[str, Any]]

    @property
    def config(self) -> dict[str, Any]:
        return self.run.get("config", {})

    def last(self, key: str) -> Any:
        """Return the newest value of a metric, or None."""
        return next((line[key] for line in reversed(self.metrics) if line.get(key) is not None), None)


def write_run_report(run_uri: str, pipeline_uri: str | None = None) -> str:
    """Write report.html into a run's folder, and return its URI. The run may be unfinished.

    Args:
        run_uri: the run's folder.
        pipeline_uri: output of the run's pipeline; default: taken from the shard set that the run reads.

    Raises:
        StorageError: there is no run.json, or a file is damaged.
    """
    logger.debug("writing the report of %s", run_uri)
    read = _read(storage.store(run_uri), pipeline_uri)
    audit, audit_error = _audit(run_uri)
    page = Page(f"Run {read.run.get('id') or run_uri.rstrip('/').rpartition('/')[2]}", _status(read),
                subtitle=_subtitle(read))
    page.headline(_cards(read, audit, audit_error))
    page.section("What went wrong, and what to do", *explained.section(_account(read)), note=explained.NOTE)
    page.section("Loss", loss_figure(read.metrics, marks(read.events), _references(read), bad_steps(read.events)),
                 _reading(read),
                 note="Training loss (thin: each step, thick: smoothed), validation loss, and the entropies of the "
                      "same validation text. Red dots are steps that a guard noticed. Speed and number of workers are "
                      "below.")
    page.section("Loss by source", *sources.section(read.metrics), note=sources.NOTE)
    page.section("Validation", *validation.section(read.metrics), note=validation.NOTE)
    page.section("Answers", *answers.section(read.answers), note=answers.NOTE)
    page.section("Tasks", *tasks.section(read.metrics), note=tasks.NOTE)
    page.section("Rollouts", *_rollouts(run_uri, read), note=rollouts.NOTE)
    page.section("Experts", *experts.section(read.metrics), note=experts.NOTE)
    page.section("By the clock", clock_figure(read.metrics, marks(read.events), _saves(read), read.ledger),
                 note="The line falls back where steps were repeated after a failure. Below it are the number of "
                      "workers, checkpoints as dots, and a row for each worker, coloured by where its time went.")
    page.section("Where the time went", *_time(read),
                 note="Each second of each worker is in one category. Communication: a step waits for other workers, "
                      "and computes nothing meanwhile.")
    page.section("What each event cost", _disturbances(read),
                 note="The pause is the longest time without a step. The cost is worker time, over all workers.")
    page.section("Events", _events(read.events),
                 note="Cost: worker seconds lost until the next event, from the ledger.")
    page.section("Audit", _audit_block(audit, audit_error))
    if read.result.get("sample"):
        page.section("Text sample", tag("blockquote", printable_lines(str(read.result["sample"]))),
                     note="Written by the trained model.")
    page.section("Texts while it trained", *validation.samples(read.metrics))
    page.section("Lineage", *lineage.section(read.run), note=lineage.NOTE)
    page.section("Mixture", *mixture.section(read.run.get("data", {}).get("mixture") or {}), note=mixture.NOTE)
    if read.pipeline and read.output is not None:
        page.section("Data", pipeline_cards(read.pipeline))
        add_sections(page, read.pipeline, read.output)
    page.section("Configuration", *_configuration(read))
    read.place.write("report.html", page.render())
    return read.place.at("report.html")


def _rollouts(run_uri: str, read: _Run) -> list[Html]:
    """Return the blocks about rollouts; [] for a run that makes none."""
    if not read.config.get("rollouts"):
        return []
    from tidewheel.post.ledger import LOG
    from tidewheel.post.reading import step_rollouts

    log = jsonlog.read(read.place, LOG)
    newest = step_rollouts(run_uri)[1] if any(line.get("kind") == "step" for line in log) else []
    return rollouts.section(log, read.metrics, newest)


def _read(run_store: Store, pipeline_uri: str | None) -> _Run:
    try:
        run = run_store.read_json("run.json")
    except FileNotFoundError:
        raise StorageError("no run.json: this is not the folder of a run", where=run_store.uri,
                           fix="give runs/<id>, the folder that `tidewheel train` names") from None
    metrics = sorted(jsonlog.read(run_store, "metrics.jsonl"), key=lambda line: line.get("time", 0))
    records = jsonlog.read(run_store, "events.jsonl")
    ledger = _ledger(jsonlog.read(run_store, "ledger.jsonl"), records)
    events = read_events(records, metrics, ledger)
    result = run_store.read_json("result.json") if run_store.exists("result.json") else {}
    names = sorted({entry.key.split("/")[1] for entry in run_store.list("checkpoints")
                    if entry.key.endswith("/manifest.json")})
    return _Run(run_store, run, result, metrics, ledger, events, *_pipeline(run, pipeline_uri), names,
                jsonlog.read(run_store, "answers.jsonl"))


def _ledger(records: list[dict[str, Any]], events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the ledger with its gaps filled: no worker exists to record restarts and detection."""
    from tidewheel.train.time_ledger import summarise

    complete = [part for part in records if {"rank", "generation", "category", "start", "end"} <= part.keys()]
    return list(summarise(complete, [event for event in events if {"time", "kind", "detail"} <= event.keys()]).records)


def _pipeline(run: dict[str, Any], uri: str | None) -> tuple[dict[str, Any], Store | None]:
    """Return the pipeline's summary and output, or ({}, None) if the run reads shards from elsewhere."""
    shards = run.get("data", {}).get("shards", {}).get("uri") or run.get("config", {}).get("data", {}).get("uri") or ""
    pipeline_uri = uri or (shards.rstrip("/").rpartition("/")[0] if "/" in shards else "")
    if not pipeline_uri:
        return {}, None
    try:
        output = storage.store(pipeline_uri)
        return output.read_json("summary.json"), output
    except (FileNotFoundError, StorageError):
        if uri:
            raise StorageError("no readable summary.json of a pipeline", where=pipeline_uri,
                               fix="give what `tidewheel data run` wrote (--output), or leave it out") from None
        return {}, None


# -- head --------------------------------------------------------------------------------------


def _status(read: _Run) -> Html:
    steps, planned = read.result.get("steps") or read.last("step") or 0, read.config.get("steps")
    if read.result and (not planned or steps >= planned):
        return badge("finished", "good")
    return badge(f"unfinished: step {steps}" + (f" of {planned}" if planned else ""), "warm")


def _subtitle(read: _Run) -> str:
    parts = []
    if read.run.get("started"):
        parts.append("started " + time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(read.run["started"])))
    if read.run.get("parameters"):
        parts.append(f"{count(read.run['parameters'])} parameters")
    parts += [f"{name} {read.run[key][:12]}" for name, key in (("recipe", "recipe_hash"), ("commit", "commit"))
              if read.run.get(key)]
    return " · ".join(parts)


def _cards(read: _Run, audit: Any, audit_error: str) -> Html:
    validation = read.result.get("validation_loss") or read.last("validation_loss")
    bigram = read.pipeline.get("ngram_entropy", {}).get("bigram_model")
    items = []
    if validation is not None:
        beats = bigram is not None and validation < bigram
        items.append(("Validation loss", f"{validation:.3f}", _beside(read), "good" if beats else ""))
    elif read.last("loss") is not None and not read.config.get("rollouts"):  # a policy's loss says nothing: see rewards
        items.append(("Training loss", f"{read.last('loss'):.3f}", "nats per token, last step", ""))
    if audit is not None:
        items.append(("Audit", "exact" if audit.ok else f"{len(audit.mismatches)} wrong",
                      f"{audit.sequences:,} sequences as planned, steps redone: {audit.redone}" if audit.ok
                      else "the run did not read what was planned", "good" if audit.ok else "bad"))
    elif audit_error:
        items.append(("Audit", "–", shorten(audit_error, 80), ""))
    parts, goodput = _parts(read.ledger)
    if goodput is not None:
        items.append(("Goodput", f"{100 * goodput:.1f} %", f"of {seconds(sum(parts.values()))} worker time", ""))
    tokens = read.result.get("tokens") or read.last("tokens")
    speed = [line["tokens_per_second"] for line in read.metrics if line.get("tokens_per_second")]
    median = f"{count(sorted(speed)[len(speed) // 2])} per second, median" if speed else ""
    items.append(("Tokens", count(tokens), median, ""))
    items.append(("Steps", f"{read.result.get('steps') or read.last('step') or 0:,}",
                  f"in {seconds(read.result['seconds'])}" if read.result.get("seconds") else "so far", ""))
    workers, changes = _workers(_sizes(read))
    kept = f"{len(read.checkpoints)} checkpoints kept" if read.checkpoints else ""
    items.append(("Workers", workers, "; ".join(filter(None, [changes, kept])), ""))
    return cards(items)


def _beside(read: _Run) -> str:
    entropy = read.pipeline.get("ngram_entropy", {})
    known = [f"{name} {entropy[name]:.2f}" for name in ("unigram", "bigram") if _number(entropy.get(name))]
    return f"nats per token; entropy: {', '.join(known)}" if known else "nats per token"


def _references(read: _Run) -> dict[str, float]:
    """Return reference lines for the loss figure: the loss of models that count tokens, or pairs of tokens."""
    entropy = read.pipeline.get("ngram_entropy", {})
    named = {"unigram entropy": "unigram", "bigram entropy": "bigram", "bigram model": "bigram_model"}
    return {name: float(entropy[key]) for name, key in named.items() if _number(entropy.get(key))}


def _reading(read: _Run) -> Html | None:
    """Return a note that explains the reference lines."""
    entropy = read.pipeline.get("ngram_entropy", {})
    if not _number(entropy.get("bigram")):
        return None
    fit = ", ".join(f"{name} {entropy[key]:.3f}" for name, key in
                    (("unigram", "unigram_model"), ("bigram", "bigram_model")) if _number(entropy.get(key)))
    return note("The entropies use the validation text's own counts, which no model has seen. On a small split no "
                "model reaches the bigram entropy. A fair comparison uses counts from the training text"
                + (f": {fit}." if fit else "."))


def _workers(sizes: list[int]) -> tuple[str, str]:
    """Return "2 → 1 → 2", or for many changes the first and the last size, and the number of changes."""
    if len(sizes) <= 5:
        return " → ".join(map(str, sizes)) or "–", ""
    return f"{sizes[0]} … {sizes[-1]}", f"{len(sizes) - 1} changes, between {min(sizes)} and {max(sizes)}"


def _sizes(read: _Run) -> list[int]:
    """Return the world sizes in order of appearance."""
    sizes = [int(line["world_size"]) for line in read.metrics if line.get("world_size")]
    return [size for at, size in enumerate(sizes) if at == 0 or size != sizes[at - 1]]


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


# -- time and events ---------------------------------------------------------------------------


def _parts(ledger: list[dict[str, Any]]) -> tuple[dict[str, float], float | None]:
    """Return worker seconds by category, and the share of steps that count (None for an empty ledger)."""
    parts = dict.fromkeys(CATEGORIES, 0.0)
    for part in ledger:
        parts[part["category"]] = parts.get(part["category"], 0.0) + part["end"] - part["start"]
    whole = sum(parts.values())
    return parts, sum(parts[name] for name in COUNTED) / whole if whole else None


def _time(read: _Run) -> list[Html]:
    parts, goodput = _parts(read.ledger)
    if goodput is None:
        return []
    names = worker_names(read.ledger)
    by_node: dict[str, dict[str, float]] = {name: dict.fromkeys(CATEGORIES, 0.0) for name in names.values()}
    for part in read.ledger:
        node = by_node[names[str(part.get("node", ""))]]
        node[part["category"]] = node.get(part["category"], 0.0) + part["end"] - part["start"]
    used = [name for name in CATEGORIES if parts.get(name)]
    rows = [(tag("span", node, title=full), *(seconds(spent[name]) if spent[name] else "–" for name in used),
             seconds(sum(spent.values())), percent(sum(spent[name] for name in COUNTED), sum(spent.values())))
            for (full, node), spent in zip(names.items(), by_node.values()) if any(spent.values())]
    head = ["worker", *(name.replace("_", " ") for name in used), "all", "goodput"]
    found = examine(parts, read.config, read.metrics)
    advice = [tag("p", f"{found.detail}. What helps: {found.fix}.")] if found is not None and found.fix else []
    return [time_bar(parts), *advice, tag("h3", "By node"), table(head, rows, numeric=range(1, len(head)))]


def _account(read: _Run) -> accounts.Account:
    """Return what went wrong so far, with the run's health at present."""
    now = time.time()
    state = accounts.present_health(read.place, read.result, read.events, read.metrics, now)
    return accounts.of(read.place.uri, read.run, state, read.events, read.metrics, read.ledger,
                       accounts.history_of(read.place.uri, read.run, now))


def _disturbances(read: _Run) -> Html:
    all_disturbances = disturbances(read.events, read.metrics)
    return disturbance_table(all_disturbances, read.events[0].time) if len(all_disturbances) > 1 else Html("")


def _saves(read: _Run) -> list[float]:
    return [event.time for event in checkpoints(read.events)]


def _events(events: list[Event]) -> Html:
    """Return a row per event; all saves are one row."""
    if not events:
        return Html("")
    begin = events[0].time
    shown = [event for event in events if event.kind not in QUIET]
    rows: list[tuple[Any, ...]] = [
        (seconds(event.time - begin), f"{event.step:,}",
         badge(event.kind.replace("_", " "), BADGES.get(event.kind, "")),
         _detail(event.detail), _cost(event.cost)) for event in shown[:MAX_EVENTS]]
    saves = checkpoints(events)
    if saves:
        cost: dict[str, float] = {}
        for event in events:
            for name, amount in event.cost.items() if event.kind in QUIET else ():
                cost[name] = cost.get(name, 0.0) + amount
        rows.append(("", "", badge("save"), f"{len(saves)} checkpoints, steps {saves[0].step:,} to {saves[-1].step:,}",
                     _cost(cost)))
    return table(("time", "step", "event", "detail", "cost"), rows, numeric=(0, 1))


def _detail(detail: dict[str, Any]) -> str:
    shown = {key: value for key, value in detail.items()
             if key not in ("step", "rank") and value not in (None, "", [], {})}
    return shorten(", ".join(f"{key.replace('_', ' ')} {_value(value)}" for key, value in shown.items()), 240) or "–"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{20,}", value):
        return value[:8]  # node and content hashes
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _cost(cost: dict[str, float]) -> Html | str:
    if sum(cost.values()) < 0.05:
        return "–"
    parts = ", ".join(f"{name.replace('_', ' ')} {seconds(amount)}" for name, amount in
                      sorted(cost.items(), key=lambda item: -item[1]) if amount >= 0.05)
    return join([tag("strong", seconds(sum(cost.values()))), f" ({parts})"])


# -- audit and configuration -------------------------------------------------------------------


def _audit(run_uri: str) -> tuple[Any, str]:
    """Return (result, ""), or (None, the reason why there is no result)."""
    try:
        from tidewheel.train.audit import audit

        return audit(run_uri), ""
    except (TidewheelError, FileNotFoundError) as error:
        return None, str(error).partition("\n")[0]
    except (KeyError, TypeError, ImportError) as error:
        return None, f"the run's files are not complete enough for an audit ({type(error).__name__}: {error})"


def _audit_block(audit: Any, error: str) -> Html:
    if audit is None:
        return note(f"Not audited: {error}")
    lines = [line for line in audit.summary().split("\n") if line]
    return join([tag("p", badge("exact", "good") if audit.ok else badge("wrong", "bad")), tag("pre", "\n".join(lines))])


def _configuration(read: _Run) -> list[Html]:
    """Return resolved settings, versions and paths, folded, without secrets."""
    versions = read.run.get("versions", {})
    blocks = [details("Resolved settings", tag("pre", _yaml(redact(read.config)))) if read.config else Html("")]
    if versions:
        blocks.append(details("Versions", table(("package", "version"), sorted(versions.items()))))
    rest = {key: value for key, value in read.run.items() if key not in ("config", "versions")}
    blocks.append(details("This run", tag("pre", _yaml(redact(rest)))))
    if read.checkpoints:
        blocks.append(details("Checkpoints", tag("p", *(join([tag("code", name), " "]) for name in read.checkpoints))))
    return [columns(*(tag("div", block) for block in blocks if block))] if not read.config else blocks


def redact(value: Any, key: str = "") -> Any:
    """Replace secrets in a value: settings whose name says that they are secret, and passwords in URIs."""
    if isinstance(value, dict):
        return {name: redact(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list):
        return [redact(inner, key) for inner in value]
    if SECRET.search(key) and value not in (None, "", False, True):
        return "•••"
    return re.sub(r"://[^/@\s]+@", "://•••@", value) if isinstance(value, str) else value


def _yaml(value: Any) -> str:
    import yaml

    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=110)
