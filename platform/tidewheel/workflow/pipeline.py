"""`tw.Pipeline`: a data pipeline written in Python. It says what a YAML recipe says, and has the same recipe hash."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Unpack

from tidewheel.config import Setting, build
from tidewheel.errors import ConfigError
from tidewheel.workflow.steps import REFERENCE, Tokenizer, WorkflowStep

if TYPE_CHECKING:
    from tidewheel.data.config import PipelineConfig
    from tidewheel.data.filter import Document, Filter
    from tidewheel.data.pipeline_summary import PipelineSummary
    from tidewheel.workflow.step_settings import (
        DecontaminateSettings,
        DedupLinesSettings,
        DedupNearSettings,
        PackSettings,
        PipelineOptions,
        ReadSettings,
        TokenizeSettings,
        WriteSettings,
    )


@dataclass(frozen=True)
class Pipeline:
    """A chain of steps. Every method returns a longer chain and leaves this one unchanged.

    Args:
        name: name of the pipeline, used in paths and reports.
        options: top-level settings, as `set` adds them.
        source: settings of `read`.
        steps: each step's name with its settings.
        tokenizer: the workflow step that trains the tokenizer, if one does.
    """

    name: str
    options: tuple[tuple[str, object], ...] = ()
    source: tuple[tuple[str, object], ...] = ()
    steps: tuple[Mapping[str, Mapping[str, object]], ...] = ()
    tokenizer: Tokenizer | None = None

    def set(self, **options: Unpack[PipelineOptions]) -> Pipeline:
        """Change top-level settings.

        Args:
            options: `seed`, `partitions`, `max_bad_fraction` and `placement`, {"groups": ["data"]}.
        """
        return replace(self, options=(*self.options, *options.items()))

    def read(self, *paths: str, **settings: Unpack[ReadSettings]) -> Pipeline:
        """Read documents from files.

        Args:
            paths: files, or patterns with `*`, `**` and `?`; relative ones are below the pipeline's input.
            settings: the fields of a record (`text`, `id`, `source`, ...), and how to read. `format` also takes a
                `tw.Reader` of your own.

        Raises:
            ConfigError: your reader is not at the top of a module, where workers can find it.
        """
        from tidewheel.data.reader import Reader
        from tidewheel.parts import as_json, importable, name_of

        values: dict[str, object] = {**settings}
        if isinstance(reader := values.get("format"), Reader):
            importable(name_of(type(reader)), "Pipeline.read")
            values["format"] = as_json(reader)
        return replace(self, source=(("paths", list(paths)), *values.items()))

    def filter(self, *filters: Filter | Callable[[Document], bool | str],
               annotate: bool = False) -> Pipeline:
        """Drop or edit documents by rules that look at one document at a time, in the recipe's order of filters.

        Args:
            filters: filters of `tw.filters`, `tw.Filter` objects of your own, or functions that take a document (a
                mapping with id, text, source and meta) and return True, False or the reason to drop it.
            annotate: drop and edit nothing; write statistics and would-be reasons to `annotations/`.

        Raises:
            ConfigError: a filter of your own is not at the top of a module, where workers can find it, or one is given
                twice.
        """
        values: dict[str, object] = {}
        for filter in filters:
            name, settings = _name_and_settings(filter)
            if name in values:
                raise ConfigError(f"{name} is given twice in one step", where="Pipeline.filter",
                                  fix="give it once, or in two steps")
            values[name] = settings
        return self._with("filter", {**values, "annotate": True} if annotate else values)

    def dedup_url(self) -> Pipeline:
        """Keep one of the documents whose URLs have the same normal form."""
        return self._with("dedup_url", {})

    def dedup_exact(self) -> Pipeline:
        """Keep one of the documents with the same normalised text."""
        return self._with("dedup_exact", {})

    def dedup_near(self, **settings: Unpack[DedupNearSettings]) -> Pipeline:
        """Keep one of the documents with similar sets of shingles (MinHash LSH, each pair verified)."""
        return self._with("dedup_near", settings)

    def dedup_lines(self, **settings: Unpack[DedupLinesSettings]) -> Pipeline:
        """Cut out lines or paragraphs that other documents contain too, and keep the rest of the document."""
        return self._with("dedup_lines", settings)

    def decontaminate(self, *evals: str, **settings: Unpack[DecontaminateSettings]) -> Pipeline:
        """Drop, cut or report documents that contain items of evaluation sets.

        Args:
            evals: JSONL files, folders or patterns with the evaluation items.
            settings: `action` says what happens to such a document; `fail_above=0.001` fails the run when a larger
                share of the documents contains items.
        """
        return self._with("decontaminate", {"evals": list(evals), **settings})

    def tokenize(self, file: str | Tokenizer | None = None, **settings: Unpack[TokenizeSettings]) -> Pipeline:
        """Turn text into tokens.

        Args:
            file: a tokenizer file such as tokenizer.json, or in a workflow the `tw.Tokenizer` that trains it. Without
                one, `train={"vocabulary_size": ...}` trains a tokenizer on the documents of this pipeline.
            settings: special tokens, chat template and the like.
        """
        if isinstance(file, Tokenizer):
            return replace(self, tokenizer=file)._with("tokenize", {"file": f"{REFERENCE}{file.name}", **settings})
        return self._with("tokenize", {"file": file, **settings} if file else settings)

    def pack(self, **settings: Unpack[PackSettings]) -> Pipeline:
        """Pack all tokens into rows of `sequence_length` tokens, and write the shards."""
        return self._with("pack", settings)

    def write(self, *formats: str, **settings: Unpack[WriteSettings]) -> Pipeline:
        """Write the documents as files that other tools read.

        Args:
            formats: parquet (the default), jsonl, arrow or mds; behind `tokenize` also megatron.
            settings: the validation split, and the size of a file.
        """
        return self._with("write", {"formats": list(formats), **settings} if formats else settings)

    def _with(self, name: str, settings: Mapping[str, object]) -> Pipeline:
        return replace(self, steps=(*self.steps, {name: dict(settings)}))

    def config(self) -> PipelineConfig:
        """Return the validated configuration.

        Raises:
            ConfigError: a step or setting is unknown, missing or wrong.
        """
        from tidewheel.data.config import PipelineConfig

        values = {"name": self.name, **dict(self.options), "read": dict(self.source), "steps": list(self.steps)}
        return build(PipelineConfig, values, where=f"Pipeline({self.name!r})")

    def inputs(self) -> dict[str, WorkflowStep]:
        """Return the workflow steps that this one reads, by role."""
        return {"tokenizer": self.tokenizer} if self.tokenizer is not None else {}

    def entry(self) -> dict[str, Setting]:
        """Return the step as JSON values, as a workflow records it; see `steps`."""
        return {"kind": "pipeline", "name": self.name, "config": self.config().canonical()}

    def recipe_hash(self) -> str:
        """Return the recipe hash, which equals that of a YAML recipe with the same settings."""
        return self.config().recipe_hash()

    def run(self, output: str, *, input: str = ".", address: str | None = None,
            may_replace: bool = False) -> PipelineSummary:
        """Run on Ray. A second run resumes the first.

        Args:
            output: URI below which shards, verdicts, quarantine and summary are written.
            input: URI that relative paths are below.
            address: address of the Ray cluster; None: a local one, or the one that RAY_ADDRESS names.
            may_replace: replace what another recipe wrote to `output`.

        Raises:
            ConfigError: a setting is wrong, or the tokenizer is another step's, so that a workflow must run it.
            StorageError: `output` cannot be used, or another recipe wrote it.
            InputError: the input cannot be read, or too many records are bad.
        """
        if self.tokenizer is not None:
            raise ConfigError(f"the step {self.tokenizer.name!r} makes its tokenizer",
                              where=f"Pipeline({self.name!r})", fix="run it in a tw.Workflow")
        from tidewheel.cluster.session import session
        from tidewheel.data import pipeline
        from tidewheel.data.progress import stage_bars
        from tidewheel.stopping import stopping

        config = self.config()
        with stage_bars(pipeline.stages(config)) as on_progress, stopping(), session(address):
            return pipeline.run(config, input=input, output=output, on_progress=on_progress,
                                may_replace=may_replace)


def _name_and_settings(filter: object) -> tuple[str, dict[str, object]]:
    """Return a filter's name in a recipe, and its settings."""
    from tidewheel.data.filter import Filter
    from tidewheel.parts import importable, name_of

    where = "Pipeline.filter"
    if isinstance(filter, Filter):
        return importable(name_of(type(filter)), where), filter.settings()
    if callable(filter) and hasattr(filter, "__qualname__") and not isinstance(filter, type):
        return importable(f"{filter.__module__}:{filter.__qualname__}", where), {}
    raise ConfigError(f"{filter!r} is not a filter", where=where,
                      fix="give one of tw.filters, a tw.Filter with its settings, or a function of one document")
