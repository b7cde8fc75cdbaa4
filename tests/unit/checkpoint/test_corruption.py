"""Two hundred randomly damaged runs: all damage is detected, and only the newest intact checkpoint is ever loaded.

Each case is a seed: the number in a failing test's message reproduces the damage.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import on_ranks
from tests.unit.checkpoint.helpers import Events, equal, manager, state
from tests.unit.train.helpers import config, write_shards
from tidewheel import jsonlog
from tidewheel.checkpoint.manager import CheckpointManager
from tidewheel.checkpoint.verify import list_checkpoints, verify_checkpoint
from tidewheel.errors import CheckpointError, StorageError
from tidewheel.storage import LocalStore, store
from tidewheel.train.loop import train
from tidewheel.train.runtime import Runtime

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STEPS = (100, 200, 300, 400)
CASES, BATCH = 200, 25


def save_all(root: Path) -> None:
    """Save checkpoints from two ranks, so that each has two files."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    saver = manager(store(root), keep_last=len(STEPS))
    for step in STEPS:
        saver.save(step, state(step, mesh), {"step": step})
    saver.wait()


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pristine")
    on_ranks(2, save_all, root)
    return root


# -- damage: each changes one checkpoint's folder and nothing else --------------------------------------------------


def data_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def bit_flip(folder: Path, rng: random.Random) -> None:
    """Flip one bit anywhere in any file, including the manifest."""
    path = rng.choice(sorted(folder.iterdir()))
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def truncation(folder: Path, rng: random.Random) -> None:
    """Cut any file short, perhaps to nothing."""
    path = rng.choice(sorted(folder.iterdir()))
    data = path.read_bytes()
    # the manifest's last byte is the newline after the JSON, whose loss is no damage
    path.write_bytes(data[:rng.randrange(len(data) - 1)])


def grown(folder: Path, rng: random.Random) -> None:
    """Append bytes, as a second writer of the same file would."""
    path = rng.choice(data_files(folder))
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.randint(1, 64)))


def zeroed(folder: Path, rng: random.Random) -> None:
    """Zero a range of a file, as if those blocks had never reached the disk."""
    path = rng.choice(data_files(folder))
    data = bytearray(path.read_bytes())
    start = rng.choice([at for at, byte in enumerate(data) if byte])
    data[start:start + rng.randint(1, 512)] = bytes(len(data[start:start + rng.randint(1, 512)]))
    path.write_bytes(data.ljust(len(path.read_bytes()), b"\0"))


def missing_file(folder: Path, rng: random.Random) -> None:
    rng.choice(data_files(folder)).unlink()


def missing_manifest(folder: Path, rng: random.Random) -> None:
    (folder / "manifest.json").unlink()


def stale_manifest(folder: Path, rng: random.Random) -> None:
    """Replace the manifest with another step's."""
    siblings = [path for path in folder.parent.iterdir() if path != folder and (path / "manifest.json").exists()]
    shutil.copy(rng.choice(sorted(siblings)) / "manifest.json", folder / "manifest.json")


def stale_data(folder: Path, rng: random.Random) -> None:
    """Replace a data file with another step's, which has the same length and format."""
    replaced = rng.choice(data_files(folder))
    candidates = [path for step in folder.parent.iterdir() if step != folder for path in data_files(step)
                  if path.name.partition("-")[0] == replaced.name.partition("-")[0]]
    shutil.copy(rng.choice(sorted(candidates)), replaced)


def half_written(folder: Path, rng: random.Random) -> None:
    """Leave what a killed save leaves: no manifest and some of the files, the last one cut short."""
    (folder / "manifest.json").unlink()
    files = data_files(folder)
    rng.shuffle(files)
    end = rng.randrange(len(files))
    for path in files[end + 1:]:
        path.unlink()
    files[end].write_bytes(files[end].read_bytes()[:rng.randrange(64)])


def half_copied(folder: Path, rng: random.Random) -> None:
    """Leave what an interrupted copy leaves: a manifest and only some of the files that it names."""
    for path in rng.sample(data_files(folder), rng.randint(1, 2)):
        if rng.random() < 0.5:
            path.unlink()
        else:
            path.write_bytes(b"")


DAMAGE: tuple[Callable[[Path, random.Random], None], ...] = (
    bit_flip, truncation, grown, zeroed, missing_file, missing_manifest, stale_manifest, stale_data, half_written,
    half_copied)
UNCOMMITTED = {missing_manifest, half_written}


def victims(rng: random.Random) -> list[int]:
    """Return the steps to damage: the newest, an older one, several, or sometimes all."""
    drawn = rng.random()
    if drawn < 0.4:
        return [STEPS[-1]]
    if drawn < 0.6:
        return [rng.choice(STEPS[:-1])]
    if drawn < 0.94:
        return sorted(rng.sample(STEPS, rng.randint(2, len(STEPS) - 1)))
    return list(STEPS)


@pytest.mark.parametrize("first", range(0, CASES, BATCH))
def test_damaged_checkpoints_are_detected_and_skipped(first: int, pristine: Path, tmp_path: Path):
    for case in range(first, first + BATCH):
        root = tmp_path / str(case)
        shutil.copytree(pristine, root)
        rng = random.Random(case)
        acts = {step: rng.choice(DAMAGE) for step in victims(rng)}
        for step, act in acts.items():
            act(root / f"step_{step:08d}", rng)
        case_text = f"case {case}: " + ", ".join(f"{step} {act.__name__}" for step, act in acts.items())
        check(store(root), acts, case_text)


def check(target: LocalStore, acts: dict[int, Callable], case_text: str) -> None:
    """Verify, load, save again, and load the new checkpoint."""
    for step in STEPS:
        assert bool(verify_checkpoint(target, f"step_{step:08d}")) == (step in acts), case_text
    events, values = Events(), state(999)
    loader = manager(target, events, keep_last=1)
    intact = max(set(STEPS) - set(acts), default=None)
    refused = [step for step in reversed(STEPS) if step in acts and step > (intact or 0)]
    if intact is None and not UNCOMMITTED.issuperset(acts.values()):
        with pytest.raises(CheckpointError, match="none of"):
            loader.load_latest(values)
        assert equal(values, state(999)), f"{case_text}: the state was touched"
    else:
        assert loader.load_latest(values) == ({"step": intact} if intact else None), case_text
        assert equal(values, state(intact or 999)), case_text
    assert [detail["checkpoint"] for detail in events.of("checkpoint_refused")] == [
        f"step_{step:08d}" for step in refused], case_text
    # the run continues from there, and its new checkpoint is loaded even if later steps are damaged
    again = (intact or 0) + 50
    loader.save(again, state(again), {"step": again})
    loader.wait()
    loaded = state(999)
    assert manager(target).load_latest(loaded) == {"step": again}, case_text
    assert equal(loaded, state(again)), case_text


def test_every_kind_of_damage_is_among_the_cases():
    kinds = set()
    for case in range(CASES):
        rng = random.Random(case)
        kinds |= {(rng.choice(DAMAGE).__name__, step == STEPS[-1]) for step in victims(rng)}
    assert kinds == {(act.__name__, newest) for act in DAMAGE for newest in (True, False)}


def test_a_store_that_is_away_is_no_damage(pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An outage refuses no checkpoint; otherwise it would throw away the work since an older one."""
    shutil.copytree(pristine, tmp_path / "run")

    def away(*_: object, **__: object) -> None:
        raise StorageError("the object store does not answer", where="s3://bucket", fix="wait")

    target = store(tmp_path / "run")
    for method in ("hash", "read"):
        with monkeypatch.context() as patch:
            patch.setattr(LocalStore, method, away)
            patch.setattr(LocalStore, "check", away)
            events = Events()
            with pytest.raises(StorageError, match="does not answer"):
                manager(target, events).load_latest(state(999))
            assert events == []
    whole = LocalStore.hash
    monkeypatch.setattr(LocalStore, "hash", lambda self, key: away() if "00000400" in key else whole(self, key))
    assert manager(target).load_latest(state(999)) == {"step": 300}, "a bad sector is damage, since the store answers"


def test_training_continues_with_the_losses_of_an_undamaged_run(tmp_path: Path):
    """With any damage, later losses equal those of a run that was never stopped."""
    write_shards(tmp_path / "shards")
    write_shards(tmp_path / "validation", shards=1, rows=4, seed=1)
    still = config(tmp_path, "still", "steps=8", "evaluation.sample_tokens=0", "checkpoint.every_steps=2",
                   "checkpoint.keep_last=9")
    run(still)
    whole = tmp_path / "runs/still"
    expected = losses(whole)
    for case in range(6):
        rng = random.Random(case)
        folder = tmp_path / f"runs/damaged-{case}"
        shutil.copytree(whole, folder)
        (folder / "result.json").unlink()
        for name in rng.sample(["step_00000008", "step_00000006", "step_00000004"], rng.randint(1, 3)):
            rng.choice(DAMAGE)(folder / "checkpoints" / name, rng)
        run(still.model_copy(update={"run": still.run.model_copy(update={"id": f"damaged-{case}"})}))
        assert losses(folder) == expected, f"case {case}"


def run(settings) -> None:
    target = store(settings.run_uri).child("checkpoints")
    train(settings, Runtime(checkpoints=CheckpointManager(target, keep_last=9, asynchronous=False)))


def losses(folder: Path) -> dict[int, float]:
    """Return the newest loss of each step."""
    return {line["step"]: line["loss"] for line in jsonlog.read(store(folder), "metrics.jsonl") if "loss" in line}


def test_the_listing_shows_a_stale_manifest(pristine: Path, tmp_path: Path):
    shutil.copytree(pristine, tmp_path / "run")
    folder = tmp_path / "run/step_00000400"
    stale_manifest(folder, random.Random(0))
    [checkpoint] = [info for info in list_checkpoints(store(tmp_path / "run")) if not info.complete]
    assert (checkpoint.step, checkpoint.committed) == (400, True)
    assert "it is that of step" in checkpoint.problem
