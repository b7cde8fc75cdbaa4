"""The model in a checkpoint: its settings, the size of its vocabulary, and its tokenizer."""

from __future__ import annotations

from tidewheel.checkpoint.adapters import base_of
from tidewheel.checkpoint.manifest import CheckpointManifest, read_manifest
from tidewheel.checkpoint.verify import locate
from tidewheel.errors import CheckpointError
from tidewheel.models import families
from tidewheel.models.family import Model
from tidewheel.models.own_module import OwnModule
from tidewheel.train.runtime import Described


def model_of(manifest: CheckpointManifest, where: str, *, any_head: bool = False) -> tuple[Model, int]:
    """Return the model's configuration and vocabulary size.

    Args:
        manifest: the checkpoint's manifest.
        where: location for error messages.
        any_head: accept a model with an objective's head in the place of logits.

    Raises:
        CheckpointError: this version does not know the model in the checkpoint, or it gives no logits.
    """
    head = (manifest.extra.get("identity") or {}).get("head")
    if head and not any_head:
        raise CheckpointError(f"a model of objective {head}, whose head gives no logits; a decoder is expected",
                              where=where, fix="give a checkpoint of a decoder; `tidewheel evaluate` takes this one")
    try:
        base, identity = base_of(manifest), manifest.extra["identity"]
        model = families.of_shape(identity["model"])
        if isinstance(model, OwnModule):  # whose names of tensors say nothing
            return model, model.vocabulary_size or int(identity["vocabulary_size"])
        rows = manifest.tensors["model/embedding.weight"].shape[0] if base is None else base.vocabulary_size
        return model, rows
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"its model is not known: {' '.join(str(error).split())[:200]}", where=where,
                              fix="use the version of Tidewheel that wrote it") from None


def describe(uri: str) -> Described:
    """Return which decoder a checkpoint holds.

    Args:
        uri: a run (its newest complete checkpoint) or RUN/checkpoints/step_00000100.

    Raises:
        CheckpointError: there is none, it holds an adapter alone, or its model is not known or gives no logits.
    """
    run, checkpoints, name = locate(uri)
    manifest, where = read_manifest(checkpoints, name), checkpoints.at(name)
    if base_of(manifest) is not None:
        raise CheckpointError("the checkpoint holds an adapter without its base", where=where,
                              fix="merge the two with `tidewheel checkpoint merge`, or compute its tokens once with "
                                  "`tidewheel teacher`")
    model, vocabulary_size = model_of(manifest, where)
    from tidewheel.checkpoint import tokenizer_files  # it reads chat templates, for which training needs no package

    return Described(model.shape(), vocabulary_size, tokenizer_files.hash_of_run(run))
