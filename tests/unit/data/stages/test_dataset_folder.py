"""Folders saved by Hugging Face's tools: the files of a split, and errors if there are none."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tidewheel.config import build
from tidewheel.data import readers
from tidewheel.data.config import PipelineConfig
from tidewheel.data.stages import ingest
from tidewheel.data.stages.dataset_folder import data_files
from tidewheel.data.stages.resolve import resolve
from tidewheel.errors import InputError
from tidewheel.storage import store

CARD = """---
license: mit
configs:
- config_name: en
  data_files:
  - split: train
    path: en/train-*
  - split: test
    path: ["en/test-*", "more/**"]
- config_name: de
  data_files: de/*.jsonl
- config_name: fr
  data_dir: fr
---
# Words
"""


def folder(path: Path, *names: str, card: str | None = None) -> Path:
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text('{"text": "a"}\n')
    if card is not None:
        (path / "README.md").write_text(card)
    return path


def files(path: Path, split: str = "train", subset: str | None = None, below: str = "") -> list[str]:
    return data_files(store(path), below, subset=subset, split=split)


DESCRIBED = ("en/train-0.jsonl", "en/train-1.jsonl", "en/test-0.jsonl", "more/a/b.jsonl", "de/x.jsonl", "fr/dev/y.csv",
             "fr/train/x.csv", "other.jsonl")


def test_the_card_describes_subsets_and_splits(tmp_path):
    input_folder = folder(tmp_path, *DESCRIBED, card=CARD)
    assert files(input_folder, subset="en") == ["en/train-0.jsonl", "en/train-1.jsonl"]
    assert files(input_folder, "test", "en") == ["en/test-0.jsonl", "more/a/b.jsonl"]
    assert files(input_folder, "test+train", "en") == files(input_folder, "all", "en")
    assert files(input_folder, subset="de") == ["de/x.jsonl"]
    assert files(input_folder, "validation", "fr") == ["fr/dev/y.csv"]


@pytest.mark.parametrize(("changed", "subset"), [(("config_name: de", "config_name: de\n  default: true"), "de"),
                                                 (("config_name: de", "config_name: default"), "default")])
def test_the_default_subset_is_read(tmp_path, changed, subset):
    input_folder = folder(tmp_path, *DESCRIBED, card=CARD.replace(*changed))
    assert files(input_folder) == files(input_folder, subset=subset) == ["de/x.jsonl"]


@pytest.mark.parametrize(("names", "split", "found"), [
    (["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/my.own-00000-of-00001.parquet"],
     "my.own", ["data/my.own-00000-of-00001.parquet"]),
    (["train/a.csv", "test/a.csv", "a.csv"], "train", ["train/a.csv"]),
    (["train.jsonl", "my-eval.jsonl", "constrain.jsonl"], "test", ["my-eval.jsonl"]),
    (["dev.jsonl.gz", "training_0.jsonl"], "validation", ["dev.jsonl.gz"]),
    (["a.jsonl", "b/c.json", "dataset_infos.json", ".git/x.json", "__pycache__/y.json", "LICENSE", "z.py"], "train",
     ["a.jsonl", "b/c.json"])])
def test_names_of_files_decide_the_split(tmp_path, names, split, found):
    input_folder = folder(tmp_path, *names, card="no head\n---\n")
    assert files(input_folder, split) == found
    folder(tmp_path / "below", *names)
    assert files(tmp_path, split, below="below") == [f"below/{name}" for name in found]


def saved(path: Path, rows: list[str], split: str | None = None, **state) -> None:
    """Write a folder as `datasets.Dataset.save_to_disk` does: Arrow streams, and their description."""
    path.mkdir(parents=True)
    table = pa.table({"text": rows})
    with pa.ipc.new_stream(str(path / "data-00000-of-00001.arrow"), table.schema) as sink:
        sink.write_table(table)
    (path / "dataset_info.json").write_text("{}")
    (path / "state.json").write_text(json.dumps(
        {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": split, **state}))
    (path / "cache-0123.arrow").write_bytes(b"left behind by map()")


def test_folders_of_save_to_disk_are_read(tmp_path):
    saved(tmp_path / "one", ["a"])
    assert files(tmp_path / "one") == ["data-00000-of-00001.arrow"]
    saved(tmp_path / "named", ["a"], "test")
    assert files(tmp_path / "named", "test") == files(tmp_path / "named", "all")
    saved(tmp_path / "dict/train", ["a"])
    saved(tmp_path / "dict/dev", ["a"])
    (tmp_path / "dict/dataset_dict.json").write_text('{"splits": ["train", "dev"]}')
    assert files(tmp_path / "dict", "dev") == ["dev/data-00000-of-00001.arrow"]
    assert files(tmp_path, "all", below="dict") == [
        f"dict/{name}/data-00000-of-00001.arrow" for name in ("dev", "train")]


@pytest.mark.parametrize(("card", "split", "subset", "told"), [
    (CARD, "train", None, "several subsets: 'de', 'en', 'fr'"),
    (CARD, "train", "es", "no subset 'es': 'de', 'en', 'fr'"),
    (CARD, "dev", "en", "no split 'dev'; there are 'test', 'train'"),
    (CARD.replace("de/*", "xx/*"), "train", "de", "describes the split 'train', but all of its files are missing"),
    (CARD.replace("path: en", "url: en"), "train", "en", "have an unknown form"),
    (CARD.replace("de/*", "https://example.org/*"), "train", "de", "have an unknown form"),
    ("---\na: [\n---\n", "train", None, "not YAML"), (None, "train", "en", "no README.md here names any"),
    (None, "dev", None, "no split 'dev'; there are")])
def test_errors_list_the_existing_subsets_and_splits(tmp_path, card, split, subset, told):
    with pytest.raises(InputError) as error:
        files(folder(tmp_path, *DESCRIBED, card=card), split, subset)
    assert told in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_damaged_folders_of_save_to_disk_raise(tmp_path):
    saved(tmp_path / "test", ["a"], "test")
    with pytest.raises(InputError, match="there are 'test'"):
        files(tmp_path / "test")
    (tmp_path / "test/data-00000-of-00001.arrow").unlink()
    with pytest.raises(InputError, match=r"data-00000-of-00001\.arrow is missing"):
        files(tmp_path / "test", "test")
    saved(tmp_path / "chosen", ["a"], _indices_data_files=[{"filename": "indices.arrow"}])
    with pytest.raises(InputError, match="flatten_indices"):
        files(tmp_path / "chosen")
    (tmp_path / "chosen/state.json").write_text("[]")
    with pytest.raises(InputError, match=r"state\.json is not a JSON object"):
        files(tmp_path / "chosen")
    with pytest.raises(InputError, match="no file in this folder"):
        files(folder(tmp_path / "bare", "picture.png"))


def recipe(**read) -> PipelineConfig:
    return build(PipelineConfig, {"read": {"paths": ["."], **read}, "steps": ["dedup_exact"]})


def test_a_recipe_reads_a_folder(tmp_path):
    saved(tmp_path / "in/arrow/train", ["one", "two"])
    (tmp_path / "in/arrow/dataset_dict.json").write_text('{"splits": ["train"]}')
    folder(tmp_path / "in/set", "en/test-0.jsonl", card=CARD)
    pq.write_table(pa.table({"text": ["three"]}), tmp_path / "in/set/en/train-0.parquet")
    one = resolve(recipe(paths=["arrow"]), input=str(tmp_path / "in"), output=str(tmp_path / "out"))
    assert [(file.name, file.shape.format) for file in one.files] == [
        ("arrow/train/data-00000-of-00001.arrow", "arrow")]
    file = one.files[0]
    results = list(readers.read_records(store(file.root), file.key, one.config.read, shape=file.shape))
    assert [item.text for item in results] == ["one", "two"]
    for paths in ([f"{tmp_path}/in/set"], [f"{tmp_path}/in/set/"], ["set"], ["./set/"]):
        other = resolve(recipe(paths=paths, subset="en"), input=str(tmp_path / "in"), output=str(tmp_path / "out"))
        assert [file.name.removeprefix(f"{tmp_path}/in/") for file in other.files] == ["set/en/train-0.parquet"]
    with pytest.raises(InputError, match="no split 'dev'"):
        resolve(recipe(paths=["arrow"], split="dev"), input=str(tmp_path / "in"), output=str(tmp_path / "out"))


def test_keys_do_not_depend_on_split_and_subset(tmp_path):
    input_folder = folder(tmp_path / "in", "train.jsonl", "test.jsonl")
    (input_folder / "test.jsonl").write_text('{"text": "b"}\n')
    both, one = (resolve(recipe(split=split), input=str(input_folder), output=str(tmp_path / "out"))
                 for split in ("all", "train"))
    assert {task.unit.key for task in ingest.tasks(one)} < {task.unit.key for task in ingest.tasks(both)}
