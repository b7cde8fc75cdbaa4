"""Check a run's settings and data before the first step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pydantic

from tidewheel.errors import CheckpointError, ConfigError, ShardError
from tidewheel.models import families
from tidewheel.parts import as_json, name_of
from tidewheel.shards.columns import Head
from tidewheel.shards.integrity import HASH_AT_START_BYTES, check_files
from tidewheel.shards.manifest import PREFERENCES, Manifest, read_manifest
from tidewheel.shards.opened import ROWS
from tidewheel.shards.pairs import check_answers
from tidewheel.shards.references import Column
from tidewheel.shards.source import Source, open_source
from tidewheel.shards.teachers import head_of
from tidewheel.storage import Store, store
from tidewheel.train import objectives
from tidewheel.train.answers import read_prompts
from tidewheel.train.batch_size import BatchSizes
from tidewheel.train.branching import divides
from tidewheel.train.config import TrainConfig
from tidewheel.train.distillation.objective import TeacherObjective
from tidewheel.train.parallel import legal
from tidewheel.train.positions import Positions
from tidewheel.train.record import passes_of
from tidewheel.train.runtime import Described


def parts(config: TrainConfig) -> None:
    """Raise ConfigError if a part of the configuration cannot work here."""
    for tracker in config.metrics.trackers:
        tracker.check()


def read_data(config: TrainConfig) -> tuple[Source, dict[str, Manifest]]:
    """Return the training data and the validation sets' manifests by domain, checked against the settings.

    Raises:
        ConfigError: there is no data or too little, or the model is too small for it.
        ShardError: a set is missing, damaged or empty, or the sets do not belong together.
    """
    if not config.data.uri and config.data.mixture is None:
        raise ConfigError("no training data given", where="data.uri",
                          fix="set it to the shards/ folder that `tidewheel data run` wrote: --set data.uri=...")
    passes = passes_of(None if config.rollouts is None else config.rollouts.canonical())
    source = open_source(config.data.uri, config.data.mixture, config.data.seed, partly=config.data.wait_seconds > 0,
                         passes=passes)
    manifest = source.manifest
    fits(config, manifest)
    _lasts(config, source)
    if config.evaluation.answers.prompts:
        _answerable(config, source)
    validation = {name: _validation(uri, manifest) for name, uri in config.data.validation_sets.items()}
    heads = columns(config, source, validation)
    source.reference = heads[0].reference if heads else ""
    taught = teachers(config, source)
    source.teacher = taught[0].reference if taught else ""
    return source, validation


def columns(config: TrainConfig, source: Source, validation: Mapping[str, Manifest]) -> list[Head]:
    """Return the heads of the reference model's log-probabilities of all sets, the training sets' first.

    Args:
        config: the run's settings.
        source: the training data.
        validation: manifests of the validation sets by domain.

    Raises:
        ConfigError: the objective needs them and none are given, or does not use those that are given.
        ShardError: there are none for a set, or those of another set or model.
    """
    objective, folder = config.objective, config.data.reference
    kind = name_of(type(objective))
    if not objective.needs_reference:
        if folder:
            raise ConfigError(f"objective.kind {kind} uses no reference model", where="data.reference",
                              fix="leave it out")
        return []
    if config.base_is_reference and config.adapter is not None:
        if not config.adapter.can_be_off:
            raise ConfigError(f"the adapter {name_of(type(config.adapter))} moves positions, so its base cannot be the "
                              f"reference of objective.kind {kind} while it is attached", where="data.reference",
                              fix=f"make the base's log-probabilities once: tidewheel reference "
                                  f"{config.model.init_from or 'MODEL'} --data SET --output FOLDER")
        return []
    if not folder:
        raise ConfigError(f"objective.kind {kind} compares with a reference model, but its log-probabilities are not "
                          "given", where="data.reference", fix="make them once: tidewheel reference MODEL --data SET "
                          "--output FOLDER; then set it to the folder that the command prints")
    sets = [(domain.uri, domain.manifest) for domain in source.domains]
    sets += [(uri, validation[name]) for name, uri in config.data.validation_sets.items()]
    heads = [Column.open(folder, uri, manifest, objective.parts - manifest.unpaired).head for uri, manifest in sets]
    for (uri, _), head in zip(sets, heads):
        if head.reference != heads[0].reference:
            raise ShardError(f"the log-probabilities of {uri} are of another reference model than those of "
                             f"{sets[0][0]}", where=folder, fix="make them again with one model, into another folder")
    return heads


def _answerable(config: TrainConfig, source: Source) -> None:
    """Raise ConfigError if the prompts of validation cannot be read, or are chats and there is no template."""
    prompts = read_prompts(config.evaluation.answers.prompts)
    if any("messages" in prompt.values for prompt in prompts) \
            and not any(domain.manifest.chat_template for domain in source.domains):
        raise ConfigError("the prompts are conversations, but the training set has no chat template",
                          where="evaluation.answers.prompts",
                          fix='give texts, {"prompt": "..."}, or train on a set of conversations')


def teachers(config: TrainConfig, source: Source) -> list[Head]:
    """Return the heads of the teacher's tokens of the training sets; [] for a live teacher.

    Args:
        config: the run's settings.
        source: the training data.

    Raises:
        ConfigError: the objective needs a teacher and none is given, two are, it does not use the one that is given, or
            the tokens are of another temperature or vocabulary.
        ShardError: there are none for a set, or those of another set or teacher.
    """
    objective, folder = config.objective, config.data.teacher
    kind = name_of(type(objective))
    if not isinstance(objective, TeacherObjective):
        if folder:
            raise ConfigError(f"objective.kind {kind} uses no teacher", where="data.teacher", fix="leave it out")
        return []
    if bool(folder) == bool(objective.teacher):
        what = "a live teacher and a teacher's tokens are both given" if folder else "no teacher is given"
        raise ConfigError(f"objective.kind {kind}: {what}", where="data.teacher, objective.teacher",
                          fix="set objective.teacher to a run that computes beside the student, or data.teacher to the "
                              "folder that `tidewheel teacher MODEL --data SET --output FOLDER` prints")
    if not folder:
        return []
    heads = [head_of(folder, domain.uri, domain.manifest) for domain in source.domains]
    vocabulary = config.model.vocabulary_size or source.manifest.vocabulary_size
    for domain, head in zip(source.domains, heads):
        if head.reference != heads[0].reference or head.top_k != heads[0].top_k:
            raise ShardError(f"the tokens of {domain.uri} are of another teacher, or of another number, than those of "
                             f"{source.domains[0].uri}", where=folder, fix="make them again with one teacher")
        if head.temperature != objective.temperature:
            raise ConfigError(f"the tokens of the teacher were made at temperature {head.temperature:g}, but "
                              f"objective.temperature is {objective.temperature:g}", where=folder,
                              fix=f"set objective.temperature={head.temperature:g}, or make them again: tidewheel "
                                  f"teacher {head.model} --data {domain.uri} --output FOLDER --temperature "
                                  f"{objective.temperature:g}")
        if head.vocabulary_size != vocabulary:
            raise ConfigError(f"the teacher {head.model} has a vocabulary of {head.vocabulary_size}, the student of "
                              f"{vocabulary}", where=folder, fix="give a teacher with the student's vocabulary, or set "
                                                                f"model.vocabulary_size={head.vocabulary_size}")
    return heads


def teacher(config: TrainConfig, described: Described, manifest: Manifest) -> None:
    """Check that a live teacher fits the data and the layout.

    Args:
        config: the run's settings, whose objective has the teacher.
        described: the teacher.
        manifest: of the training set.

    Raises:
        ConfigError: it has another vocabulary or tokenizer, shorter sequences, or heads that the mesh cannot share.
    """
    where, model = "objective.teacher", families.of_shape(described.model)
    vocabulary = config.model.vocabulary_size or manifest.vocabulary_size
    if described.tokenizer and described.tokenizer != manifest.tokenizer["hash"]:
        raise ConfigError(f"the teacher was trained with the tokenizer {described.tokenizer[:23]}, the training set "
                          f"was made with {manifest.tokenizer['hash'][:23]}", where=where,
                          fix="tokenize the data with the teacher's tokenizer, or give another teacher")
    if described.vocabulary_size != vocabulary:
        raise ConfigError(f"the teacher has a vocabulary of {described.vocabulary_size}, the student of {vocabulary}",
                          where=where, fix="give a teacher with the vocabulary of the student, or set "
                                           f"model.vocabulary_size={described.vocabulary_size}")
    if manifest.sequence_length > model.max_sequence_length:
        raise ConfigError(f"sequences of {manifest.sequence_length} tokens, but the teacher takes "
                          f"{model.max_sequence_length}", where=where, fix="pack shorter sequences")
    if (reason := legal.shape(config.parallel, model, vocabulary)) is not None:
        raise ConfigError(f"of the teacher: {reason}", where=where, fix="change the layout, or use `tidewheel teacher`")


def same_teacher(saved: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> None:
    """Check that a run goes on with the live teacher that it began with.

    Args:
        saved: URI and hash of the checkpoint's teacher; None: it had none.
        now: the same of the teacher that was loaded.

    Raises:
        ConfigError: it is another teacher.
    """
    if (saved or {}).get("hash") != (now or {}).get("hash"):
        names = ["no live teacher" if given is None else f"{given['from']} ({given['hash']})" for given in (saved, now)]
        raise ConfigError(f"the run began with {names[0]}, but the teacher is now {names[1]}",
                          where="objective.teacher", fix="give the teacher that the run began with, or start a new run "
                                                         "with another run.id")


def _validation(uri: str, manifest: Manifest) -> Manifest:
    """Return the manifest of a validation set, if it belongs to the training set's."""
    validation = read_manifest(store(uri))
    if validation.kind != manifest.kind:
        raise ShardError(f"a set of {validation.kind}, but the training set is of {manifest.kind}", where=uri,
                         fix="take both sets from the same pipeline output")
    for name in ("sequence_length", "vocabulary_size", "unpaired", "step_labels"):
        ours, theirs = getattr(manifest, name), getattr(validation, name)
        if ours != theirs:
            raise ShardError(f"{name} is {theirs}, but {ours} in the training set", where=uri,
                             fix="take both sets from the same pipeline output")
    if validation.tokenizer.get("hash") != manifest.tokenizer.get("hash"):
        raise ShardError("made with another tokenizer than the training set", where=uri,
                         fix="take both sets from the same pipeline output")
    if not validation.rows:
        raise ShardError("the validation set is empty", where=uri,
                         fix="raise pack.validation_fraction in the pipeline, or leave data.validation empty")
    return validation


def files(config: TrainConfig, source: Source, validation: Mapping[str, Manifest]) -> None:
    """Check every file of the training and validation sets; see `shards.integrity.check_files`.

    Args:
        config: the run's settings.
        source: the training data.
        validation: manifests of the validation sets by domain.

    Raises:
        ShardError: a file is missing or damaged.
    """
    for domain in source.domains:
        check_files(store(domain.uri), domain.manifest)
    for name, uri in config.data.validation_sets.items():
        check_files(store(uri), validation[name])
    manifests = {domain.uri: domain.manifest for domain in source.domains}
    manifests |= {uri: validation[name] for name, uri in config.data.validation_sets.items()}
    for uri, manifest in manifests.items():
        if manifest.kind == PREFERENCES and sum(shard.bytes for shard in manifest.shards) <= HASH_AT_START_BYTES:
            ends = check_answers(uri, manifest)
            wanted = getattr(config.objective, "step_token", None)
            if ends and wanted is not None and ends != {wanted}:
                raise ConfigError(f"steps of the set end in the tokens {sorted(ends)[:8]}, not all in step_token "
                                  f"{wanted}, so rewards of answers without labels would be read elsewhere", where=uri,
                                  fix="set objective.step_token, and a read.step_separator that is one token in every "
                                      "place")


def fits(config: TrainConfig, manifest: Manifest) -> None:
    """Check that the objective, the model and the layout fit the training set.

    Args:
        config: the run's settings.
        manifest: of the training set.

    Raises:
        ConfigError: sequences or the vocabulary are larger than the model's, or the layout does not fit.
        ShardError: the objective learns from another kind of rows.
    """
    if manifest.kind != config.objective.READS:
        fitting = objectives.where(lambda objective: manifest.kind == objective.READS)
        raise ShardError(f"a set whose rows are {ROWS[manifest.kind]}, but objective.kind "
                         f"{name_of(type(config.objective))} learns from {ROWS[config.objective.READS]}",
                         where=config.data.location, fix=f"choose objective.kind {fitting}, or give another set")
    if manifest.step_labels and not config.objective.takes_steps:
        raise ShardError("a set whose answers have labels of their steps, from which only a reward model with a "
                         "process head learns", where=config.data.location,
                         fix="set objective: {kind: reward_model, head: process, step_token: ID}, or give another set")
    if manifest.unpaired and not (config.objective.TAKES_UNPAIRED or manifest.step_labels):
        raise ShardError(f"a set whose rows have one answer and a label, but objective.kind "
                         f"{name_of(type(config.objective))} learns from pairs", where=config.data.location,
                         fix=f"choose objective.kind {objectives.where(lambda part: part.TAKES_UNPAIRED)}, or give a "
                             "set of pairs")
    if manifest.sequence_length > config.model.max_sequence_length:
        raise ConfigError(
            f"sequences of {manifest.sequence_length} tokens, but model.max_sequence_length is "
            f"{config.model.max_sequence_length}", where=config.data.location,
            fix="raise model.max_sequence_length, or pack shorter sequences")
    vocabulary = config.model.vocabulary_size
    if vocabulary is not None and vocabulary < manifest.vocabulary_size:
        raise ConfigError(
            f"model.vocabulary_size {vocabulary} is smaller than the shard set's {manifest.vocabulary_size}",
            where=config.data.location, fix="leave model.vocabulary_size out: it is taken from the shard set")
    legal.check_data(config, vocabulary or manifest.vocabulary_size, manifest.sequence_length)


def _lasts(config: TrainConfig, source: Source) -> None:
    """Raise ConfigError unless the domains suffice for all steps, within `max_repetitions`."""
    length = source.manifest.sequence_length
    sizes = BatchSizes.of(config.batch, length)
    groups = 1 if config.outer is None else config.outer.groups
    needed = sizes.total(config.steps) * groups
    if source.end is None or needed <= source.end:
        return
    limit = config.data.mixture.max_repetitions if config.data.mixture else 0
    raise ConfigError(
        f"the mixture ends after {source.end:,} sequences ({source.end * length:,} tokens): its domains are read "
        f"{limit:g} times at most; {config.steps:,} steps need {needed:,} ({needed * length:,} tokens)",
        where="data.mixture", fix=f"raise max_repetitions, add data, or train "
        f"{sizes.steps(source.end // groups):,} steps")


IDENTITY = ("model", "adapter", "global_sequences", "ramp", "virtual_ranks", "data_seed", "shards", "code", "head",
            "value_head", "reference", "teacher", "compression", "stage_schedule", "share")
KIND = ("sequence_length", "vocabulary_size", "tokenizer")
"""Properties of the shards that an error names when another shard set is given."""


def identity(config: TrainConfig, source: Source) -> dict[str, object]:
    """Return what a checkpoint and the run that resumes from it must have in common: the data order and all shapes."""
    return {"model": config.model.shape(), "adapter": None if config.adapter is None else as_json(config.adapter),
            "global_sequences": config.batch.global_sequences,
            "ramp": config.batch.canonical()["ramp"] or None, "virtual_ranks": config.batch.virtual_ranks,
            "data_seed": config.data.seed, "shards": source.hash,
            "sequence_length": source.manifest.sequence_length, "vocabulary_size": source.manifest.vocabulary_size,
            "tokenizer": source.manifest.tokenizer.get("hash"),
            "code": {name: code.hash for name, code in config.own_parts().items()} or None,
            "head": name_of(type(config.objective)) if config.objective.HEAD else None,
            "value_head": config.objective.VALUES or None,
            "reference": source.reference or None, "teacher": source.teacher or None,
            "compression": None if config.compression is None else as_json(config.compression),
            "stage_schedule": None if config.stage_schedule is None else
            {**as_json(config.stage_schedule), "pipeline": config.parallel.pipeline},
            "share": None if config.outer is None or config.outer.groups == 1 else list(config.outer.share)}


def continues(saved: dict[str, object], config: TrainConfig, source: Source) -> None:
    """Check that a run may resume from a checkpoint with other settings.

    Args:
        saved: `identity` of the checkpoint's run.
        config: the settings now.
        source: the training data now.

    Raises:
        ConfigError: the two differ.
    """
    now = identity(config, source)
    if divides(saved, config):
        now |= {name: saved.get(name) for name in ("global_sequences", "share")}
    changed = [name for name in IDENTITY if name != "model" and saved.get(name) != now[name]]
    if not _same_model(saved.get("model"), config):
        changed.insert(0, "model")
    changed += [name for name in KIND if name in saved and saved[name] != now[name]]
    if changed:
        raise ConfigError(f"this run was started with other settings of: {', '.join(changed)}",
                          where=config.run_uri,
                          fix="restore them (run.json has the old ones), or start a new run with another run.id")


def same_base(saved: Mapping[str, Any] | None, now: Mapping[str, Any] | None, config: TrainConfig) -> None:
    """Check that an adapter is continued on the base that it was trained on.

    Args:
        saved: URI and hash of the checkpoint's base; None: it holds the whole model.
        now: the same of the base that was loaded.
        config: the run's settings.

    Raises:
        ConfigError: it is another base.
    """
    if (saved or {}).get("hash") == (now or {}).get("hash"):
        return
    before = "no adapter" if saved is None else f"an adapter of {saved['from'] or saved['hash']} ({saved['hash']})"
    given = "no adapter is set" if now is None else f"the base is now {now['from'] or now['hash']} ({now['hash']})"
    raise ConfigError(f"the checkpoint is of {before}, but {given}", where="model.init_from",
                      fix="give the base that the run began with, or start a new run with another run.id")


def _same_model(saved: Any, config: TrainConfig) -> bool:
    """Return whether a model's settings, from a checkpoint or run.json, describe the model of `config`.

    A setting that a later version has added is missing there, and had its default.
    """
    try:
        model = families.of_shape(saved)
    except (ConfigError, pydantic.ValidationError):
        return False
    return model.shape() == config.model.shape()


def same_model(config: TrainConfig, run: Store) -> None:
    """Raise ConfigError unless the finished run in this folder trained the model of `config`."""
    if not _same_model(run.read_json("run.json")["config"]["model"], config):
        raise ConfigError("this run is finished, and trained another model", where=run.uri,
                          fix="start a new run with another run.id (run.json has this one's settings)")


def still_reaches(config: TrainConfig, source: Source, positions: Positions) -> None:
    """Check that the mixture still suffices for all steps after rollbacks have passed over parts of it.

    Args:
        config: the run's settings.
        source: the training data.
        positions: the positions with all windows.

    Raises:
        ConfigError: the mixture ends before the last step.
    """
    end = source.end
    if end is not None and positions.windows and positions.end(config.steps) > end:
        raise ConfigError(f"the mixture ends after {end:,} sequences, because guards passed over a part of it",
                          where="data.mixture", fix="raise max_repetitions, add data, or train fewer steps")


def same_history(extra: dict[str, Any], positions: Positions, config: TrainConfig) -> None:
    """Check that a checkpoint belongs to the run's present history.

    Its rollbacks must be the run's first ones, and later ones must have changed nothing before it. This refuses a
    checkpoint that a rollback could not read, and that is readable again.

    Args:
        extra: the checkpoint's JSON values.
        positions: the run's positions with all windows.
        config: the run's settings.

    Raises:
        CheckpointError: the run has undone the steps of this checkpoint.
    """
    saved = [tuple(window) for window in extra.get("passed_over", [])]
    later = positions.windows[len(saved):]
    if list(positions.windows[:len(saved)]) != saved or any(start < extra["position"] for start, _ in later):
        raise CheckpointError(f"the checkpoint of step {extra['step']} contains steps that the run has undone",
                              where=config.run_uri, fix="delete this checkpoint; training then uses an older one")
