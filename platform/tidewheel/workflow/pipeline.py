"""`tw.Pipeline`: a data pipeline written in Python. Whatever a YAML file can say, this can, with the same hash."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tidewheel.config import build
from tidewheel.errors import ConfigError
from tidewheel.workflow.steps import REFERENCE, Tokenizer

if TYPE_CHECKING:
    from tidewheel.data.config import PipelineConfig
    from tidewheel.data.filter import Filter
    from tidewheel.data.pipeline import PipelineSummary


@dataclass(frozen=True)
class Pipeline:
    """A chain of steps; every method returns a longer chain and leaves this one as it was.

    Args:
        name: name of the pipeline, used in paths and reports.
        options: other top-level settings: seed, partitions, max_bad_fraction, placement.
    """

    name: str
    options: tuple[tuple[str, Any], ...] = ()
    source: tuple[tuple[str, Any], ...] = ()
    steps: tuple[dict[str, Any], ...] = ()
    tokenizer: Tokenizer | None = None

    def set(self, **options: Any) -> Pipeline:
        """Top-level settings: seed, partitions, max_bad_fraction, placement={"groups": ["data"]}."""
        return replace(self, options=(*self.options, *options.items()))

    def read(self, *paths: str, **fields: Any) -> Pipeline:
        """Read documents from files that match `paths` (with *, **, ?); `fields` name their keys (text=, id=, ...).

        `format` takes a `tw.Reader` of your own, too.

        Raises:
            ConfigError: it is not at the top of a module, where workers can find it.
        """
        from tidewheel.data.reader import Reader
        from tidewheel.parts import as_json, importable, name_of

        values = dict(fields)
        if isinstance(given := values.get("format"), Reader):
            importable(name_of(type(given)), "Pipeline.read")
            values["format"] = as_json(given)
        return replace(self, source=(("paths", list(paths)), *values.items()))

    def filter(self, *filters: Filter | Callable[[Mapping[str, Any]], bool | str],
               annotate: bool = False) -> Pipeline:
        """Drop or edit documents by rules on each alone, in the recipe's order of filters.

        Args:
            filters: of `tw.filters`, `tw.Filter` objects of your own, or functions that take a document (a mapping
                with id, text, source and meta) and return True, False or the reason to drop it.
            annotate: drop and edit nothing; statistics and would-be reasons go to `annotations/`.

        Raises:
            ConfigError: a filter of your own is not at the top of a module, where workers can find it; or one is given
                twice.
        """
        values: dict[str, Any] = {}
        for given in filters:
            name, settings = _named(given)
            if name in values:
                raise ConfigError(f"{name} is given twice in one step", where="Pipeline.filter",
                                  mend="give it once, or in two steps")
            values[name] = settings
        return self._with("filter", {**values, "annotate": True} if annotate else values)

    def dedup_url(self, **settings: Any) -> Pipeline:
        """Keep one of the documents whose URLs have the same normal form."""
        return self._with("dedup_url", settings)

    def dedup_exact(self, **settings: Any) -> Pipeline:
        """Keep one of the documents whose normalised text is the same."""
        return self._with("dedup_exact", settings)

    def dedup_near(self, **settings: Any) -> Pipeline:
        """Keep one of the documents whose sets of shingles are similar (MinHash LSH, verified)."""
        return self._with("dedup_near", settings)

    def dedup_lines(self, **settings: Any) -> Pipeline:
        """Cut out lines or paragraphs that other documents have too; the rest of the document stays."""
        return self._with("dedup_lines", settings)

    def decontaminate(self, *evals: str, **settings: Any) -> Pipeline:
        """Find documents that contain items of the evaluation sets in `evals` (JSONL files, folders, patterns).

        They are dropped, or with `action` cut or only told of; `fail_above=0.001` makes it a gate."""
        return self._with("decontaminate", {"evals": list(evals), **settings})

    def tokenize(self, file: str | Tokenizer | None = None, **settings: Any) -> Pipeline:
        """Tokenize with `file` (tokenizer.json), with one trained here, tokenize(train={"vocabulary_size": ...}),
        or, in a workflow, with what a `tw.Tokenizer` makes."""
        if isinstance(file, Tokenizer):
            return replace(self, tokenizer=file)._with("tokenize", {"file": f"{REFERENCE}{file.name}", **settings})
        return self._with("tokenize", {"file": file, **settings} if file else settings)

    def pack(self, **settings: Any) -> Pipeline:
        """Pack tokens into sequences of `sequence_length`, without losing one, and write the shards."""
        return self._with("pack", settings)

    def write(self, *formats: str, **settings: Any) -> Pipeline:
        """Write the documents for other tools: parquet (the default), jsonl, arrow, mds; megatron behind `tokenize`."""
        return self._with("write", {"formats": list(formats), **settings} if formats else settings)

    def _with(self, name: str, settings: dict[str, Any]) -> Pipeline:
        return replace(self, steps=(*self.steps, {name: settings}))

    def config(self) -> PipelineConfig:
        """The validated configuration; ConfigError when a step or setting is unknown or missing."""
        from tidewheel.data.config import PipelineConfig

        values = {"name": self.name, **dict(self.options), "read": dict(self.source), "steps": list(self.steps)}
        return build(PipelineConfig, values, where=f"Pipeline({self.name!r})")

    def inputs(self) -> dict[str, Any]:
        """Steps of a workflow that it reads, by role."""
        return {"tokenizer": self.tokenizer} if self.tokenizer is not None else {}

    def entry(self) -> dict[str, Any]:
        """What a workflow writes down about it; see `steps`."""
        return {"kind": "pipeline", "name": self.name, "config": self.config().canonical()}

    def recipe_hash(self) -> str:
        """Equal to that of a YAML file that says the same."""
        return self.config().recipe_hash()

    def run(self, output: str, *, input: str = ".", address: str | None = None,
            may_replace: bool = False) -> PipelineSummary:
        """Run on Ray and write shards, verdicts, quarantine and summary below `output`; resumes by itself. With
        `may_replace` what another recipe has made there is replaced."""
        if self.tokenizer is not None:
            raise ConfigError(f"its tokenizer is made by the step {self.tokenizer.name!r}",
                              where=f"Pipeline({self.name!r})", mend="run it in a tw.Workflow")
        from tidewheel.cluster.session import session
        from tidewheel.data import pipeline
        from tidewheel.data.progress import stage_bars
        from tidewheel.stopping import stopping

        config = self.config()
        with stage_bars(pipeline.stages(config)) as on_progress, stopping(), session(address):
            return pipeline.run(config, input=input, output=output, on_progress=on_progress,
                                may_replace=may_replace)


def _named(given: Any) -> tuple[str, dict[str, Any]]:
    """Return a filter's name and settings."""
    from tidewheel.data.filter import Filter
    from tidewheel.parts import importable, name_of

    where = "Pipeline.filter"
    if isinstance(given, Filter):
        return importable(name_of(type(given)), where), given.settings()
    if callable(given) and hasattr(given, "__qualname__") and not isinstance(given, type):
        return importable(f"{given.__module__}:{given.__qualname__}", where), {}
    raise ConfigError(f"{given!r} is no filter", where=where,
                      mend="give one of tw.filters, a tw.Filter with its settings, or a function of one document")
