"""`tidewheel k8s`: render and check manifests."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import cyclopts
from cyclopts import Parameter

from tidewheel.commands.options import AsJson, Overrides
from tidewheel.errors import ConfigError

if TYPE_CHECKING:
    from tidewheel.kubernetes.render import Request

app = cyclopts.App(name="k8s", help="Render and check Kubernetes manifests of a cluster or a job.")

Overlay = Annotated[str, Parameter(help="A folder of k8s/overlays: kind, gpu or gpu-spot.")]


@Parameter(name="*")
@dataclass(frozen=True)
class Rendering:
    """Options of `render` and `lint`, with which an overlay is rendered."""

    job: Annotated[Literal["train", "pipeline", "workflow"] | None, Parameter(
        help="A job with a cluster of its own; without it, a standing cluster.")] = None
    config: Annotated[str | None, Parameter(
        help="Configuration of the training run or the pipeline; goes into the manifests, with --set.")] = None
    set_: Overrides = None
    component: Annotated[list[str] | None, Parameter(
        negative="", consume_multiple=False, help="A folder of k8s/components, such as kueue. May be repeated.")] = None
    argument: Annotated[list[str] | None, Parameter(
        negative="", consume_multiple=False, help="A further argument of the job: "
                                                  "--argument=--output=s3://bucket/clean. May be repeated.")] = None
    namespace: Annotated[str, Parameter(help="Namespace; default: tidewheel.")] = ""
    image: Annotated[list[str] | None, Parameter(
        negative="", consume_multiple=False, help="An image: tidewheel=registry/tidewheel:1.0, and tidewheel-cuda=... "
                                                  "for the GPU groups.")] = None
    annotate_service_accounts: Annotated[list[str] | None, Parameter(
        negative="", consume_multiple=False, help="KEY=VALUE of the pods' service accounts: the cloud's role for "
                                                  "them.")] = None
    tree: Annotated[str, Parameter(help="The repository's folder k8s, or a copy of it.")] = "k8s"

    def request(self, overlay: str) -> Request:
        """Return the request for `kubernetes.render`."""
        from tidewheel.kubernetes import commands

        return commands.request(
            overlay, job=self.job, config=self.config, overrides=self.set_, components=self.component,
            arguments=self.argument, namespace=self.namespace, images=self.image,
            accounts=self.annotate_service_accounts, tree=self.tree)


AS_IT_IS = Rendering()


@app.command(name="render")
def k8s_render(
    overlay: Overlay,
    *,
    of: Rendering = AS_IT_IS,
    output: Annotated[str, Parameter(help="File to write; default: standard output.")] = "",
) -> int:
    """Render an overlay, components and a job with kustomize, including the run's configuration.

    The number of training pods follows from `elastic` and the number of workers that fit into one pod.
    """
    from tidewheel.kubernetes import commands

    text = commands.render_text(of.request(overlay))
    if output:
        from tidewheel.storage import split

        folder, name = split(output)
        folder.write(name, text.encode())
        print(f"manifests: {output}")
    else:
        sys.stdout.write(text)
    return 0


@app.command(name="lint")
def k8s_lint(
    overlay: Annotated[str | None, Parameter(help="A folder of k8s/overlays, rendered first; or give --file.")] = None,
    *,
    file: Annotated[str | None, Parameter(help="A YAML file of manifests to check instead, or - for standard "
                                               "input.")] = None,
    of: Rendering = AS_IT_IS,
    as_json: AsJson = False,
) -> int:
    """Check manifests before you apply them. Exit code 2 if anything is wrong.

    Check closed schemas, values that the KubeRay operator refuses, restricted Pod Security, network policies, roles,
    references to missing objects, and metrics that nothing exports. With --config, also compare the pods with the run's
    workers, batch and layout.
    """
    from tidewheel.kubernetes import commands

    if (overlay is None) == (file is None):
        raise ConfigError("give an overlay or --file", where="tidewheel k8s lint", fix="run tidewheel k8s lint gpu")
    if file is not None:
        problems, checked = commands.lint_file(file, job=of.job, config=of.config, overrides=of.set_)
    else:
        problems, checked = commands.lint_rendered(of.request(str(overlay)))
    if as_json:
        print(json.dumps([asdict(problem) for problem in problems], indent=2))
        return 2 if problems else 0
    for problem in problems:
        print(problem)
    if problems:
        raise ConfigError(f"{len(problems)} problem(s), listed above", where=file or str(overlay),
                          fix="correct the fields named there")
    print(f"{checked} objects: no problems")
    return 0
