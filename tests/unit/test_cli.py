"""The command line for a new user: help answers at once, and errors state the cause, its location and a fix."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tidewheel.cli import run_command

COMMANDS = [
    [], ["data"], ["data", "run"], ["data", "example"], ["data", "similar"],
    ["data", "train-classifier"],
    ["shards"], ["shards", "inspect"], ["shards", "verify"], ["shards", "trace"],
    ["train"], ["checkpoint"], ["checkpoint", "list"], ["checkpoint", "verify"], ["report"], ["audit"], ["doctor"],
    ["demo"], ["explain"], ["plan"], ["plan", "goodput"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_of_every_command(command, capsys):
    assert run_command([*command, "--help"]) == 0
    assert "Usage: tidewheel" in capsys.readouterr().out


def test_help_imports_nothing_heavy():
    code = ("import sys; from tidewheel.cli import run_command; run_command(['train', '--help']);"
            "print([m for m in ('ray', 'torch', 'numba', 'pyarrow') if m in sys.modules])")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"


def refused(capsys, *command: str) -> str:
    """Run a command that must end with exit code 2 and no stack trace, and return its message."""
    assert run_command(command) == 2
    out = capsys.readouterr()
    assert "Traceback" not in out.err + out.out
    assert "fix:" in out.err
    return " ".join(out.err.split())


def test_unknown_command_names_the_nearest(capsys):
    assert '"data"' in refused(capsys, "daat")


def test_an_unknown_option_is_refused(capsys):
    assert "--frobnicate" in refused(capsys, "doctor", "--frobnicate")


@pytest.mark.parametrize("command", [["data", "run", "--output", "out"], ["train"]], ids=["data run", "train"])
def test_a_missing_configuration_file_is_named(command, capsys):
    assert "nowhere.yaml" in refused(capsys, *command, "--config", "nowhere.yaml")


@pytest.mark.parametrize(("command", "text", "near"), [
    (["data", "run", "--output", "out"], "name: x\nreadd: {paths: [a]}\n", "'read'"),
    (["data", "run", "--output", "out"], "name: x\nread: {paths: [a]}\nsteps: [{dedup_exacct: {}}]\n", "dedup_exact"),
    (["train"], "stepps: 3\n", "'steps'"),
], ids=["pipeline key", "pipeline step", "training key"])
def test_unknown_key_names_the_nearest(command, text, near, capsys, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    message = refused(capsys, *command, "--config", str(path))
    assert "did you mean" in message
    assert near in message


def test_broken_yaml_names_the_line(capsys, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("name: x\nread: {paths: [a\n")
    assert "bad.yaml:" in refused(capsys, "data", "run", str(path), "--output", "out")


@pytest.mark.parametrize(("share", "message"), [("0.1", "no decontaminate step"), ("10", "from 0 to 1")])
def test_a_gate_that_cannot_work_is_refused(share, message, capsys, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text('name: x\nread: {paths: ["*.jsonl"]}\n'
                      "steps: [{tokenize: {train: {vocabulary_size: 300}}}, {pack: {sequence_length: 16}}]\n")
    assert message in refused(capsys, "data", "run", str(recipe), "--output", "out", "--fail-above", share)


@pytest.mark.parametrize("override", ["steps", "=3", "steps=[1"])
def test_a_malformed_override_is_refused(override, capsys, tmp_path):
    path = tmp_path / "train.yaml"
    path.write_text("steps: 3\n")
    assert "--set" in refused(capsys, "train", str(path), "--set", override)


@pytest.mark.parametrize("command", [["shards", "verify"], ["shards", "inspect"], ["report"], ["audit"],
                                     ["checkpoint", "verify"], ["checkpoint", "list"]], ids=" ".join)
def test_empty_folder_is_explained(command, capsys, tmp_path):
    assert str(tmp_path) in refused(capsys, *command, str(tmp_path))


def test_a_run_without_checkpoints_is_listed_as_empty(capsys, tmp_path):
    (tmp_path / "run.json").write_text("{}")
    assert run_command(["checkpoint", "list", str(tmp_path)]) == 0
    assert "no checkpoint yet" in capsys.readouterr().out
    assert run_command(["checkpoint", "list", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_a_tokenizer_trained_on_all_text_says_that_nothing_was_measured(capsys, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a few words"}\n')
    assert run_command(["data", "train-tokenizer", str(tmp_path / "a.jsonl"), "--vocabulary-size", "300", "--output",
                        str(tmp_path / "tokenizer.json")]) == 0
    output = capsys.readouterr().out
    assert "None" not in output
    assert "not measured: all text was trained on" in output


@pytest.mark.parametrize("address", ["127.0.0.1:1", "not an address", "ray://127.0.0.1:1", "127.0.0.1:99999"])
def test_an_address_without_a_cluster_is_refused(address, capsys, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "some words"}\n')
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text('name: x\nread: {paths: ["*.jsonl"]}\n'
                      "steps: [{tokenize: {train: {vocabulary_size: 300}}}, {pack: {sequence_length: 16}}]\n")
    message = refused(capsys, "data", "run", str(recipe), "--input", str(tmp_path), "--output", str(tmp_path / "out"),
                      "--address", address)
    assert address in message
    assert not list((tmp_path / "out").glob("*"))


def test_a_classifier_is_trained_and_reported(capsys, tmp_path):
    pytest.importorskip("floret")
    for name, words in (("good", "river theorem history"), ("poor", "click buy cheap")):
        lines = [json.dumps({"text": f"{words} number {index}"}) for index in range(60)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    command = ["data", "train-classifier", str(tmp_path / "good*"), str(tmp_path / "poor.jsonl"), "--output",
               str(tmp_path / "model.bin"), "--set", "dimension=4", "--set", "buckets=100", "--set", "held_out=0.3"]
    assert run_command([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["auc"] == 1
    assert result["documents"] == [60, 60]
    first = (tmp_path / "model.bin").read_bytes()
    assert run_command(command) == 0
    assert f"min_score: {result['threshold']:.6f}" in capsys.readouterr().out
    assert (tmp_path / "model.bin").read_bytes() == first
    assert "no file matches" in refused(capsys, *command[:3], str(tmp_path / "none"), *command[4:])
    assert "did you mean 'epochs'" in refused(capsys, *command, "--set", "epoch=3")


def test_example_documents_are_written(capsys, tmp_path):
    assert run_command(["data", "example", str(tmp_path), "--max-bytes", "60000"]) == 0
    assert "5 broken records" in capsys.readouterr().out
    assert sum(len(path.read_bytes().splitlines()) for path in tmp_path.glob("corpus/*.jsonl")) > 5
    assert list(tmp_path.glob("evals/*.jsonl"))
    assert "--max-bytes" in refused(capsys, "data", "example", str(tmp_path), "--max-bytes", "0")
