"""`tidewheel import-config`: a configuration of another tool as ours."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from tidewheel.commands.options import AsJson, Overrides
from tidewheel.console import print_table

if TYPE_CHECKING:
    from tidewheel.imports.convert import Imported


SHOWN = 8
"""Keys in the last line of the output; the table has all."""


def import_config(
    tool: Annotated[Literal["deepspeed", "transformers", "accelerate", "torchtitan", "megatron"], Parameter(
        help="The tool that reads the file.")],
    file: Annotated[str, Parameter(help="DeepSpeed's ds_config.json, TrainingArguments as JSON, Accelerate's YAML, "
                                        "torchtitan's TOML, or a file with Megatron-LM's arguments.")],
    *,
    output: Annotated[str, Parameter(help="YAML file to write; default: standard output, after the table.")] = "",
    gpus: Annotated[int | None, Parameter(help="GPUs of the run, where the file does not say it.")] = None,
    set_: Overrides = None,
    plan: Annotated[bool, Parameter(negative="", help="Also plan it, as `tidewheel plan` does.")] = False,
    gpu: Annotated[str, Parameter(help="With --plan: kind of the GPUs.")] = "h100",
    sequence_length: Annotated[int | None, Parameter(help="With --plan: tokens of a sequence.")] = None,
    vocabulary_size: Annotated[int | None, Parameter(help="With --plan: size of the vocabulary.")] = None,
    as_json: AsJson = False,
) -> int:
    """Turn a configuration of DeepSpeed, transformers, Accelerate, torchtitan or Megatron-LM into ours.

    Show what became of every key: mapped, without meaning here (and why), or not available. A key that the tool does
    not have is an error. The YAML names the key of each value. docs/coming_from_keys.md lists all keys.
    """
    from tidewheel.errors import ConfigError
    from tidewheel.imports import TABLES
    from tidewheel.imports.convert import convert
    from tidewheel.imports.reading import read
    from tidewheel.imports.writing import as_yaml

    if plan and not output:
        raise ConfigError("--plan plans the written file", where="--plan", fix="add --output run.yaml")
    table = TABLES[tool]
    imported = convert(table, read(table, file), gpus=gpus, overrides=set_ or ())
    text = as_yaml(imported, file)
    if as_json:
        print(json.dumps({"settings": imported.settings, "keys": [asdict(row) for row in imported.rows]}, indent=2))
    else:
        _show(imported)
    if output:
        from tidewheel.storage import split

        folder, name = split(output)
        folder.write(name, text.encode())
        if not as_json:
            print(f"configuration: {output}")
    elif not as_json:
        print(text, end="")
    if plan:
        from tidewheel.commands.plan import plan_layouts

        workers = imported.settings.get("elastic", {}).get("max_workers", 1)
        return plan_layouts(output, gpus=gpus or workers, gpu=gpu, sequence_length=sequence_length,
                            vocabulary_size=vocabulary_size)
    return 0


def _show(imported: Imported) -> None:
    print_table([{"key": row.key, "value": str(row.given), "": row.verdict,
                  "here": "; ".join(part for part in (row.here, row.note) if part)} for row in imported.rows],
                title=imported.table.title)
    if imported.lost:
        keys = [row.key for row in imported.lost]
        more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
        count = "1 setting" if len(keys) == 1 else f"{len(keys)} settings"
        print(f"{count} would change the run but cannot be set here: {', '.join(keys[:SHOWN])}{more}")
