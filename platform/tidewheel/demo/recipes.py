"""Find the demo's pipeline and training configuration, in the checkout or in the installed package."""

from __future__ import annotations

from pathlib import Path


def recipe(name: str) -> str:
    """Return the path of a recipe such as "pipelines/demo.yaml".

    Raises:
        FileNotFoundError: it is neither in the checkout nor in the installed package.
    """
    this_file = Path(__file__).resolve()
    for root in (this_file.parents[3], this_file.parent / "recipes"):
        if (root / name).is_file():
            return str(root / name)
    raise FileNotFoundError(f"the recipe {name} is neither in the checkout nor in the installed package")
