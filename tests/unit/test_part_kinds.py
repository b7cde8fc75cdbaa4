"""All kinds of parts: no module outside a part names it, and each part has three names in YAML, `--set` and Python."""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tidewheel
import tidewheel as tw
from tests.source import parsed_text
from tidewheel import engines, environments, parts, rewards, stores
from tidewheel.config import build
from tidewheel.data.config import PipelineConfig
from tidewheel.data.filter import FILTERS
from tidewheel.data.reader import READERS
from tidewheel.errors import ConfigError
from tidewheel.models import adapters, families
from tidewheel.parts import Kind, Part
from tidewheel.storage import LocalStore, store
from tidewheel.train import callbacks, compressions, objectives, optimizers, schedules, trackers
from tidewheel.train.config import TrainConfig

PACKAGE = Path(tidewheel.__file__).parent
KINDS: list[Kind[Any]] = [FILTERS, READERS, optimizers.KIND, schedules.KIND, families.KIND, objectives.KIND,
                          callbacks.KIND, trackers.KIND, rewards.KIND, stores.SCHEMES, adapters.KIND,
                          environments.KIND, engines.KIND, compressions.KIND]
COMMON_WORDS = {"constant", "linear", "regex", "urls", "language", "words", "classifier", "code", "csv", "json",
                "jsonl", "text", "tsv", "arrow", "parquet", "warc", "file"}
"""Built-in names that also mean something else. `test_layout.py` has narrower rules for filters and readers."""
ALLOWED = {
    ("storage scheme", "storage/__init__.py", "file"): "local paths are the interface's own, also as file:// URIs",
    ("storage scheme", "cli.py", "s3"): "an option of the demo: it starts a server of this protocol",
    ("storage scheme", "cluster/s3_server.py", "s3"): "the demo's server",
    ("model family", "shards/tokenizer/tiktoken_ranks.py", "gpt2"): "the tokenizer of that name",
    ("reward", "inference/tasks/metrics.py", "exact_match"): "lm-evaluation-harness's metric of that name",
    ("filter", "filters.py", ""): "the facade for editors, which a test compares with the folder",
    **{(noun, f"imports/{table}.py", ""): "a table from another tool's names to ours, which a test compares with ours"
       for noun, tables in {
           "optimizer": ("deepspeed", "megatron", "optimizer_names", "transformers"),
           "model family": ("megatron", "torchtitan"),
           "schedule": ("deepspeed", "megatron", "torchtitan", "transformers"),
           "tracker": ("deepspeed", "megatron", "torchtitan", "transformers")}.items() for table in tables},
}


def names_in(text: str) -> tuple[set[str], set[str]]:
    """Return the strings of a file without its documentation, and the modules and names that it imports."""
    tree = parsed_text(text)
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings: set[str] = set()
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            strings.add(node.value)
        elif isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return strings, imported


def named_outside(kind: Kind[Any], path: Path, text: str) -> set[str]:
    """Return the built-in parts of a kind that a file imports, or names in a string, a URI or a pattern."""
    names = "|".join(kind.built_in())
    if not re.search(rf"[\"'(|]({names})(://|[\"'|)])|{kind.package}", text):
        return set()
    strings, imported = names_in(text)
    results = {name for name in kind.built_in() if f"{kind.package}.{name}" in imported}
    for name in set(kind.built_in()) - COMMON_WORDS:
        alternative = re.compile(rf"[(|]{name}[|)]")  # of a regular expression
        if any(string in (name, f"{name}://") or alternative.search(string) for string in strings):
            results.add(name)
    allowed = {name for noun, file, name in ALLOWED if (noun, file) == (kind.noun, path.as_posix())}
    return set() if "" in allowed else results - allowed


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.noun)
def test_no_module_outside_a_part_names_it(kind: Kind[Part]):
    folder = PACKAGE.joinpath(*kind.package.split(".")[1:])
    outside = [path for path in PACKAGE.rglob("*.py") if not path.is_relative_to(folder)]
    assert len(outside) > 300
    for path in outside:
        assert not named_outside(kind, path.relative_to(PACKAGE), path.read_text()), f"{path} names a {kind.noun}"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.noun)
def test_a_module_that_names_a_part_is_found(kind: Kind[Part]):
    name = next((name for name in kind.built_in() if name not in COMMON_WORDS), kind.built_in()[0])
    anywhere = Path("train/loop.py")
    for text in (f"from {kind.package}.{name} import Anything", f"from {kind.package} import {name}",
                 f"def late():\n    import {kind.package}.{name}"):
        assert named_outside(kind, anywhere, text) == {name}
    assert named_outside(kind, anywhere, f'"""Documentation may name {name}."""') == set()
    if name not in COMMON_WORDS:
        assert named_outside(kind, anywhere, f"SPECIAL = ({name!r}, 3)") == {name}
        assert named_outside(kind, anywhere, f"x = re.compile('({name}|other)')") == {name}


@pytest.mark.parametrize(("noun", "file", "name"), sorted(ALLOWED))
def test_each_exception_is_needed(noun: str, file: str, name: str):
    (kind,) = (kind for kind in KINDS if kind.noun == noun)
    path = PACKAGE / file
    if name == "file":
        assert '"file"' in path.read_text()
    else:
        assert named_outside(kind, Path("another.py"), path.read_text())


OWN = '''
import tidewheel as tw
from tidewheel.storage import LocalStore


class MyFilter(tw.Filter):
    size: int = 1

    def apply(self, batch):
        return tw.Verdicts([""] * len(batch.texts))


class MyReader(tw.Reader):
    size: int = 1

    def records(self, stream):
        yield {"text": stream.read().decode()}


class MyOptimizer(tw.Optimizer):
    size: int = 1


class MySchedule(tw.Schedule):
    size: int = 1


class MyModel(tw.Model):
    size: int = 1
    FEED_FORWARD = tw.FeedForwardShape(inputs=1, kept=2, kept_compiled=1)

    def block(self, layer):
        raise NotImplementedError


class MyObjective(tw.Objective):
    size: int = 1


class MyCallback(tw.Callback):
    size: int = 1


class MyTracker(tw.Tracker):
    size: int = 1


class MyReward(tw.Reward):
    size: int = 1


class MyScheme(tw.Storage):
    def open(self, uri):
        return LocalStore("/tmp")


class MyAdapter(tw.Adapter):
    size: int = 1


class MyEnvironment(tw.Environment):
    size: int = 1


class MyEngine(tw.Engine):
    size: int = 1


class MyCompression(tw.Compression):
    size: int = 1
'''
NAME = "tw_test_ten_kinds"


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Iterator[str]:
    """Yield the name of a package that offers a part of each kind, laid out as pip installs it."""
    site = tmp_path_factory.mktemp("site")
    about = site / f"{NAME}-1.0.dist-info"
    about.mkdir()
    (site / f"{NAME}.py").write_text(OWN)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n")
    classes = re.findall(r"class (\w+)", OWN)
    points = [f"[{kind.group}]\ninstalled = {NAME}:{name}" for kind, name in zip(KINDS, classes, strict=True)]
    (about / "entry_points.txt").write_text("\n".join(points) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        parts._entry_points.cache_clear()
        yield NAME
    parts._entry_points.cache_clear()
    parts._load.cache_clear()
    sys.modules.pop(NAME, None)


def trained(settings: dict[str, Any]) -> TrainConfig:
    """Return the configuration of a training that is composed in Python."""
    return tw.Train({}, data="shards", **settings).resolve()


def composed(read: tuple[Any, ...] = (), filters: tuple[Any, ...] = ()) -> PipelineConfig:
    """Return the configuration of a pipeline that is composed in Python."""
    pipeline = tw.Pipeline("pipeline").read("*.jsonl", **({"format": read[0]} if read else {}))
    return (pipeline.filter(*filters) if filters else pipeline).dedup_exact().config()


RECIPE = {"read": {"paths": ["*.jsonl"]}, "steps": ["dedup_exact"]}
CHOICES: dict[str, tuple[type[Any], str, Callable[[str, dict[str, Any]], Any], Callable[[Part], Any]]] = {
    # kind of part: configuration, key of the setting, what YAML and --set write there, what Python calls
    "optimizer": (TrainConfig, "optimizer", lambda name, settings: {"kind": name, **settings},
                  lambda part: trained({"optimizer": part})),
    "schedule": (TrainConfig, "schedule", lambda name, settings: {"kind": name, **settings},
                 lambda part: trained({"schedule": part})),
    "model family": (TrainConfig, "model", lambda name, settings: {"kind": name, **settings},
                     lambda part: trained({"model": part})),
    "objective": (TrainConfig, "objective", lambda name, settings: {"kind": name, **settings},
                  lambda part: trained({"objective": part})),
    "adapter": (TrainConfig, "adapter", lambda name, settings: {"kind": name, **settings},
                lambda part: trained({"adapter": part})),
    "compression": (TrainConfig, "compression", lambda name, settings: {"kind": name, **settings},
                    lambda part: trained({"compression": part, "parallel": {"data": "ddp"}})),
    "callback": (TrainConfig, "callbacks", lambda name, settings: [{"kind": name, **settings}],
                 lambda part: trained({"callbacks": [part]})),
    "tracker": (TrainConfig, "metrics.trackers", lambda name, settings: [{"kind": name, **settings}],
                lambda part: trained({"metrics": {"trackers": [part]}})),
    "filter": (PipelineConfig, "steps", lambda name, settings: [{"filter": {name: settings}}, "dedup_exact"],
               lambda part: composed(filters=(part,))),
    "reader": (PipelineConfig, "read.format", lambda name, settings: {"kind": name, **settings} if settings else name,
               lambda part: composed(read=(part,))),
}
BUILT_IN = {"optimizer": ("lion", {"learning_rate": 1e-4}), "schedule": ("wsd", {"warmup_steps": 3}),
            "model family": ("llama", {"num_layers": 3}), "objective": ("next_token", {"z_loss": 1e-4}),
            "adapter": ("lora", {"rank": 3}), "compression": ("topk", {"density": 0.3}),
            "callback": ("log_progress", {"every_seconds": 3.0}), "tracker": ("prometheus", {}),
            "filter": ("gopher_quality", {"min_words": 3}), "reader": ("csv", {})}


def setting(config: Any, keys: str) -> Any:
    value = config.canonical()
    for key in keys.split("."):
        value = value[key]
    return value


@pytest.mark.parametrize("named_by", ["built-in name", "module:Class", "entry point"])
@pytest.mark.parametrize("noun", sorted(CHOICES))
def test_a_part_is_chosen_in_yaml_by_set_and_in_python(noun: str, named_by: str, installed: str):
    (kind,) = (kind for kind in KINDS if kind.noun == noun)
    own = next(value for value in vars(importlib.import_module(installed)).values()
               if isinstance(value, type) and issubclass(value, kind.base) and value.__module__ == installed)
    name, settings = {"built-in name": BUILT_IN[noun], "module:Class": (f"{installed}:{own.__name__}", {"size": 2}),
                      "entry point": ("installed", {"size": 2})}[named_by]
    config, keys, write, compose = CHOICES[noun]
    around = RECIPE if config is PipelineConfig else {"data": {"uri": "shards"}, "parallel": {"data": "ddp"}}
    in_yaml = around
    for key in reversed(keys.split(".")):
        in_yaml = {key: in_yaml if in_yaml is not around else write(name, settings)}
    merged = {**around, **in_yaml, **({"read": {**RECIPE["read"], **in_yaml["read"]}} if "read" in in_yaml else {})}
    by_file = build(config, merged)
    by_set = build(config, around, [f"{keys}={json.dumps(write(name, settings))}"])
    part = kind.build(name, settings)
    assert type(part) is (own if named_by != "built-in name" else kind.find(name))
    in_python = compose(part)
    written = setting(by_file, keys)
    assert setting(by_set, keys) == written
    assert setting(in_python, keys) == written or (noun == "reader" and setting(in_python, keys) == {"kind": name})
    assert build(config, by_file.canonical()) == by_file, "what is written down is read as the same"
    with pytest.raises(ConfigError, match=f"did you mean {name.rpartition(':')[2]!r}"):
        kind.build(f"{name}x")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.noun)
def test_a_misspelt_setting_is_refused_with_the_nearest_name(kind: Kind[Part], installed: str):
    if kind is stores.SCHEMES:
        return
    with pytest.raises(ValueError, match="did you mean 'size'"):
        kind.build("installed", {"sise": 2})


def test_a_storage_scheme_is_chosen_by_the_uri(installed: str):
    assert isinstance(store("installed://bucket/x"), LocalStore)
    assert isinstance(store(f"{installed}:MyScheme://bucket/x"), LocalStore)
    assert store("s3://bucket/x").uri == "s3://bucket/x"


def test_rewards_are_chosen_by_name(installed: str):
    named = rewards.KIND.build("installed", {"size": 2})
    assert named == rewards.KIND.build(f"{installed}:MyReward", {"size": 2})
    assert rewards.KIND.build("gsm8k", {"last_number": True}) == tw.rewards.Gsm8k(last_number=True)


def test_environments_are_chosen_by_name(installed: str):
    named = environments.KIND.build("installed", {"size": 2})
    assert named == environments.KIND.build(f"{installed}:MyEnvironment", {"size": 2})
    assert environments.KIND.build("guess_number", {"highest": 3}) == tw.environments.GuessNumber(highest=3)


def test_engines_are_chosen_by_name(installed: str):
    named = engines.KIND.build("installed", {"size": 2})
    assert named == engines.KIND.build(f"{installed}:MyEngine", {"size": 2})
    assert engines.KIND.build("vllm", {"cache_gib": 3}) == tw.engines.Vllm(cache_gib=3)
