"""Filters together: their order, their names in recipes and in the SDK, and their histograms."""

import pytest

from tests.unit.data.test_fineweb import LINES
from tests.unit.data.test_quality import GOOD
from tidewheel.data.config import FilterStep
from tidewheel.data.stages import filters
from tidewheel.workflow import filters as sdk

STOP = "The cat sat with the dog and they have lots of fun.\n"


def test_all_apply_in_the_order_of_finewebs_recipe():
    step = FilterStep.model_validate({"fineweb": {}, "gopher_quality": {}, "gopher_repetition": {}})
    assert [name for name, _ in step.rules()] == ["gopher_repetition", "gopher_quality", "fineweb"]
    lines = "\n".join(LINES)
    texts = [GOOD, lines, STOP + lines, (STOP + lines).replace(".", ",")]
    reasons, found = filters.judge(step.rules(), texts)
    assert reasons.tolist() == ["gopher_top_3_gram", "gopher_too_few_stop_words", "", "fineweb_too_few_terminal_lines"]
    limits = {name: limit for _, settings in step.rules() for name, limit in settings.limits().items()}
    assert len(limits) == sum(len(settings.limits()) for _, settings in step.rules())  # no name is used twice
    assert set(found) == set(limits)
    for name, histogram in found.items():
        assert sum(histogram["counts"]) == len(texts)
        assert histogram["limits"] == list(limits[name])


@pytest.mark.parametrize("name", list(FilterStep.model_fields))
def test_each_filter_by_name(name: str):
    step = FilterStep.model_validate(name)
    ((kind, rule),) = step.rules()
    assert kind == name
    assert filters.settings_of(kind, rule.canonical()) == rule
    asked = getattr(sdk, name)()
    assert FilterStep.model_validate({asked.name: asked.settings}) == step
    reasons, _ = filters.judge(step.rules(), [])
    assert len(reasons) == 0


def test_unknown_filter():
    with pytest.raises(ValueError, match=r"no such filter: c4; there are gopher_repetition"):
        filters.judge([("c4", FilterStep.model_validate("fineweb").rules()[0][1])], ["x"])
