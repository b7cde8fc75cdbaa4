"""`tidewheel data preview`: a page to try thresholds on a few documents."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from tidewheel.commands.options import Overrides
from tidewheel.errors import ConfigError


def preview(
    config: Annotated[str, Parameter(help="Pipeline definition, a YAML file.")],
    *,
    input: Annotated[str, Parameter(help="Folder or s3://bucket/prefix that relative paths in the pipeline are "
                                         "below.")] = ".",
    output: Annotated[str, Parameter(help="Path of the page, an .html file.")] = "preview.html",
    limit: Annotated[int, Parameter(help="Maximum number of documents: the first ones of each file, in proportion to "
                                         "its size.")] = 200,
    set_: Overrides = None,
) -> int:
    """Write a page that shows the effect of each filter on a few documents, with a slider per threshold."""
    from tidewheel.config import load
    from tidewheel.data.config import PipelineConfig

    settings = load(PipelineConfig, config, set_ or ())
    if not 1 <= limit <= 5000:
        raise ConfigError(f"{limit} documents on a page", where="--limit", fix="give 1 to 5000")
    from tidewheel.data.preview import look
    from tidewheel.report.preview import render
    from tidewheel.storage import split

    folder, name = split(output)
    result = look(settings, input=input, limit=limit)
    folder.write(name, render(result, name=settings.name, input=input))
    print(f"{output}: {len(result.documents):,} documents, {len(result.thresholds)} thresholds")
    return 0
