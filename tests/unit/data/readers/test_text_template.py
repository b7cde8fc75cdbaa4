"""Text templates join several fields: only plain names are allowed, and errors name the missing field."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tidewheel.config import build
from tidewheel.data.config import PipelineConfig, ReadConfig
from tidewheel.data.document import content_id
from tidewheel.data.quarantine import Bad
from tidewheel.data.readers import Record, code, read_records, shape_of
from tidewheel.data.text_template import TextTemplate
from tidewheel.errors import ConfigError
from tidewheel.storage import store

TITLED = "{title}\n\n{body}"


def config(template: str = TITLED, **settings) -> ReadConfig:
    recipe = {"read": {"paths": ["*"], "text": {"template": template}, **settings}, "steps": ["dedup_exact"]}
    return build(PipelineConfig, recipe).read


def read(folder, values, template: str = TITLED, **settings) -> Record | Bad:
    (folder / "a.jsonl").write_text(json.dumps(values) + "\n")
    return next(iter(read_records(store(folder), "a.jsonl", config(template, **settings))))


def test_fields_are_joined_and_leave_meta(tmp_path):
    result = read(tmp_path, {"title": "One", "body": "two {x}", "year": 1999, "id": None})
    assert (result.text, result.id) == ("One\n\ntwo {x}", content_id("One\n\ntwo {x}"))
    assert {"title", "body"}.isdisjoint(json.loads(result.meta))
    assert json.loads(result.meta)["year"] == 1999
    values = {"title": "", "body": "b", "id": "x", "language": "en"}
    result = read(tmp_path, values, "{title}{body} ({id}, {language}, {id})")
    assert (result.text, result.id, json.loads(result.meta)["language"]) == ("b (x, en, x)", "x", "en")


def test_nested_names_numbers_and_braces(tmp_path):
    values = {"data": {"title": "One", "body": {"text": "two"}, "n": 3}}
    result = read(tmp_path, values, "{{{data.title}}} {data.body.text} {data.n}")
    assert result.text == "{One} two 3"
    assert "data" not in json.loads(result.meta)
    assert read(tmp_path, {"data.title": "flat"}, "{data.title}").text == "flat"


@pytest.mark.parametrize(("values", "reason", "detail"), [
    ({"body": "b"}, "missing_text", "no field 'title', which the template names; there are: 'body'"),
    ({"title": None, "body": "b"}, "missing_text", "no field 'title'"),
    ({"title": ["t"], "body": "b"}, "text_not_string", "'title', which the template names, is a list"),
    ({"title": "t", "body": True}, "text_not_string", "'body', which the template names, is a bool"),
    ({"title": "t", "body": 1.5}, "text_not_string", "is a float"),
    ({"title": " ", "body": ""}, "empty_text", "every field"),
    ({"title": "t", "body": "\x00"}, "null_bytes", ""), ({"title": "t", "body": "\ud800"}, "invalid_unicode", "")])
def test_records_that_cannot_fill_the_template_have_a_reason(tmp_path, values, reason, detail):
    result = read(tmp_path, values)
    assert isinstance(result, Bad)
    assert (result.reason, detail in result.detail) == (reason, True), result.detail


@pytest.mark.parametrize(("template", "told"), [
    ("{title.__class__!r}", "not a plain name"), ("{title[0]}", "not a plain name"),
    ("{title:>10}", "not a plain name"), ("{title:{width}}", "not a plain name"), ("{}", "not a plain name"),
    ("{title", "write {{ and }} for braces"),
    ("title}", "write {{ and }} for braces"), ("no field", "names no field"), ("{a..b}", "empty name"),
    ("{.a}", "empty name")])
def test_templates_with_more_than_field_names_are_refused(template, told):
    with pytest.raises(ConfigError, match=r"read\.text") as error:
        config(template)
    assert told in str(error.value)


def test_a_name_like_an_attribute_is_only_a_field_name(tmp_path):
    result = read(tmp_path, {"title": "t"}, "{title.__class__}")
    assert (result.reason, result.detail[:24]) == ("missing_text", "no field 'title.__class_")


def test_settings():
    with pytest.raises(ConfigError, match="did you mean 'template'"):
        build(PipelineConfig, {"read": {"paths": ["*"], "text": {"templat": "{a}"}}, "steps": []})
    with pytest.raises(ConfigError, match="takes its text from messages"):
        config(kind="chat")
    assert config().canonical()["text"] == {"template": TITLED}
    assert build(ReadConfig, {"paths": ["*"], "text": "body"}).canonical()["text"] == "body"
    assert TextTemplate(template="{a}{b}{a}").fields == ("a", "b")


def test_tables_and_columns(tmp_path):
    (tmp_path / "a.csv").write_text("title,body,n\nOne,two,3\n,b,4\n")
    settings = config("{title}: {body} {n}")
    results = list(read_records(store(tmp_path), "a.csv", settings))
    assert [item.text for item in results] == ["One: two 3", ": b 4"]
    assert "without a column 'text'" in shape_of(store(tmp_path), "a.csv", config("{title}{text}")).problem
    nested = pa.array([{"n": 3}, {"n": 4}])
    table = pa.table({"title": ["One", None], "body": pa.array(["two", "b"]).dictionary_encode(), "at": nested,
                      "tags": [["x"], []]})
    pq.write_table(table, tmp_path / "a.parquet")
    read_as = list(read_records(store(tmp_path), "a.parquet", config("{title}: {body} {at.n}")))
    assert read_as[0].text == "One: two 3"
    assert (read_as[1].reason, "'title'" in read_as[1].detail) == ("missing_text", True)
    results = next(iter(read_records(store(tmp_path), "a.parquet", config("{title}{tags}"))))
    assert (results.reason, "list" in results.detail) == ("text_not_string", True)


def test_a_template_applies_to_text_files_and_code(tmp_path):
    (tmp_path / "a.md").write_text("hello")
    result = next(iter(read_records(store(tmp_path), "a.md", config("{id}: {text}"))))
    assert (result.text, result.id) == ("a.md: hello", "a.md")
    (tmp_path / "a.py").write_text("x = 1\n")
    result = next(iter(code.records(store(tmp_path), [("a.py", "a.py")], config("# {path}\n{text}", format="code"))))
    assert (result.text, result.id) == ("# a.py\nx = 1\n", "a.py")
