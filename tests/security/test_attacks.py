"""Every attack stays within its bound, and the bill of materials is complete."""

from __future__ import annotations

import pytest

from tests.security import dependencies
from tests.security.attacks import ATTACKS, Attack, attempt


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_the_bound_holds(attack: Attack):
    result, _ = attempt(attack)
    assert result


def test_the_bill_of_materials_names_every_package():
    document = dependencies.sbom()
    names = {component["name"].lower() for component in document["components"]}
    assert {"ray", "torch", "pyarrow", "pydantic"} <= names
    assert "tidewheel" not in names
    assert all(component["purl"].startswith("pkg:pypi/") for component in document["components"])
