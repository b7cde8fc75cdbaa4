"""The runner, the goals and the data of the GPU benchmark, with fake rows."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests import gpu
from tests.benchmarks.gpu import bare, ours, pair, wheels
from tests.benchmarks.gpu.__main__ import main
from tests.benchmarks.gpu.case import BATCHES, END_OF_DOCUMENT, Case, batches
from tests.benchmarks.gpu.goals import GOALS
from tests.benchmarks.gpu.gpu_tests import counts
from tests.benchmarks.gpu.row_process import outcome
from tests.benchmarks.gpu.rows import LARGE_GIB, ROWS, Row, chosen
from tests.benchmarks.gpu.runner import Runner
from tests.benchmarks.gpu.table import NO_GPU, page
from tests.benchmarks.gpu.timing import flops_per_token, learning

FAKE = "tests.unit.gpu_benchmark_rows"
ENOUGH = 600.0


def runner(folder: Path, budget: float = ENOUGH, **options: Any) -> Runner:
    return Runner(folder, budget, entry=FAKE, environment={**os.environ, "PYTHONPATH": str(wheels.ROOT)}, **options)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def test_a_line_is_there_before_the_next_row_begins(tmp_path):
    rows = [Row(f"row {index}", f"lines:{tmp_path / 'rows.jsonl'}", needs=0) for index in range(3)]
    records = runner(tmp_path).run(rows, LARGE_GIB)
    assert [record["lines"] for record in records] == [0, 1, 2]
    assert lines(tmp_path) == records


@pytest.mark.parametrize("kind", ["memory", "memory_crash"])
def test_rows_are_halved_until_they_fit(tmp_path, kind):
    records = runner(tmp_path).run([Row("a", f"{kind}:3", Case(rows=8), needs=0)], LARGE_GIB)
    assert [(record["status"], record["rows"], record["halved"]) for record in records] == [
        ("out of memory", 8, False), ("out of memory", 4, True), ("ok", 2, True)]
    assert lines(tmp_path) == records


def test_a_row_is_not_halved_below_one_sequence_for_each_micro_batch(tmp_path):
    records = runner(tmp_path).run([Row("a", "memory:0", Case(rows=8, micro_batches=4), needs=0)], LARGE_GIB)
    assert [record["rows"] for record in records] == [8, 4]
    assert {record["status"] for record in records} == {"out of memory"}


def test_a_case_depends_on_the_memory_of_the_device():
    row = Row("a", "fine", Case(rows=8), rows_on_80_gb=4)
    assert [row.case_on(memory).rows for memory in (139.0, 79.0)] == [8, 4]
    assert Row("a", "fine", Case(rows=8)).case_on(79.0).rows == 8
    assert row.case_on(None).shape == "tiny"


def test_a_crash_is_recorded_with_its_last_line_and_the_next_row_runs(tmp_path):
    records = runner(tmp_path).run([Row("a", "crash", needs=0), Row("b", "fine", needs=0)], LARGE_GIB)
    assert [record["status"] for record in records] == ["crashed", "ok"]
    assert "Segmentation fault of a kernel" in records[0]["reason"]
    assert "exit code -6" in (tmp_path / "log.txt").read_text()


def test_rows_that_the_budget_does_not_allow_are_skipped_with_the_reason(tmp_path):
    rows = [Row("long", "fine", needs=ENOUGH + 1), Row("short", "fine", needs=0)]
    long, short = runner(tmp_path).run(rows, LARGE_GIB)
    assert (long["status"], short["status"]) == ("skipped", "ok")
    assert "s of the budget are left, and it needs 601 s" in long["reason"]
    assert runner(tmp_path, budget=0.0).run([Row("late", "fine", needs=1)], LARGE_GIB)[0]["status"] == "skipped"


def test_at_its_limit_the_whole_process_group_of_a_row_ends(tmp_path):
    pid_file = tmp_path / "pid"
    row = Row("a", f"hang:{pid_file}", needs=0, limit=3)
    while True:  # on a busy machine the row may not get as far as its child
        [record] = runner(tmp_path).run([row], LARGE_GIB)
        if pid_file.exists() and pid_file.read_text():
            break
    assert record["status"] == "time limit"
    assert record["reason"] == "stopped after 3 s"
    child = Path(f"/proc/{pid_file.read_text()}/stat")
    until = time.monotonic() + 120
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until, "the row's child outlives it"
        time.sleep(0.01)


def test_a_rows_failures_are_told_apart(monkeypatch):
    def raising(error: Exception) -> dict[str, Any]:
        def fails(case: Case) -> dict[str, Any]:
            raise error

        monkeypatch.setattr(bare, "train", fails)
        return outcome("bare:train", Case())

    assert raising(torch.OutOfMemoryError("tried to allocate 20 GiB"))["status"] == "out of memory"
    assert raising(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling x"))["status"] == "out of memory"
    assert raising(ModuleNotFoundError("No module named 'torchtitan'"))["status"] == "not available"
    assert raising(ValueError("shapes"))["status"] == "failed"
    assert "ValueError: shapes" in raising(ValueError("shapes"))["reason"]
    monkeypatch.setattr(bare, "train", lambda case: {"tokens_per_second": case.tokens})
    assert outcome("bare:train", Case()) == {"status": "ok", "tokens_per_second": 8 * 4096}


def test_ways_to_share_a_device_are_tried_in_turn(monkeypatch):
    tried: list[str | None] = []

    def refuses(function: Any, device: str, *, seconds: float) -> None:
        tried.append(os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE"))
        if working != len(tried):
            raise RuntimeError("DistBackendError: invalid usage\nDuplicate GPU detected : rank 0 and rank 1")

    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    monkeypatch.setattr(pair, "on_ranks", refuses)
    monkeypatch.setattr(pair.shutil, "which", lambda name: None)
    working = 2
    with pair.shared_device("cuda") as way:
        assert way == "NCCL_MULTI_RANK_GPU_ENABLE=1"
        assert os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == "1", "later processes inherit it"
    assert tried == [None, "1"]
    working = 0
    with pytest.raises(pair.NotPossibleError) as refused, pair.shared_device("cuda"):
        pass
    assert str(refused.value).count("Duplicate GPU detected") == 2
    assert "nvidia-cuda-mps-control is not installed" in str(refused.value)
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in os.environ
    monkeypatch.setattr(pair, "on_ranks", lambda *_, **__: {"ms": 1.0})
    record = outcome("pair:reproducible", Case(device="cuda", rows=2))
    assert record["note"] == "two ranks on one device: NCCL as it is"
    monkeypatch.setattr(pair, "on_ranks", refuses)
    assert outcome("pair:reproducible", Case(device="cuda"))["status"] == "not possible"


def figures(row: str, **values: Any) -> dict[str, Any]:
    return {"row": row, "rows": 8, "length": 4096, "document": 600, "halved": False, "status": "ok", "valid": True,
            "loss_first": 12.0, "loss_last": 8.0, **values}


FAST = [figures("ours, documents", tokens_per_second=84_000.0, mfu=0.66, torch="2.11.0"),
        figures("torchtitan, documents", tokens_per_second=70_000.0),
        figures("ours, 8b width, bf16", tokens_per_second=10_000.0),
        figures("ours, 8b width, fp8", tokens_per_second=11_000.0),
        {**figures("memory tier", stall_share=0.01), "stall_ms": 4.0},
        figures("reproducible, two ranks", slower=0.051)]


def verdicts(records: list[dict[str, Any]], device: str) -> list[str]:
    counted = {record["row"]: record for record in records}
    return [goal.verdict(counted, device)[1] for goal in GOALS]


def test_goals_are_met_or_not_or_not_measured():
    assert verdicts(FAST, "NVIDIA H200") == [
        "met", "not measured", "met", "not met", "met", "not measured", "not met"]
    assert verdicts(FAST, "NVIDIA H100 80GB HBM3")[2] == "not measured on an H200"
    assert set(verdicts(FAST, "CPU")) == {"not measured"}
    shown = page(FAST, "NVIDIA H200")
    assert "1.20: met" in shown
    assert "66.0 %: met" in shown
    assert "1.10: not met" in shown
    assert "5.1 %: not met" in shown
    assert NO_GPU not in shown


def test_a_row_whose_loss_did_not_fall_counts_for_no_goal():
    records = [{**FAST[0], "valid": False, "loss_last": 13.0}, *FAST[1:]]
    shown = page(records, "NVIDIA H200")
    assert "IT DID NOT FALL" in shown
    assert "1.20" not in shown


def test_without_a_gpu_the_page_ends_with_a_warning_and_has_no_times():
    shown = page(FAST, "CPU")
    assert shown.rstrip().endswith("shape only, no timing")
    assert "84,000" not in shown


def test_documents_end_with_their_token_and_their_positions_start_again():
    case = Case(length=512, rows=4, document=60)
    for documents in batches(case):
        assert documents.tokens.shape == (4, 512)
        begins = documents.positions == 0
        assert np.array_equal(documents.following[:, :-1], documents.tokens[:, 1:])
        assert np.array_equal(begins[:, 1:], documents.tokens[:, :-1] == END_OF_DOCUMENT)
        assert np.array_equal(begins.cumsum(axis=1) - 1, documents.documents)
        starts = documents.starts()
        assert starts[0] == 0
        assert starts[-1] == 4 * 512
        assert len(starts) == begins.sum() + 1
    whole = batches(Case(length=512, rows=4))[0]
    assert (whole.tokens != END_OF_DOCUMENT).all()
    assert whole.starts().tolist() == [0, 512, 1024, 1536, 2048]
    assert len(batches(case)) == BATCHES


def test_the_formula_gives_the_published_flops_of_the_shape():
    assert flops_per_token(Case()) == pytest.approx(9.0255e9, rel=1e-4)
    assert flops_per_token(Case(length=8192)) == pytest.approx(10.6361e9, rel=1e-4)


def test_a_loss_that_is_no_number_or_rises_is_not_valid():
    assert learning([7.0, 6.0, torch.tensor(5.0)])["valid"]
    assert not learning([7.0, 8.0, 7.5])["valid"]
    assert not learning([7.0, float("nan"), 5.0])["valid"]


@pytest.mark.parametrize("side", [ours, bare])
def test_a_side_learns_at_the_tiny_shape(side):
    record = side.train(Case(document=600).tiny())
    assert record["valid"]
    assert record["loss_last"] < record["loss_first"] < 7.5
    assert record["tokens_per_second"] > 0
    assert record["ms_low"] <= record["ms"] <= record["ms_high"]


def test_the_bare_loops_loss_and_optimizer_are_torchs():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(37, 16, generator=generator, dtype=torch.float32).requires_grad_()
    weight = torch.randn(50, 16, generator=generator).requires_grad_()
    targets = torch.randint(0, 50, (37,), generator=generator)
    exact = F.cross_entropy(x @ weight.T, targets)
    expected = torch.autograd.grad(exact, (x, weight))
    mine = bare.MeanLoss.apply(x, weight, targets, bare._token_gradients)
    gradients = torch.autograd.grad(mine, (x, weight))
    torch.testing.assert_close(mine, exact)
    for found_one, expected_one in zip(gradients, expected):
        torch.testing.assert_close(found_one, expected_one, rtol=1e-5, atol=1e-7)

    model = torch.nn.Linear(8, 8, bias=False)
    reference = torch.nn.Linear(8, 8, bias=False)
    reference.load_state_dict(model.state_dict())
    optimizer = bare.AdamW(model, Case(compiled=False, learning_rate=1e-2))
    torchs = torch.optim.AdamW(reference.parameters(), lr=1e-2, betas=bare.BETAS, weight_decay=bare.DECAY)
    for _ in range(5):
        gradient = torch.randn(8, 8, generator=generator).to(torch.bfloat16)
        model.weight.grad, reference.weight.grad = gradient, gradient.float()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), bare.CLIP)
        optimizer.step()
        torchs.step()
    # the loop takes the norm of bf16 gradients in bf16, so its clip factor is up to 0.4 % off
    torch.testing.assert_close(optimizer.exact[0].view(8, 8), reference.weight.detach(), rtol=0, atol=1e-4)


def test_each_row_has_a_function_and_a_name_of_its_own():
    assert len({row.name for row in ROWS}) == len(ROWS)
    for row in ROWS:
        module, _, function = row.function.partition(":")
        file = importlib.util.find_spec(f"tests.benchmarks.gpu.{module}")
        assert file is not None
        assert f"def {function}(case: Case)" in Path(str(file.origin)).read_text()
    rows = {row.name for row in ROWS}
    assert {goal.row for goal in GOALS} <= rows
    assert [row.name for row in chosen(["torchtitan, d", "memory"])] == ["torchtitan, documents", "memory tier"]
    assert [row.name for row in chosen(["ours, documents"])] == ["ours, documents"]
    with pytest.raises(ValueError, match="no row has 'nothing' in its name"):
        chosen(["nothing"])


def test_counts_of_pytests_last_line():
    output = "F.s\nFAILED tests/gpu/test_x.py::test_a - assert 0\n1 failed, 12 passed, 2 skipped, 30 deselected in 3.1s"
    assert counts(output) == {"passed": 12, "failed": 1, "skipped": 2, "valid": False,
                              "failures": ["tests/gpu/test_x.py::test_a"]}
    assert counts("====== 16 passed in 12.0s ======")["valid"]
    assert counts("ERROR tests/a.py\n3 passed, 1 error in 1s")["failed"] == 1
    with pytest.raises(RuntimeError, match="wrote no summary: Traceback"):
        counts("Traceback")


def test_wheels_fit_the_limit_and_a_missing_one_is_named(tmp_path, monkeypatch):
    assert "pydantic-core==" in " ".join(wheels.requirements())
    (tmp_path / "a.whl").write_bytes(b"x" * 100)
    assert wheels.check_size(tmp_path) == 100
    monkeypatch.setattr(wheels, "LIMIT", 100)
    with pytest.raises(RuntimeError, match="are the limit"):
        wheels.check_size(tmp_path)
    monkeypatch.setattr(wheels, "FOLDER", tmp_path / "wheels")
    monkeypatch.setattr(wheels, "requirements", lambda: ["no-such-package"])
    failed = subprocess.CompletedProcess([], 1, "ERROR: No matching distribution found")
    monkeypatch.setattr(wheels.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match=r"no-such-package cannot be downloaded .* No matching distribution"):
        wheels.download("3.12")


ABSENT = ("ray", "cyclopts", "datasketch", "s3fs", "tensorboardX", "backports", "jsonschema",
          "moto", "boto3", "trafilatura", "bitsandbytes")
"""Packages that tests of other parts import, and that a machine with a GPU need not have."""
BLOCKER = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


def test_tests_marked_gpu_are_collected_without_ray():
    arguments = gpu.command()[2:]
    done = subprocess.run([sys.executable, "-c", BLOCKER, *arguments, "-n", "0", "--collect-only", "-qq"], text=True,
                          cwd=wheels.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "tests/gpu/test_precision.py" in done.stdout
    assert "error" not in done.stdout.splitlines()[-1]


def test_the_figures_of_the_documentation_are_those_of_the_run():
    rows = [json.loads(line) for line in (wheels.ROOT / "tests/benchmarks/gpu/results/2026-11-26-h100.jsonl").open()]
    page_text = (wheels.ROOT / "docs/gpu_benchmark.md").read_text()
    measured = [row for row in rows if "tokens_per_second" in row]
    assert measured
    for row in measured:
        time = f"{row['ms']:.1f} ({row['ms_low']:.1f} to {row['ms_high']:.1f})"
        cells = (row["row"], f"{row['rows']} x {row['length']}", time, f"{row['tokens_per_second']:,.0f}",
                 f"{100 * row['mfu']:.1f} %", f"{row['peak_gib']:.1f}",
                 f"{row['loss_first']:.2f} to {row['loss_last']:.2f}")
        assert f"| {' | '.join(cells)} |" in page_text


def test_a_table_is_made_from_the_rows_of_a_past_run(capsys: pytest.CaptureFixture[str]):
    file = wheels.ROOT / "tests/benchmarks/gpu/results/2026-11-26-h100.jsonl"
    assert main(["--table", str(file)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("NVIDIA H100 80GB HBM3, torch 2.11.0+cu130")
    assert "at least 1.15 times | 1.03     | not met" in printed
