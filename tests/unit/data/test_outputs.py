"""Replacing a finished output, cleaning it, and comparing two outputs."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.plain_execution import without_ray
from tidewheel.cli import run_command
from tidewheel.config import build
from tidewheel.data import clean, pipeline
from tidewheel.data.config import PipelineConfig
from tidewheel.data.diff import compare
from tidewheel.data.stages import origin
from tidewheel.errors import ConfigError, InputError, OwnershipError
from tidewheel.lease import holding
from tidewheel.shards.verify import verify
from tidewheel.storage import store


def recipe(min_words: int = 5, **changes: Any) -> dict[str, Any]:
    return {"name": "small", "partitions": 2, "read": {"paths": ["*.jsonl"]}, "steps": [
        {"filter": {"gopher_quality": {"min_words": min_words, "min_stop_words": 0}}}, {"dedup_near": {}},
        {"tokenize": {"train": {"vocabulary_size": 300}}},
        {"pack": {"sequence_length": 16, "validation_fraction": 0.2}}], **changes}


def run(folder: Path, output: str = "out", may_replace: bool = False, source: str = "in", **changes: Any) -> Any:
    with without_ray():
        return pipeline.run(build(PipelineConfig, recipe(**changes)), input=str(folder / source),
                            output=str(folder / output), may_replace=may_replace)


def write(folder: Path, name: str, documents: range) -> None:
    """Return documents with as many distinct words as their number."""
    folder.mkdir(exist_ok=True)
    texts = {f"d{number}": " ".join(word(100 * number + place) for place in range(number)) for number in documents}
    (folder / name).write_text("\n".join(json.dumps({"id": name, "text": text}) for name, text in texts.items()))


def word(number: int) -> str:
    return "".join("abcdefghij"[int(digit)] for digit in f"{number:05d}")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    write(folder / "in", "a.jsonl", range(3, 40))
    run(folder)
    return folder


@pytest.fixture
def folder(finished, tmp_path) -> Path:
    return shutil.copytree(finished, tmp_path / "copy")


def command(folder: Path, min_words: int, *more: str) -> list[str]:
    (folder / "recipe.yaml").write_text(json.dumps(recipe(min_words)))
    return ["data", "run", str(folder / "recipe.yaml"), "--input", str(folder / "in"), "--output", str(folder / "out"),
            *more]


def test_a_different_recipe_is_refused_with_the_differences(folder):
    before = (folder / "out/shards/manifest.json").read_bytes()
    with pytest.raises(ConfigError) as raised:
        run(folder, min_words=9)
    message = str(raised.value)
    assert "filter.gopher_quality.min_words was 5, now 9" in message
    assert "documents, " in message
    assert "--replace" in message
    assert (folder / "out/shards/manifest.json").read_bytes() == before
    run(folder)  # the same one brings it up to date
    run(folder, may_replace=True, min_words=9)
    assert origin.read(store(folder / "out"))["recipe"]["steps"][0]["filter"]["gopher_quality"]["min_words"] == 9


def test_an_added_step_is_reported_by_name_only(folder):
    more = recipe()["steps"]
    more.insert(1, {"dedup_exact": {}})
    more.append({"write": {}})
    with pytest.raises(ConfigError) as raised:
        run(folder, steps=more)
    assert str(raised.value).splitlines()[0].endswith(
        '; steps was ["filter", "dedup_near", "tokenize", "pack"], now ["filter", "dedup_exact", "dedup_near", '
        '"tokenize", "pack", "write"]')


def test_the_dry_run_command_also_requires_replace(folder, capsys):
    for dry in ([], ["--dry-run"]):
        assert run_command(command(folder, 9, *dry)) == 2
        assert "min_words was 5, now 9" in capsys.readouterr().err
    assert run_command(command(folder, 9, "--dry-run", "--replace")) == 0
    assert "replaces small: 29 documents" in capsys.readouterr().out
    assert run_command(command(folder, 5, "--dry-run")) == 0
    assert "replaces" not in capsys.readouterr().out


def test_disjoint_input_also_requires_replace(folder):
    write(folder / "other", "b.jsonl", range(50, 60))
    with pytest.raises(ConfigError, match="no file of its input"):
        run(folder, source="other")
    write(folder / "in", "b.jsonl", range(50, 60))
    assert run(folder).documents > 30  # a file more is the same output, brought up to date


def test_an_unrecorded_recipe_requires_replace(folder):
    (folder / "out/recipe.json").unlink()
    with pytest.raises(ConfigError, match="was not recorded"):
        run(folder, min_words=9)


def files(output: Path) -> dict[str, int]:
    return {str(path.relative_to(output)): path.stat().st_size for path in output.rglob("*")
            if path.is_file() and "leases" not in path.parts}


def test_clean_removes_exactly_the_unreferenced_files(folder, capsys):
    output = folder / "out"
    assert clean.find(str(output)) == []  # nothing of a run is left over
    fresh = run(folder, "fresh", min_words=9)
    old = files(output)
    run(folder, may_replace=True, min_words=9)
    both = files(output)
    assert run_command(["data", "clean", str(output), "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert files(output) == both
    assert run_command(["data", "clean", str(output)]) == 0
    left = files(output)
    assert set(both) - set(left) <= set(old)
    assert set(left) - {"report.html"} == set(files(folder / "fresh"))
    gone = sum(both[name] for name in both if name not in left)
    assert f"{len(both) - len(left)} files, {gone / 1e6:.1f} MB would be removed" in told
    assert verify(str(output / "shards")) == []
    again = run(folder, min_words=9)
    assert all(stage["units_reused"] == stage["units"] for stage in again.value["stages"])
    assert again.documents == fresh.documents


def test_clean_keeps_the_waves_of_a_set(folder):
    steps = [*recipe()["steps"][:-1], {"pack": {"sequence_length": 16, "waves": 2}}]
    run(folder, "waves", steps=steps)
    assert clean.find(str(folder / "waves")) == []


def test_clean_keeps_an_unfinished_run_by_default(folder, monkeypatch):
    def stop(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("tidewheel.data.stages.pack.commit", stop)
        with pytest.raises(KeyboardInterrupt):
            run(folder, may_replace=True, min_words=9)
    with pytest.raises(InputError, match="has begun here and not finished"):
        clean.find(str(folder / "out"))
    assert clean.clean(str(folder / "out"), with_unfinished=True)
    assert clean.find(str(folder / "out")) == []
    assert verify(str(folder / "out/shards")) == []


def test_clean_refuses_unknown_outputs_and_active_pipelines(folder, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="has finished here"):
        clean.clean(str(tmp_path))
    monkeypatch.setattr(clean, "holding", functools.partial(holding, beat_seconds=0.2))
    with holding(store(folder / "out").child(pipeline.LEASES), "pipeline", "x", beat_seconds=0.05), \
            pytest.raises(OwnershipError, match="is writing to this output"):
        clean.clean(str(folder / "out"))


def test_compare_reports_settings_counts_and_documents(folder, capsys):
    write(folder / "in", "b.jsonl", range(50, 60))
    run(folder, "other", min_words=9)
    result = compare(str(folder / "out"), str(folder / "other"))
    assert result.settings == [("filter.gopher_quality.min_words", 5, 9)]
    assert result.inputs == {"same": 1, "changed": 0, "gained": 1, "lost": 0}
    assert (result.both, result.gained.count, result.lost.count) == (31, 10, 4)
    assert result.lost.reasons == {"filter: gopher_too_few_words": 4}
    assert sorted(result.lost.examples) == ["d5", "d6", "d7", "d8"]
    assert result.gained.reasons == {"not among its documents": 10}
    back = compare(str(folder / "other"), str(folder / "out"))
    assert back.gained.reasons == {"filter: gopher_too_few_words": 4}
    assert run_command(["data", "diff", str(folder / "out"), str(folder / "other")]) == 0
    output = capsys.readouterr().out
    assert "4 in b: filter: gopher_too_few_words" in output
    assert "documents in both: 31" in output
    assert run_command(["data", "diff", str(folder / "out"), str(folder / "other"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lost"]["documents"] == 4


def test_comparing_in_shares_gives_the_same_result(folder, monkeypatch):
    write(folder / "in", "b.jsonl", range(50, 60))
    run(folder, "other", min_words=9)
    whole = compare(str(folder / "out"), str(folder / "other"))
    monkeypatch.setattr("tidewheel.data.diff.AT_A_TIME", 7)
    shares = compare(str(folder / "out"), str(folder / "other"))
    assert (shares.both, shares.gained.count, shares.lost.reasons) == (whole.both, whole.gained.count,
                                                                      whole.lost.reasons)


def test_an_output_does_not_differ_from_itself(folder, capsys):
    assert run_command(["data", "diff", str(folder / "out"), str(folder / "out")]) == 0
    assert "settings: the same" in capsys.readouterr().out
    assert run_command(["data", "diff", str(folder / "out"), str(folder / "in")]) == 2
