"""The SDK says what a YAML file says, with the same hash, and refuses what a YAML file may not say."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import tidewheel as tw
from pipelines import pretrain_strict, pretrain_web
from pipelines.demo import corpus
from pipelines.preferences import pairs
from pipelines.sft_chat import conversations
from tidewheel.config import load
from tidewheel.data.config import PipelineConfig
from tidewheel.errors import ConfigError, TidewheelError
from tidewheel.train.config import TrainConfig
from tidewheel.workflow.workflow import Workflow

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("composed", "file"), [
    (corpus, "demo"), (pretrain_web.corpus, "pretrain_web"), (pretrain_strict.corpus, "pretrain_strict"),
    (conversations, "sft_chat"), (pairs, "preferences")])
def test_python_and_yaml_give_the_same_recipe_hash(composed, file):
    written = load(PipelineConfig, ROOT / f"pipelines/{file}.yaml")
    assert composed.recipe_hash() == written.recipe_hash()


def test_a_setting_changes_the_hash():
    assert corpus.set(seed=1).recipe_hash() != corpus.recipe_hash()


def test_chains_do_not_change_what_they_grew_from():
    start = tw.Pipeline("a").read("x.jsonl")
    start.dedup_exact()
    assert start.steps == ()


def test_unknown_setting_names_the_nearest():
    chain = tw.Pipeline("a").read("x.jsonl").dedup_near(bandz=3).tokenize("t.json").pack()
    with pytest.raises(ConfigError, match="did you mean 'bands'"):
        chain.config()


def test_unknown_filter():
    with pytest.raises(ConfigError, match="gopher_quality: unknown key 'min_wordz', did you mean 'min_words'"):
        tw.filters.gopher_quality(min_wordz=1)  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match="no filter 'gopher'; it has c4, classifier"):
        _ = tw.filters.gopher


def test_training_reads_a_uri():
    config = tw.Train({"steps": 3}, data="s3://bucket/clean").resolve()
    assert config.data.uri == "s3://bucket/clean/shards"
    assert config.data.validation == "s3://bucket/clean/validation"


def test_settings_of_a_training_are_nested(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("optimizer: {learning_rate: 1.0e-3, betas: [0.8, 0.9]}\nschedule: wsd\nsteps: 5\n"
                      "elastic: {resources_per_worker: {a.b: 1}}\n")

    def resolved(**settings):
        return tw.Train(str(recipe), **settings).resolve()

    assert resolved(optimizer={"learning_rate": 2e-4}).optimizer == tw.optimizers.AdamW(
        learning_rate=2e-4, betas=(0.8, 0.9)), "what is not given stays as the file has it"
    assert resolved(optimizer={"kind": "adamw", "weight_decay": 0.2}).optimizer.learning_rate == 1e-3
    assert resolved(optimizer={"kind": "lion"}).optimizer == tw.optimizers.Lion(), "no settings of another one"
    assert resolved(optimizer=tw.optimizers.Muon(momentum=0.9)).optimizer == tw.optimizers.Muon(momentum=0.9)
    assert resolved(optimizer="lion", schedule={"warmup_steps": 3}).schedule == tw.schedules.WSD(warmup_steps=3)
    assert resolved(elastic={"resources_per_worker": {"c.d": 2}}).elastic.needs == {"CPU": 1.0, "a.b": 1, "c.d": 2}
    again = tw.Train({"steps": 5}, reading={"seed": 7}, steps=6, reproducible=True).resolve()
    assert (again.data.seed, again.steps, again.reproducible) == (7, 6, True)


@pytest.mark.parametrize(("settings", "message"), [
    ({"optimizer__learning_rate": 1e-3}, r"did you mean optimizer=\{'learning_rate': ...\}"),
    ({"optimiser": {}}, "did you mean 'optimizer'"),
    ({"optimizer": {"learning_rat": 1}}, "unknown key 'optimizer.learning_rat', did you mean 'learning_rate'"),
])
def test_a_setting_of_a_training_that_is_not_there_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        tw.Train({}, **settings).resolve()


def test_a_training_takes_every_setting_there_is():
    arguments = set(inspect.signature(tw.Train).parameters) - {"config", "init_from", "reference", "overlap", "unknown"}
    assert arguments - {"reading"} == set(TrainConfig.model_fields)


def test_a_part_that_workers_cannot_import_is_refused():
    class Mine(tw.optimizers.AdamW):
        """Defined inside a function."""

    with pytest.raises(ConfigError, match="workers cannot import"):
        tw.Train({}, optimizer=Mine())


def test_training_reads_a_mixture():
    weights = {"web": {"weight": 3}, "code": {"weight": 1}}
    data = {"web": "s3://b/web", "code": "/code"}
    config = tw.Train({"data": {"mixture": {"domains": weights}}}, data=data).resolve()
    assert config.data.uri == ""
    results = {name: (domain.shards, domain.weight) for name, domain in config.data.mixture.domains.items()}
    assert results == {"web": ("s3://b/web/shards", 3), "code": ("/code/shards", 1)}


def test_overlap_needs_waves_and_changes_no_key(tmp_path):
    (tmp_path / "x.jsonl").write_text("{}")
    start = tw.Pipeline("a").read("x.jsonl").tokenize(train={"vocabulary_size": 300})
    with pytest.raises(ConfigError, match="read in waves") as refused:
        tw.Train({}, data=start.pack(), overlap=True)
    assert "waves=8" in refused.value.fix
    with pytest.raises(ConfigError, match="read in waves"):
        tw.Train({}, data="s3://bucket/clean", overlap=True)
    keys = [[(node.key, node.place) for node in Workflow("w", tw.Train({}, data=start.pack(waves=4), overlap=overlap))
             .nodes(str(tmp_path / "out"), input=str(tmp_path))] for overlap in (False, True)]
    assert keys[0] == keys[1]
    old, new = ([node.key for node in Workflow("w", start.pack(**waves)).nodes(
        str(tmp_path / "out"), input=str(tmp_path))] for waves in ({}, {"waves": 0}))
    assert old == new


def test_an_empty_workflow_is_refused():
    with pytest.raises(ConfigError, match="without steps"):
        Workflow("w")


def test_public_names():
    assert {"Pipeline", "Train", "Workflow", "filters"} <= set(dir(tw))
    assert issubclass(ConfigError, tw.TidewheelError)
    assert tw.TidewheelError is TidewheelError
    with pytest.raises(AttributeError, match="Pipeline"):
        _ = tw.Pipelines


def test_signals_in_python_and_yaml_give_the_same_recipe_hash(tmp_path):
    (tmp_path / "web.yaml").write_text("""
name: web
read: {paths: [a.jsonl]}
steps:
  - filter:
      urls: {domain_files: [adult.txt], soft_words: [free, win]}
      language: {allow: [en, de]}
      words: {files: [listed.txt], max_count: 2}
      classifier: {file: model.bin, min_score: 0.5, as_quality: true}
  - dedup_url
  - dedup_lines: {unit: line, keep: none, max_repeats: 5}
  - tokenize: {file: t.json}
  - pack
""")
    chain = tw.Pipeline("web").read("a.jsonl").filter(
        tw.filters.urls(domain_files=("adult.txt",), soft_words=("free", "win")),
        tw.filters.language(allow=("en", "de")),
        tw.filters.words(files=("listed.txt",), max_count=2),
        tw.filters.classifier(file="model.bin", min_score=0.5, as_quality=True),
    ).dedup_url().dedup_lines(unit="line", keep="none", max_repeats=5).tokenize("t.json").pack()
    assert chain.recipe_hash() == load(PipelineConfig, tmp_path / "web.yaml").recipe_hash()
