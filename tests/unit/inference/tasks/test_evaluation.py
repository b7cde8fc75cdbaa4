"""Tests of tasks: units that survive a kill, what is refused, and log-likelihoods of rows with shared contexts."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.every import every
from tests.oracles import ORACLES
from tests.unit.inference.tasks.models import CHOICES, ITEMS, WRITTEN, write_model, write_task
from tidewheel import expressions
from tidewheel.errors import ConfigError, InputError, TidewheelError
from tidewheel.inference.folder import read_model
from tidewheel.inference.likelihood import Pair, batches_of, layout, rows_of, score
from tidewheel.inference.scorer import open_scorer
from tidewheel.inference.tasks.evaluation import UNIT, Options, evaluate
from tidewheel.inference.tasks.metrics import combined
from tidewheel.inference.tasks.requests import Answer, Generate, Likelihood, LogLikelihood, Request
from tidewheel.inference.tasks.task import Task
from tidewheel.models.decoder import Decoder
from tidewheel.storage import store


class Guessing:
    """Likes short texts, and breaks off after some requests."""

    def __init__(self, most: int = 1 << 30, name: str = "a") -> None:
        self.most, self.asked, self.name = most, 0, name

    def identity(self) -> dict[str, Any]:
        return {"weights": self.name}

    def chat(self, messages: Sequence[dict[str, str]]) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in messages)

    def answers(self, requests: Sequence[Request], *, chat: bool = False) -> list[Answer]:
        self.asked += len(requests)
        if self.asked > self.most:
            raise KeyboardInterrupt
        return [request.prompt[-3:] if isinstance(request, Generate) else
                Likelihood(-float(len(request.continuation)), False, 1) for request in requests
                if isinstance(request, Generate | LogLikelihood)]


def many(count: int) -> list[dict[str, Any]]:
    return [{**ITEMS[number % len(ITEMS)], "question": f"which, {number}?", "label": number % 4}
            for number in range(count)]


def units(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "stages").rglob("*")) if path.is_file()}


def test_a_killed_evaluation_answers_only_what_is_missing(tmp_path: Path):
    count = 2 * UNIT + 5
    file = write_task(tmp_path, "choices", CHOICES, many(count))
    options = Options((file,))
    with pytest.raises(KeyboardInterrupt):
        evaluate(Guessing(4 * UNIT), options, str(tmp_path / "out"))
    scorer = Guessing()
    [result] = evaluate(scorer, options, str(tmp_path / "out"))
    assert scorer.asked == 4 * (count - UNIT)
    assert (result.items, result.answered) == (count, count - UNIT)
    [whole] = evaluate(Guessing(), options, str(tmp_path / "whole"))
    assert whole.figures == result.figures
    assert units(tmp_path / "whole") == units(tmp_path / "out")
    nothing = Guessing(0)
    assert evaluate(nothing, options, str(tmp_path / "out"))[0].figures == result.figures
    # a damaged unit, another model, other examples and other data are answered anew
    [unit, *_] = json.loads(Path(result.uri).read_text())["units"]
    store(tmp_path / "out").write(f"stages/tasks/units/{unit}/answers.jsonl", b"{}")
    assert evaluate(Guessing(), options, str(tmp_path / "out"))[0].answered == UNIT
    assert evaluate(Guessing(name="b"), options, str(tmp_path / "out"))[0].answered == count
    assert evaluate(Guessing(), Options((file,), num_fewshot=1), str(tmp_path / "out"))[0].answered == count
    assert evaluate(Guessing(), Options((file,), seed=1), str(tmp_path / "out"))[0].answered == count
    write_task(tmp_path, "choices", CHOICES, many(count + 1))
    assert evaluate(Guessing(), options, str(tmp_path / "out"))[0].answered == count + 1
    assert evaluate(Guessing(), Options((file,), limit=3), str(tmp_path / "out"))[0].items == 3


REFUSED: dict[str, tuple[dict[str, Any], list[dict[str, Any]] | None, str]] = {
    "unknown key": ({**CHOICES, "num_fewshots": 1}, None, "did you mean 'num_fewshot'"),
    "code": ({**CHOICES, "process_docs": "f"}, None, "runs Python code"),
    "other data": ({**CHOICES, "dataset_path": "ai2_arc"}, None, "dataset_path"),
    "missing file": ({**CHOICES, "dataset_kwargs": {"data_files": {"test": "none.jsonl"}}}, None, "data is missing"),
    "missing split": ({**CHOICES, "test_split": "validation"}, None, "'validation' has no file"),
    "no split": ({**CHOICES, "test_split": None}, None, "name the split"),
    "no items": (CHOICES, [], "no items"),
    "no choices": ({**CHOICES, "num_fewshot": 0}, [{**ITEMS[0], "options": []}], "list of choices is empty"),
    "choices that are no list": ({**CHOICES, "doc_to_choice": "{{question}}"}, None, "not a list of choices"),
    "a target out of range": ({**CHOICES, "num_fewshot": 0}, [{**ITEMS[0], "label": 4}],
                              "4 is out of range: there are 4 choices"),
    "a target below 0": ({**CHOICES, "num_fewshot": 0}, [{**ITEMS[0], "label": -1}], "-1 is out of range"),
    "a target that is no choice": ({**CHOICES, "doc_to_target": "answer"}, None, "none of the choices"),
    "no target": ({**CHOICES, "num_fewshot": 0}, [{**ITEMS[0], "label": None}], "no target"),
    "unknown field": ({**CHOICES, "doc_to_text": "Q: {{questoin}}"}, None, "did you mean 'question'"),
    "a template of endless work": ({**CHOICES, "doc_to_text": "{% for a in range(99999) %}{% for b in range(99999) %}"
                                    "{% endfor %}{% endfor %}"}, None, "the template fails"),
    "a template that reaches for Python": ({**CHOICES, "doc_to_text": "{{question.__class__.__mro__}}"}, None,
                                           "doc_to_text"),
    "unknown metric": ({**CHOICES, "metric_list": [{"metric": "acc_nrm"}]}, None, "did you mean 'acc_norm'"),
    "other aggregation": ({**CHOICES, "metric_list": [{"metric": "acc", "aggregation": "median"}]}, None, "by mean"),
    "unknown filter": ({**WRITTEN, "filter_list": [{"name": "x", "filter": [{"function": "rgex"}]}]}, None, "rgex"),
    "broken expression": ({**WRITTEN, "filter_list": [{"name": "x", "filter": [
        {"function": "regex", "regex_pattern": "("}]}]}, None, "is not valid"),
    "broken expression of a metric": ({**WRITTEN, "metric_list": [
        {"metric": "exact_match", "regexes_to_ignore": ["("]}]}, None, "is not valid"),
    "broken replacement": ({**CHOICES, "doc_to_text": "{{question|regex_replace('a', '\\\\9')}}"}, None,
                           "invalid group reference"),
    "too many examples": ({**CHOICES, "num_fewshot": 11}, None, "11 examples are asked for, but there are 10"),
    "samples without temperature": ({**WRITTEN, "generation_kwargs": {"do_sample": True}}, None, "set a temperature"),
    "filter of likelihoods": ({**CHOICES, "filter_list": []}, None, "of generated text"),
}


@every(REFUSED)
def test_tasks_that_cannot_be_evaluated_are_refused(name: str):
    task, items, message = REFUSED[name]
    with tempfile.TemporaryDirectory() as folder:
        file = write_task(Path(folder), "task", task, items)
        with pytest.raises(TidewheelError) as error:
            Task.open(file).items()
    assert message in str(error.value)
    assert error.value.where
    assert error.value.fix


def test_a_task_file_may_include_another_and_lie_beside_its_data(tmp_path: Path):
    write_task(tmp_path, "base", CHOICES)
    (tmp_path / "child.yaml").write_text("include: base.yaml\ntask: child\ndataset_kwargs: {data_files: {test: "
                                         "base.jsonl}}\nnum_fewshot: 0\n")
    task = Task.open(str(tmp_path / "child.yaml"))
    assert (task.name, len(task.items())) == ("child", len(ITEMS))
    (tmp_path / "base.yaml").write_text("include: child.yaml\n")
    for text, error in (("include: ../x.yaml", "leave its folder"), ("process_docs: !function a.b", "Python code"),
                        ("- a", "keys and values")):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(TidewheelError, match=error):
            Task.open(str(tmp_path / "bad.yaml"))
    with pytest.raises(ConfigError, match="include one another"):
        Task.open(str(tmp_path / "child.yaml"))


HOSTILE = r"(\w+\s?)+$~"
ENDLESS: dict[str, dict[str, Any]] = {
    "template": {"doc_to_text": "{{'a'*60 ~ text|regex_replace('" + HOSTILE.replace("\\", "\\\\") + "', '')}}"},
    "filter": {"filter_list": [{"name": "x", "filter": [{"function": "regex", "regex_pattern": HOSTILE}]}]},
}


class Long(Guessing):
    """Writes a text on which `HOSTILE` backtracks."""

    def answers(self, requests: Sequence[Request], *, chat: bool = False) -> list[Answer]:
        return ["a" * 60] * len(requests)


def test_an_expression_that_never_ends_is_refused_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(expressions, "SECONDS", 0)  # with the second that it is rounded up to
    for name, settings_of_task in ENDLESS.items():
        file = write_task(tmp_path, name, {**WRITTEN, **settings_of_task}, ITEMS[:1])
        with pytest.raises(InputError, match="takes more than 0 s of processor time") as error:
            evaluate(Long(), Options((file,)), str(tmp_path / "out"))
        assert repr(HOSTILE) in error.value.what, name
        assert error.value.where == f"{file}, item 1"
    assert expressions.sub("a+", "b", "caat") == "cbt"  # another process has taken over


def test_a_standard_error_needs_two_items():
    assert combined([1.0], "mean") == (1.0, None)
    assert combined([1.0, 0.0, 0.0, 1.0], "mean") == (0.5, pytest.approx((1 / 3 / 4) ** 0.5))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """Return a decoder with sliding windows, which count in positions."""
    folder = tmp_path_factory.mktemp("model") / "hf"
    ORACLES["mistral"].build(seed=1).save_pretrained(folder)
    return read_model(store(folder))


TOKENS = st.lists(st.integers(0, 40), min_size=1, max_size=9).map(tuple)


@settings(max_examples=15, deadline=None)
@given(contexts=st.lists(TOKENS, min_size=1, max_size=3), data=st.data())
def test_shared_contexts_change_no_likelihood(decoder: Decoder, contexts: list[tuple[int, ...]], data: st.DataObject):
    pairs = data.draw(st.lists(st.builds(Pair, st.sampled_from(contexts), TOKENS), min_size=1, max_size=8))
    found = {}
    for batch in batches_of(rows_of(pairs, 24), 48):
        tensors = layout(batch, torch.device("cpu"))
        found |= zip(tensors.pairs, score(decoder, tensors))
    assert sorted(found) == list(range(len(pairs)))
    for index, pair in enumerate(pairs):
        tokens = torch.tensor([pair.context + pair.continuation])
        with torch.no_grad():
            logits = decoder(tokens, torch.arange(tokens.shape[1])[None], torch.zeros_like(tokens))[0, :-1]
        own = logits[len(pair.context) - 1:]
        targets = torch.tensor(pair.continuation)
        assert found[index].log_likelihood == pytest.approx(-float(F.cross_entropy(own, targets, reduction="sum")),
                                                            abs=1e-4)
        assert found[index].greedy == bool((own.argmax(dim=1) == targets).all())


def test_a_text_is_the_same_alone_and_among_others(tmp_path: Path):
    scorer = open_scorer(str(write_model(tmp_path / "model")), device="cpu")
    requests = [Generate("the harbour " * (1 + number), ("z",), 3 + number, seed=number, temperature=number % 2)
                for number in range(5)]
    together = scorer.answers(requests)
    assert together == [scorer.answers([request])[0] for request in requests]
    with pytest.raises(InputError, match="no room"):
        scorer.answers([Generate("a", (), 96)])
    with pytest.raises(InputError, match="no token is left"):
        scorer.answers([LogLikelihood("a", "")])


def test_texts_begin_as_transformers_begins_them(tmp_path: Path):
    """The post-processor of a folder's tokenizer puts a token before each text, and that token predicts the first."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, processors

    folder = write_model(tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<|im_start|> $A",
                                                             special_tokens=[("<|im_start|>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    texts = open_scorer(str(folder), device="cpu").texts
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert texts.encode("the harbour") == theirs("the harbour").input_ids
    assert (texts.prefix, texts.leading) == (1, (1,))
    pair = texts.pair(LogLikelihood("the harbour ", "is blue"))
    assert [*pair.context, *pair.continuation] == theirs("the harbour is blue").input_ids
    assert texts.pair(LogLikelihood("", "is blue")).context == (1,)
