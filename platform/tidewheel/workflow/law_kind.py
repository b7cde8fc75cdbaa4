"""Steps that fit a scaling law to trainings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidewheel import storage
from tidewheel.errors import ConfigError
from tidewheel.workflow.step_kind import Entry, Log, StepKind, Task, folder_hash, is_same

LAW, REPORT = "law.json", "report.html"


class ScalingLawKind(StepKind):
    """`tw.ScalingLaw`: a folder with law.json and report.html."""

    def recipe(self, entry: Entry) -> Any:
        return entry["config"]

    def content(self, entry: Entry, input: str, output: str) -> Any:
        return {}

    def place(self, output: str, entry: Entry, key: str) -> str:
        return storage.join(output, "laws", f"{entry['name']}-{key}")

    def run(self, task: Task, log: Log) -> dict[str, Any]:
        from tidewheel.plan.scaling import report
        from tidewheel.plan.scaling.fit import Observation, fit

        names, runs = [], []
        for role, uri in task.needs.items():
            run = storage.store(uri)
            started, result = run.read_json("run.json"), run.read_json("result.json")
            if result["validation_loss"] is None:
                raise ConfigError("the run has no validation loss", where=uri,
                                  fix="give its data a validation set, such as pack(validation_fraction=0.05)")
            names.append(task.entry["inputs"][role])
            runs.append(Observation(started["parameters"], result["tokens"], result["validation_loss"]))
        settings = task.entry["config"]
        fitted = fit(runs, name=task.entry["name"], confidence=settings["confidence"],
                     resamples=settings["resamples"], seed=settings["seed"])
        values = report.as_json(fitted, runs, names)
        output = storage.store(task.place)
        law = output.write_json(LAW, values)
        output.write(REPORT, report.page(values))
        log(f"E {fitted.law.e:.3f}, alpha {fitted.law.alpha:.3f}, beta {fitted.law.beta:.3f}; {output.at(REPORT)}")
        return {"hash": folder_hash(task.place), "law": values["law"], "law_hash": law.hash,
                "intervals": values["intervals"]}

    def intact(self, place: str, artifact: Mapping[str, Any]) -> bool:
        return is_same(place, LAW, artifact["law_hash"]) and storage.store(place).exists(REPORT)
