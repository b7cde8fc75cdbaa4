"""What the commands `tidewheel k8s render` and `lint` do: options in, text or problems out."""

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
    """What is to be rendered, from the command's options."""
    return Request(overlay, tree=Path(tree), components=tuple(components or ()), job=job or "",
                   config=_load(job, config, overrides), arguments=tuple(arguments or ()), namespace=namespace,
                   images=_pairs(images, "--image"), accounts=_pairs(accounts, "--annotate-service-accounts"))


def _load(job: str | None, config: str | None, overrides: Sequence[str] | None) -> Config | None:
    if config is None:
        if overrides:
            raise ConfigError("--set changes a configuration, and none is given", where="--set", mend="give --config")
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
            raise ConfigError(f"{text!r} is not of the form key=value", where=option, mend="write key=value")
        pairs[key] = value
    return pairs


def render_text(wanted: Request) -> str:
    """The manifests as YAML."""
    return write(render(wanted))


def lint_rendered(wanted: Request) -> tuple[list[Problem], int]:
    """What is wrong with what would be rendered, and how many objects there are."""
    from tidewheel.kubernetes.lint import lint

    made = render(wanted)
    return lint(made, _in_cluster(wanted.config)), len(made)


def lint_file(file: str, *, job: str | None, config: str | None,
              overrides: Sequence[str] | None) -> tuple[list[Problem], int]:
    """What is wrong with manifests in a file ("-": standard input), and how many objects there are.

    Raises:
        ConfigError: there is no such file, or it holds no manifests.
    """
    from tidewheel.kubernetes.lint import lint

    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=file, mend="give a file of manifests") from None
    made = manifests(text, file)
    if not made:
        raise ConfigError("no manifests in it", where=file, mend="give what `tidewheel k8s render` wrote")
    return lint(made, _in_cluster(_load(job, config, overrides))), len(made)


def _in_cluster(config: Config | None) -> TrainConfig | None:
    """The configuration as the run has it there, caches included; None for one that does not train."""
    return build(TrainConfig, settings(config)) if isinstance(config, TrainConfig) else None
