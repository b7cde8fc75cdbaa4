"""The choice of the attention kernel: the table of docs/models.md."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tidewheel.errors import ConfigError
from tidewheel.models import attention_kernels
from tidewheel.models.attention_kernels import Choice, Machine, activate, choose, choose_flash

BF16, FP32 = torch.bfloat16, torch.float32
ALL = frozenset({"FA3", "FA4", "cuDNN"})


def gpu(major: int, minor: int, *installed: str, deterministic: bool = False) -> Machine:
    return Machine("cuda", (major, minor), frozenset(installed), deterministic)


@pytest.mark.parametrize(("machine", "dtype", "width", "packed", "whole"), [
    (Machine("cpu"), BF16, 64, Choice("masked"), Choice("masked")),
    (Machine("cpu"), FP32, 64, Choice("masked"), Choice("masked")),
    (gpu(9, 0), FP32, 64, Choice("flex"), Choice("flex")),
    (gpu(9, 0), FP32, 8, Choice("masked"), Choice("masked")),
    (gpu(9, 0), BF16, 8, Choice("varlen"), Choice("causal")),
    (gpu(7, 5), torch.float16, 64, Choice("flex"), Choice("flex")),
    (gpu(8, 0, "cuDNN"), BF16, 64, Choice("varlen"), Choice("causal")),
    (gpu(8, 9, *ALL), BF16, 64, Choice("varlen"), Choice("causal")),
    (gpu(9, 0), BF16, 128, Choice("varlen"), Choice("causal")),
    (gpu(9, 0, "cuDNN"), BF16, 128, Choice("varlen"), Choice("causal", cudnn=True)),
    (gpu(9, 0, "cuDNN"), BF16, 256, Choice("varlen"), Choice("causal")),
    (gpu(9, 0, *ALL), BF16, 64, Choice("varlen", "FA3"), Choice("causal", "FA3")),
    (gpu(9, 0, *ALL), BF16, 256, Choice("varlen", "FA3"), Choice("causal", "FA3")),
    (gpu(9, 0, *ALL), BF16, 100, Choice("flex"), Choice("flex")),
    (gpu(10, 0, *ALL), BF16, 128, Choice("varlen", "FA4"), Choice("causal", "FA4")),
    (gpu(10, 0, *ALL), BF16, 96, Choice("varlen"), Choice("causal", cudnn=True)),
    (gpu(12, 0, *ALL), BF16, 128, Choice("varlen"), Choice("causal")),
    (gpu(12, 0), BF16, 256, Choice("flex"), Choice("flex"))])
def test_what_auto_chooses(machine: Machine, dtype: torch.dtype, width: int, packed: Choice, whole: Choice):
    assert choose("auto", machine, dtype, width) == packed
    assert choose("auto", machine, dtype, width, whole_rows=True) == whole


def test_soft_capping_and_sinks_run_where_scores_can_be_changed():
    assert choose("auto", gpu(9, 0, *ALL), BF16, 128, whole_rows=True, plain=False) == Choice("flex")
    assert choose("auto", Machine("cpu"), FP32, 128, plain=False) == Choice("masked")
    with pytest.raises(ConfigError, match="neither soft-capping nor sinks"):
        choose("varlen", gpu(9, 0), BF16, 128, plain=False)


@pytest.mark.parametrize(("machine", "width", "expected"), [
    (gpu(9, 0, *ALL, deterministic=True), 128, Choice("causal", "FA3")),
    (gpu(9, 0, *ALL, deterministic=True), 256, Choice("causal")),
    (gpu(9, 0, "cuDNN", deterministic=True), 128, Choice("causal")),
    (gpu(10, 0, *ALL, deterministic=True), 128, Choice("causal"))])
def test_reproducible_mode_gets_deterministic_kernels(machine: Machine, width: int, expected: Choice):
    assert choose("auto", machine, BF16, width, whole_rows=True) == expected


def test_flex_on_a_gpu_needs_heads_of_16():
    assert choose("flex", gpu(9, 0), FP32, 16) == Choice("flex")
    with pytest.raises(ConfigError, match="heads of at least 16; here are heads of 8"):
        choose("flex", gpu(9, 0), FP32, 8)


def test_slices_of_rows_and_windows():
    machine = gpu(9, 0, *ALL)
    assert choose("auto", machine, BF16, 64, rows_complete=False, whole_rows=True) == Choice("flex")
    assert choose("auto", machine, BF16, 64, whole_rows=True, window=True) == Choice("varlen", "FA3")


def test_a_setting_comes_first():
    machine = gpu(9, 0, *ALL)
    assert choose("flex", Machine("cpu"), FP32, 64) == Choice("flex")
    assert choose("varlen", machine, BF16, 64, whole_rows=True) == Choice("varlen", "FA3")
    assert choose("auto", machine, BF16, 64, whole_rows=True, flash="FA2") == Choice("causal", cudnn=True)
    assert choose_flash(machine, 64, "FA3") == "FA3"


@pytest.mark.parametrize(("requested", "machine", "says"), [
    ("FA3", gpu(9, 0), "installed: nothing beside FA2; nearest legal choice: FA2"),
    ("FA3", gpu(10, 0, *ALL),
     "compute capability 10.0, heads of 64, installed: FA3, FA4, cuDNN; nearest legal choice: FA4"),
    ("FA4", gpu(10, 0, *ALL, deterministic=True), "in reproducible mode")])
def test_an_implementation_that_cannot_run_is_refused(requested: str, machine: Machine, says: str):
    with pytest.raises(ConfigError, match=says):
        choose("auto", machine, BF16, 64, flash=requested)


@pytest.mark.parametrize(("machine", "dtype", "width", "rows_complete"), [
    (gpu(9, 0), FP32, 64, True), (Machine("cpu"), BF16, 64, True), (gpu(9, 0), BF16, 64, False),
    (gpu(9, 0), BF16, 20, True)])
def test_varlen_that_cannot_run_is_refused(machine: Machine, dtype: torch.dtype, width: int, rows_complete: bool):
    with pytest.raises(ConfigError, match="varlen attention needs CUDA"):
        choose("varlen", machine, dtype, width, rows_complete=rows_complete)


def test_what_is_installed_is_what_torch_would_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    attention_kernels.installed.cache_clear()
    try:
        assert not attention_kernels.installed() & {"FA3", "FA4"}
        (tmp_path / "flash_attn_interface.py").write_text("raise ImportError('made for another torch')\n")
        (tmp_path / "flash_attn").mkdir()
        (tmp_path / "flash_attn" / "__init__.py").write_text("raise ImportError('broken')\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        attention_kernels.installed.cache_clear()
        assert attention_kernels.installed() & {"FA3", "FA4"} == {"FA3"}
    finally:
        attention_kernels.installed.cache_clear()
        sys.modules.pop("flash_attn_interface", None)


@pytest.fixture
def unbroken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention_kernels, "_BROKEN", set())
    yield
    sys.modules.pop("flash_attn_interface", None)
    torch.nn.attention.restore_flash_attention_impl(_raise_warn=False)


@pytest.mark.usefixtures("unbroken")
def test_an_implementation_that_does_not_fit_this_torch_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Any,
                                                                    caplog: pytest.LogCaptureFixture):
    (tmp_path / "flash_attn_interface.py").write_text("raise ImportError('undefined symbol')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [activate("FA3"), activate("FA3")] == ["FA2", "FA2"]
    assert caplog.text.count("FA3 is installed but cannot be used") == 1
    assert torch.nn.attention.current_flash_attention_impl() is None


@pytest.mark.usefixtures("unbroken")
def test_the_implementation_of_the_last_call_is_active(monkeypatch: pytest.MonkeyPatch):
    removed = []
    handle = SimpleNamespace(remove=lambda: removed.append("FA3"))
    monkeypatch.setitem(torch.nn.attention._registry._FLASH_ATTENTION_IMPLS, "FA3", lambda: handle)
    assert activate("FA3") == "FA3"
    assert torch.nn.attention.current_flash_attention_impl() == "FA3"
    assert activate("FA3") == "FA3"
    assert not removed
    assert activate("FA2") == "FA2"
    assert torch.nn.attention.current_flash_attention_impl() is None
    assert removed == ["FA3"]
