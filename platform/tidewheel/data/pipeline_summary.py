"""What a finished pipeline reports: the content of its `summary.json`, and the tables that commands print from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tidewheel.parts import is_own


@dataclass(frozen=True)
class PipelineSummary:
    """Counts of a finished pipeline.

    Args:
        value: content of `summary.json`.
        output: URI of the pipeline's output.
    """

    value: dict[str, Any]
    output: str

    @property
    def recipe_hash(self) -> str:
        """Hash of the resolved recipe."""
        return self.value["recipe_hash"]

    @property
    def documents(self) -> int:
        """Documents in the training set; of a recipe without `pack`, documents that `write` published."""
        return self.value["documents"]

    @property
    def tokens(self) -> int:
        """Tokens in the training set."""
        return self.value["tokens"]

    def stage(self, name: str) -> dict[str, Any]:
        """Return the counts of one stage.

        Raises:
            KeyError: the pipeline has no stage of this name.
        """
        return {entry["name"]: entry for entry in self.value["stages"]}[name]

    @property
    def skipped(self) -> dict[str, int]:
        """Number of skipped files of source trees, by reason."""
        return dict(self.value.get("skipped", {}))

    def sets(self) -> list[dict[str, str]]:
        """Return a table row for the training set and one for the validation set; none if nothing is packed."""
        if "rows" not in self.value:
            return []
        return [{"set": name, "documents": f"{values['documents']:,}", "tokens": f"{values['tokens']:,}",
                 "rows": f"{values['rows']:,}", "filled": f"{values['utilisation']:.1%}" if values["rows"] else "-"}
                for name, values in (("training", self.value), ("validation", self.value["validation"]))]

    def rows(self) -> list[dict[str, str]]:
        """Return a table row for each stage."""
        return [{
            "stage": entry["name"], "in": f"{entry['documents_in']:,}", "out": f"{entry['documents_out']:,}",
            "dropped": f"{sum(entry['dropped'].values()):,}", "edited": f"{entry['edited']:,}",
            "quarantined": f"{entry['quarantined']:,}",
            "units": f"{entry['units']}", "reused": f"{entry['units_reused']}", "seconds": f"{entry['seconds']:.1f}",
        } for entry in self.value["stages"]]

    def filter_speeds(self) -> list[dict[str, str]]:
        """Return a table row for each filter that was applied, slowest first.

        The table is empty if the recipe has no filters of the user's own, or if every unit was published before.
        """
        costs = [(stage["name"], cost) for stage in self.value["stages"] for cost in stage.get("filters", ())]
        if not any(is_own(cost["name"]) for _, cost in costs):
            return []
        rates = [(cost["documents"] / max(cost["seconds"], 1e-9), stage, cost) for stage, cost in costs]
        return [{"filter": cost["name"], "stage": stage, "documents": f"{cost['documents']:,}",
                 "documents a second on a core": f"{rate:,.0f}"}
                for rate, stage, cost in sorted(rates, key=lambda row: row[0])]

    def most_frequent_reasons(self) -> list[str]:
        """Return a line for each stage that drops documents for several reasons: the three most frequent ones."""
        lines = []
        for entry in self.value["stages"]:
            counts = sorted(entry["dropped"].items(), key=lambda item: (-item[1], item[0]))
            if len(counts) < 2:
                continue
            frequent = ", ".join(f"{reason} {count:,}" for reason, count in counts[:3])
            rest = f" and {len(counts) - 3} other reasons" if len(counts) > 3 else ""
            lines.append(f"{entry['name']} dropped most for {frequent}{rest}")
        return lines
