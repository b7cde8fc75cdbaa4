"""The benchmark that trains every family compares like with like."""

from __future__ import annotations

from tests.benchmarks.families import INNER, LENGTH, VOCABULARY, settings, shapes
from tests.every import every
from tidewheel.models import families


@every(families.KIND.built_in())
def test_every_family_has_as_much_feed_forward_for_a_token(family: str):
    config = settings(shapes()[family], family, "data", "output", 10)
    model = config.model
    inputs = model.FEED_FORWARD.inputs
    costs = [model.layer_costs(layer) for layer in range(model.num_layers)]
    assert {(inputs + 1) * cost.inner for cost in costs} == {3 * INNER}
    assert model.vocabulary_size == VOCABULARY
    assert model.max_sequence_length >= LENGTH
