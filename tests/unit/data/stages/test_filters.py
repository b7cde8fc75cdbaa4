"""Combined filters: their order, their names in recipes and in the SDK, and their histograms."""

import json
import re

import numpy as np
import pyarrow as pa
import pytest

import tidewheel as tw
from tests.unit.data.filters.test_fineweb import LINES
from tests.unit.data.filters.test_gopher_quality import GOOD
from tidewheel.config import build
from tidewheel.data import verdicts
from tidewheel.data.config import FilterStep
from tidewheel.data.document import DOCUMENT_SCHEMA
from tidewheel.data.filter import FILTERS, Filter, Verdicts
from tidewheel.data.stage import Unit, UnitWriter
from tidewheel.data.stages import filters
from tidewheel.data.stages.outcomes import Outcomes, grouped, groups
from tidewheel.errors import ConfigError
from tidewheel.parts import name_of

STOP = "The cat sat with the dog and they have lots of fun.\n"


def documents(texts, sources=None):
    """Return a table of documents."""
    count = len(texts)
    return pa.table({"id": [f"d{number:04d}" for number in range(count)], "text": pa.array(texts, pa.large_string()),
                     "source": sources or ["web"] * count, "meta": ['{"_file": "f"}'] * count}, schema=DOCUMENT_SCHEMA)


def names(given):
    return [name_of(type(filter)) for filter in given]


def test_filters_apply_in_the_order_of_finewebs_recipe():
    step = FilterStep.model_validate({"fineweb": {}, "gopher_quality": {}, "gopher_repetition": {}})
    assert names(step.filters) == ["gopher_repetition", "gopher_quality", "fineweb"]
    lines = "\n".join(LINES)
    texts = [GOOD, lines, STOP + lines, (STOP + lines).replace(".", ",")]
    judged = filters.judge(step.filters, documents(texts))
    result = judged.histograms
    assert judged.reasons.tolist() == ["gopher_top_3_gram", "gopher_too_few_stop_words", "",
                                       "fineweb_too_few_terminal_lines"]
    limits = {name: limit for filter in step.filters for name, limit in filter.limits().items()}
    assert len(limits) == sum(len(filter.limits()) for filter in step.filters)  # no name is used twice
    assert set(result) == set(limits)
    for name, histogram in result.items():
        assert sum(histogram["counts"]) == len(texts)
        assert histogram["limits"] == list(limits[name])


NEEDS = {"urls": {"domains": ["bad.com"]}, "words": {"words": ["bad"]}, "classifier": {"file": "model.bin"}}


@pytest.mark.parametrize("name", FILTERS.built_in())
def test_each_filter_is_found_by_name(name: str):
    step = FilterStep.model_validate({name: NEEDS[name]} if name in NEEDS else name)
    (rule,) = step.filters
    assert names([rule]) == [name]
    assert filters.received(*filters.bound(rule)) == rule
    assert getattr(tw.filters, name)(**NEEDS.get(name, {})) == rule
    assert FilterStep.model_validate(step.canonical()) == step
    if name != "classifier":  # without its model
        assert len(filters.judge(step.filters, documents([])).reasons) == 0


def test_filters_define_their_order_and_not_the_file():
    everything = FilterStep.model_validate({name: NEEDS.get(name, {}) for name in FILTERS.built_in()})
    assert names(everything.filters) == ["urls", "language", "gopher_repetition", "gopher_quality", "c4", "fineweb",
                                         "refinedweb", "words", "classifier", "pii"]
    assert len({filter.ORDER for filter in everything.filters}) == len(everything.filters)


@pytest.mark.parametrize(("values", "told"), [
    ({"zzz": {}}, "unknown key 'zzz'; known keys: annotate, c4, classifier"),
    ({"gopher_qualty": {}}, "unknown key 'gopher_qualty', did you mean 'gopher_quality'?"),
    ({"pii": {}, "anotate": True}, "unknown key 'anotate', did you mean 'annotate'?"),
    ({"c4": {"min_sentence": 3}}, "unknown key 'c4.min_sentence', did you mean 'min_sentences'?"),
    ({"c4": {"min_sentences": "x"}}, "c4.min_sentences: Input should be a valid integer"),
    ({"c4": 3}, "c4: Input should be a valid dictionary"),
])
def test_errors_name_the_setting(values, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        build(FilterStep, values)


class Cut(Filter):
    """Filter that cuts `word` and drops documents with `bad`."""

    EDITS = "cut_out"
    DETAILS = ("cuts",)
    word: str = "cut"
    bad: str = "bad"

    def limits(self):
        return {"cuts": (None, None)}

    def apply(self, batch):
        values = batch.texts.to_pylist()
        return Verdicts(["cut_bad" if self.bad in text else "" for text in values],
                        {"cuts": np.array([float(text.count(self.word)) for text in values])},
                        [text.replace(self.word, "") for text in values])


class CutMore(Cut):
    """The same filter with another reason."""

    EDITS = "cut_more_out"
    DETAILS = ()


class Name(Filter):
    """Filter that marks documents without the letter e, drops those from `source`, and ranks by length."""

    WRITES = True

    source: str = "spam"

    def apply(self, batch):
        metas = [json.dumps({**document["meta"], "e": "e" in document["text"]}) for document in batch.documents()]
        reasons = ["name_source" if source == self.source else "" for source in batch.sources.to_pylist()]
        quality = np.array([len(text) for text in batch.texts.to_pylist()], np.float32)
        return Verdicts(reasons, metas=metas, quality=quality)


def test_a_filter_sees_the_results_of_those_before_it():
    texts = ["a cut b", "plain", "bad cut", " cut ", "axb cut", "spam cutcut", "x"]
    table = documents(texts, sources=["web"] * 5 + ["spam", "web"])
    given = [Cut(), Name(), CutMore(word="x", bad="a  b")]
    judged = filters.judge(given, table)
    assert judged.reasons.tolist() == ["cut_bad", "", "cut_bad", f"{__name__}:Cut_nothing_left", "",
                                       "name_source", f"{__name__}:CutMore_nothing_left"]
    assert judged.texts.to_pylist() == ["a  b", "plain", "bad cut", " cut ", "ab ", "spam ", "x"]
    first, second = judged.edits
    assert (first.reason, first.rows.tolist()) == ("cut_out", [0, 4, 5])
    assert json.loads(first.details[2]) == {"bytes_before": 11, "bytes_after": 5, "cuts": 2}
    assert (second.reason, second.rows.tolist()) == ("cut_more_out", [4])
    assert second.before[4].as_py() == "axb "
    assert judged.quality.tolist() == [4, 5, 7, 5, 4, 5, 1]
    assert json.loads(judged.metas[0].as_py()) == {"_file": "f", "e": False}
    assert judged.statistics["cuts"].tolist() == [0, 0, 0, 0, 1, 0, 1]


def test_batching_does_not_change_outcomes():
    texts = [f"{number} " + "cut " * (number % 3) + ("bad" if number % 7 == 0 else "") for number in range(100)]
    table = documents(texts)
    group = [(False, [Cut(), Name()])]
    whole = Outcomes()
    passed = whole.apply(group, table)
    parts = Outcomes()
    pieces = [parts.apply(group, table.slice(first, 13)) for first in range(0, 100, 13)]
    assert pa.concat_tables([piece.table for piece in pieces]).equals(passed.table)
    assert whole.verdicts().equals(parts.verdicts())
    assert whole.summary() == parts.summary()
    samples = verdicts.samples(whole.verdicts(), whole.samples_of())
    assert samples == verdicts.samples(parts.verdicts(), parts.samples_of())
    assert set(samples) == {"cut_out", "cut_bad"}
    shown = samples["cut_out"][0]
    assert "cut" in shown["text"]
    assert shown["after"] == shown["text"].replace("cut", "")
    assert passed.table["text"].to_pylist() == [text.replace("cut", "") for text in texts if "bad" not in text]
    assert whole.edited == sum("cut" in text for text in texts if "bad" not in text) == int(passed.changed.sum())


def test_annotating_changes_nothing_and_records_reasons(tmp_path):
    texts = ["a cut", "bad", "plain"]
    result = Outcomes()
    passed = result.apply([(True, [Cut()])], documents(texts))
    assert passed.table["text"].to_pylist() == texts
    assert not passed.changed.any()
    assert len(result.verdicts()) == 0
    assert result.summary()["would_drop"] == {"cut_bad": 1}
    writer = UnitWriter(str(tmp_path), Unit("filter", "x", "0" * 32))
    result.write_annotations(writer, "filter")
    stamp = writer.files["annotations"]
    assert stamp.key.startswith("annotations/filter/")
    rows = verdicts.decode(writer.store.read(stamp.key))
    assert rows.to_pylist() == [
        {"id": "d0000", "source": "web", "cuts": 1.0, "would_drop": ""},
        {"id": "d0001", "source": "web", "cuts": 0.0, "would_drop": "cut_bad"},
        {"id": "d0002", "source": "web", "cuts": 0.0, "would_drop": ""}]


def test_annotations_predict_the_verdicts_of_thresholds():
    texts = [GOOD, "\n".join(LINES), STOP * 4, STOP + "\n".join(LINES), GOOD[:90], GOOD * 3]
    table = documents(texts)
    step = FilterStep.model_validate({"gopher_quality": {}, "fineweb": {}, "annotate": True})
    result = Outcomes()
    result.apply(groups(grouped([step])), table)
    (rows,) = result.annotations
    assert len(rows) == len(texts)
    assert rows["would_drop"].to_pylist() == filters.judge(step.filters, table).reasons.tolist()
    values = np.sort(rows["words"].to_numpy())
    for threshold in values.tolist():  # a limit read off the annotations keeps exactly the documents that reach it
        chosen = FilterStep.model_validate({"gopher_quality": {"min_words": int(threshold), "min_stop_words": 0}})
        reasons = filters.judge(chosen.filters, table).reasons
        assert ((reasons == "gopher_too_few_words") == (rows["words"].to_numpy() < threshold)).all()


def test_consecutive_steps_with_the_same_annotate_are_one_group():
    one, two, three = (FilterStep.model_validate(value) for value in (
        {"fineweb": {}}, {"gopher_quality": {}}, {"gopher_quality": {}, "annotate": True}))
    assert [(annotate, names(rules)) for annotate, rules in groups(grouped([one, two, three, one]))] == [
        (False, ["fineweb", "gopher_quality"]), (True, ["gopher_quality"]), (False, ["fineweb"])]


def test_filters_that_follow_an_edit_see_the_edited_text():
    """Sharing measures does not change the verdicts of a filter on its texts."""
    first = FilterStep.model_validate({"gopher_repetition": {}, "gopher_quality": {"min_words": 5, "min_stop_words": 0},
                                       "fineweb": {"short_line": 12}, "c4": {"min_sentences": 1}, "refinedweb": {}})
    second = FilterStep.model_validate({"fineweb": {"short_line": 40, "max_short_lines": 1.0}, "gopher_quality": {
        "min_words": 5, "min_stop_words": 0}})
    rules = [*first.filters, *second.filters]
    texts = ["\n".join(LINES), "\n".join([*LINES, "a line, open", "x", "MENU | HOME"]), GOOD, "", "x { y.", STOP * 3,
             *(STOP + "\nno end\n" + line for line in LINES)]
    judged = filters.judge(rules, documents(texts))
    left, reasons, statistics = texts, np.full(len(texts), "", dtype=object), {}
    for rule in rules:
        alone = filters.judge([rule], documents(left))
        left = [now if reason == "" else was
                for now, was, reason in zip(alone.texts.to_pylist(), left, reasons, strict=True)]
        reasons = np.where(reasons == "", alone.reasons, reasons)
        statistics |= alone.statistics
    assert judged.reasons.tolist() == reasons.tolist()
    assert judged.texts.to_pylist() == left
    assert judged.edits
    for name, values in statistics.items():
        np.testing.assert_array_equal(judged.statistics[name], values)
