"""Carry out `tidewheel k8s render` and `lint`: from options to text or problems."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tidewheel.config import Config, build, load
from tidewheel.errors import ConfigError
from tidewheel.kubernetes.documents import manifests, write
from tidewheel.kubernetes.problem import Problem
from tidewheel.kubernetes.render import Request, render, settings
from tidewheel.train.config import TrainConfig


def request(overlay: str, *, job: str | None, config: str | None, overrides: Sequence[str] | None,
            components: Sequence[str] | None, arguments: Sequence[str] | None, namespace: str,
            images: Sequence[str] | None, accounts: Sequence[str] | None, tree: str) -> Request:
    """Return what to render, from the command's options.

    Args:
        overlay: name of the overlay.
        job: name of the job; None for a cluster only.
        config: configuration file of the job.
        overrides: changes of the configuration, key=value.
        components: names of components.
        arguments: further arguments of the job.
        namespace: namespace of the objects.
        images: replacements of images, name=image.
        accounts: annotations of service accounts, key=value.
        tree: folder of the manifests.

    Raises:
        ConfigError: an option or the configuration is wrong.
    """
    return Request(overlay, tree=Path(tree), components=tuple(components or ()), job=job or "",
                   config=_load(job, config, overrides), arguments=tuple(arguments or ()), namespace=namespace,
                   images=_pairs(images, "--image"), accounts=_pairs(accounts, "--annotate-service-accounts"))


def _load(job: str | None, config: str | None, overrides: Sequence[str] | None) -> Config | None:
    if config is None:
        if overrides:
            raise ConfigError("--set changes a configuration, and there is none", where="--set", fix="give --config")
        return None
    if job == "pipeline":
        from tidewheel.data.config import PipelineConfig

        return load(PipelineConfig, config, overrides or ())
    return load(TrainConfig, config, overrides or ())


def _pairs(given: Sequence[str] | None, option: str) -> dict[str, str]:
    pairs = {}
    for text in given or ():
        key, separator, value = text.partition("=")
        if not separator or not key or not value:
            raise ConfigError(f"{text!r} is not of the form key=value", where=option, fix="write key=value")
        pairs[key] = value
    return pairs


def render_text(requested: Request) -> str:
    """Return the manifests as YAML."""
    return write(render(requested))


def lint_rendered(requested: Request) -> tuple[list[Problem], int]:
    """Return the problems of the rendered manifests, and the number of objects."""
    from tidewheel.kubernetes.lint import lint

    rendered = render(requested)
    return lint(rendered, _in_cluster(requested.config)), len(rendered)


def lint_file(file: str, *, job: str | None, config: str | None,
              overrides: Sequence[str] | None) -> tuple[list[Problem], int]:
    """Return the problems of the manifests in a file, and the number of objects.

    Args:
        file: the file; "-" for standard input.
        job: name of the job that `config` configures.
        config: configuration file of the run; None for the one in the manifests.
        overrides: changes of the configuration, key=value.

    Raises:
        ConfigError: the file cannot be read, or it holds no manifests.
    """
    from tidewheel.kubernetes.lint import lint

    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=file, fix="give a file of manifests") from None
    objects = manifests(text, file)
    if not objects:
        raise ConfigError("no manifests in it", where=file, fix="give the output of `tidewheel k8s render`")
    return lint(objects, _in_cluster(_load(job, config, overrides))), len(objects)


def _in_cluster(config: Config | None) -> TrainConfig | None:
    """Return the configuration as the run has it in the cluster, caches included; None if it does not train."""
    return build(TrainConfig, settings(config)) if isinstance(config, TrainConfig) else None
