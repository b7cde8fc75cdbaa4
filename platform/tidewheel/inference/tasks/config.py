"""Settings of an evaluation task: the keys of a task file of lm-evaluation-harness that need no code.

The names and defaults are those of lm-evaluation-harness 0.4.13
(https://github.com/EleutherAI/lm-evaluation-harness/blob/main/docs/task_guide.md), so one file serves both programs.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic
import yaml
from pydantic import Field

from tidewheel import storage, yaml_text
from tidewheel.config import Config, build
from tidewheel.errors import ConfigError

NEEDS_CODE = ("process_docs", "process_results", "custom_dataset", "use_prompt", "doc_to_image", "doc_to_audio",
              "unsafe_code", "class")
"""Keys of lm-evaluation-harness that name Python code or other media, which a task file here cannot."""
MAX_INCLUDES = 8
Choices = str | list[str] | dict[str, str]
Template = str | int
"""A name of a field, a Jinja template, or an index."""


class MetricConfig(Config):
    """One metric of a task."""

    metric: str
    """Name of the metric."""
    aggregation: str | None = None
    """How the items' values are combined; default: the metric's own way."""
    higher_is_better: bool | None = None
    """For readers; it changes no figure."""
    ignore_case: bool = False
    """exact_match: compare in lower case."""
    ignore_punctuation: bool = False
    """exact_match: leave out ASCII punctuation."""
    ignore_numbers: bool = False
    """exact_match: leave out digits."""
    regexes_to_ignore: list[str] | None = None
    """exact_match: leave out what these regular expressions match."""


class FilterStep(Config):
    """One function of a filter."""

    function: Literal["regex", "take_first", "remove_whitespace", "lowercase", "uppercase", "map"]
    """Name of the function."""
    regex_pattern: str = r"#### (\-?[0-9\.\,]+)"
    """regex: what to find."""
    group_select: int = 0
    """regex: which of the matches to take; -1: the last."""
    fallback: str = "[invalid]"
    """regex: the answer if nothing matches."""
    mapping_dict: dict[str, Any] | None = None
    """map: what to replace answers by."""
    default_value: Any = None
    """map: what to replace other answers by."""


class FilterConfig(Config):
    """A way to make answers of generated text."""

    name: str
    """Its name in the results."""
    filter: list[FilterStep]
    """Functions, the first first."""


class GenerationConfig(Config):
    """How to generate."""

    until: list[str] | str | None = None
    """The text ends before the first of these strings; default: `fewshot_delimiter`."""
    max_gen_toks: Annotated[int, Field(gt=0, validation_alias=pydantic.AliasChoices(
        "max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"))] = 256
    """Maximum number of new tokens."""
    do_sample: bool = False
    """Sample; otherwise take the most likely token."""
    temperature: float = Field(default=0.0, ge=0)
    """Of the samples; above 0 it implies `do_sample`, unless that is false."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the fewest tokens whose probabilities sum to at least this."""
    top_k: int = Field(default=0, ge=0)
    """Sample from this number of most likely tokens; 0: from all."""

    @pydantic.model_validator(mode="after")
    def _sampled(self) -> GenerationConfig:
        if self.do_sample and not self.temperature:
            raise ValueError("do_sample is true, but temperature is 0; set a temperature, or leave do_sample out")
        return self

    def stops(self, fewshot_delimiter: str) -> list[str]:
        """Return the strings that end a text."""
        given = fewshot_delimiter if self.until is None else self.until
        return [text for text in ([given] if isinstance(given, str) else given) if text]

    @property
    def heat(self) -> float:
        """Temperature of the draws; 0: take the most likely token."""
        return self.temperature if self.do_sample or "do_sample" not in self.model_fields_set else 0.0


class FewshotConfig(Config):
    """Which examples come before an item, and their form where it differs from the item's."""

    sampler: Literal["default", "first_n"] = "default"
    """default: draw them anew for each item. first_n: always the first ones."""
    split: str | None = None
    """Split that they come from; default: `fewshot_split`."""
    samples: list[dict[str, Any]] | None = None
    """The examples themselves."""
    doc_to_text: Template | None = None
    """Default: the task's, as for all that follow."""
    doc_to_target: Template | None = None
    doc_to_choice: Choices | None = None
    target_delimiter: str | None = None
    fewshot_delimiter: str | None = None
    gen_prefix: str | None = None


class TaskConfig(Config):
    """One task. Paths of its data begin in the working folder; a path that does not exist there, beside the task."""

    task: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", max_length=128)
    """Name of the task."""
    task_alias: str | None = None
    """Not used."""
    tag: str | list[str] | None = None
    """Not used."""
    group: str | list[str] | None = None
    """Not used."""
    dataset_path: Literal["json"] = "json"
    """Kind of the data: JSON or JSONL files."""
    dataset_name: None = None
    """Not used: files have no subsets."""
    dataset_kwargs: dict[str, Any]
    """{data_files: {split: path, or list of paths}}."""
    training_split: str | None = None
    validation_split: str | None = None
    """Items to evaluate if there is no test split."""
    test_split: str | None = None
    """Items to evaluate."""
    fewshot_split: str | None = None
    """Split of the examples; default: the first of training, validation and test that there is."""
    output_type: Literal["multiple_choice", "loglikelihood", "loglikelihood_rolling", "generate_until"] = \
        "generate_until"
    """What the model is asked."""
    doc_to_text: Template = ""
    """The prompt of an item: a name of a field, or a Jinja template; an index into the choices if they are prompts."""
    doc_to_target: Template | list[str]
    """The right answer: its text, or its index among the choices."""
    doc_to_choice: Choices | None = None
    """The choices: a name of a field, a Jinja template that gives a list, or the list."""
    description: str = ""
    """Text before everything else."""
    target_delimiter: str = " "
    """Between a prompt and an answer."""
    fewshot_delimiter: str = "\n\n"
    """Between examples."""
    fewshot_config: FewshotConfig = FewshotConfig()
    """Settings of the examples."""
    num_fewshot: int | None = Field(default=None, ge=0)
    """Number of examples."""
    gen_prefix: str | None = None
    """Beginning of the answer, which the prompt ends with."""
    generation_kwargs: GenerationConfig = GenerationConfig()
    """How to generate."""
    repeats: Literal[1] = 1
    """Each item is answered once."""
    metric_list: list[MetricConfig] | None = None
    """Metrics; default: those of lm-evaluation-harness for the output type."""
    filter_list: list[FilterConfig] | None = None
    """Filters of generated text; default: the text itself."""
    should_decontaminate: bool = False
    """Not used: `tidewheel data run` decontaminates training data."""
    doc_to_decontamination_query: str | None = None
    """Not used."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """For readers, such as {version: 1.0}."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_code(cls, values: Any) -> Any:
        for key in NEEDS_CODE if isinstance(values, dict) else ():
            if key in values:
                raise ValueError(f"{key} runs Python code or needs other media, which a task here cannot; prepare the "
                                 "data beforehand and use templates, or run the task with `tidewheel lm-eval`")
        return values

    @pydantic.model_validator(mode="after")
    def _possible(self) -> TaskConfig:
        if self.test_split is None and self.validation_split is None:
            raise ValueError("neither test_split nor validation_split is given: name the split to evaluate")
        if self.output_type == "multiple_choice" and self.doc_to_choice is None:
            raise ValueError("output_type multiple_choice needs doc_to_choice: a list, or a template that gives one")
        if self.filter_list is not None and self.output_type != "generate_until":
            raise ValueError(f"filter_list is of generated text, but output_type is {self.output_type}")
        if self.output_type == "loglikelihood_rolling" and self.num_fewshot:
            raise ValueError("loglikelihood_rolling scores whole texts and has no examples: leave num_fewshot out")
        return self

    @property
    def split(self) -> str:
        """The split that is evaluated."""
        return self.test_split or self.validation_split or ""

    @property
    def pool_split(self) -> str:
        """The split of the examples."""
        given = self.fewshot_config.split or self.fewshot_split
        return given or self.training_split or self.validation_split or self.test_split or ""


def read_task(uri: str) -> TaskConfig:
    """Read a task file. A key `include` names a file beside it whose keys it overrides.

    Raises:
        ConfigError: the file is missing, is not YAML, or a key or value in it is wrong.
    """
    values = _values(uri, MAX_INCLUDES)
    name = uri.rstrip("/").rpartition("/")[2].partition(".")[0]
    return build(TaskConfig, {"task": name, **values}, where=uri)


def _values(uri: str, includes: int) -> dict[str, Any]:
    try:
        values = yaml_text.load(storage.read_text(uri))
    except FileNotFoundError:
        raise ConfigError("there is no such task file", where=uri, fix="give the path of a YAML file") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        code = " (a `!function` is Python code, which a task here cannot run)" if "!function" in str(error) else ""
        raise ConfigError(f"not valid YAML: {getattr(error, 'problem', None) or error}{code}",
                          where=f"{uri}:{mark.line + 1}" if mark else uri, fix="correct that line") from None
    if not isinstance(values, dict):
        raise ConfigError(f"expected keys and values, found {type(values).__name__}", where=uri,
                          fix="docs/evaluation.md has an example")
    included = values.pop("include", None)
    if included is None:
        return values
    if not includes:
        raise ConfigError(f"more than {MAX_INCLUDES} files include one another", where=uri, fix="remove the circle")
    folder, _ = storage.split(uri)
    return {**_values(folder.at(storage.safe_key(str(included))), includes - 1), **values}
