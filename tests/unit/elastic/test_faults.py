"""How a worker classifies an error that it raised: its own, or the echo of a lost peer."""

import pytest
import torch.distributed as dist

from tidewheel.elastic.faults import report
from tidewheel.elastic.messages import ExitReason
from tidewheel.errors import CheckpointError, ConfigError, ShardError, StorageAwayError
from tidewheel.train.guards.hang import HangError
from tidewheel.train.guards.verdict import SilentCorruptionError

PEER = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:4711")


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    try:
        raise error from cause
    except Exception as caught:
        return caught


@pytest.mark.parametrize("error", [
    PEER, dist.DistBackendError("NCCL communicator was aborted on rank 3"), dist.DistNetworkError("timed out"),
    RuntimeError("the generation has ended"), raised(CheckpointError("cannot be read"), PEER)])
def test_errors_about_a_lost_peer_are_echoes(error):
    left = report(error, broken=False, stepped=True)
    assert (left.reason, left.error_kind) == (ExitReason.FAILED, "")


@pytest.mark.parametrize(("error", "reason"), [
    (RuntimeError("CUDA error: uncorrectable ECC error encountered"), ExitReason.FAILED),
    (MemoryError("host"), ExitReason.FAILED),
    (ShardError("damaged"), ExitReason.FATAL),
    (ValueError("wrong"), ExitReason.FATAL),
    (ConfigError("wrong"), ExitReason.FATAL)])
def test_other_errors_are_the_workers_own(error, reason):
    left = report(error, broken=False, stepped=True)
    assert (left.reason, left.error_kind) == (reason, type(error).__name__)
    assert left.text.startswith(type(error).__name__)


@pytest.mark.parametrize("error", [ValueError("no process"), RuntimeError("odd"), CheckpointError("cannot be read"),
                                   StorageAwayError("broken off: the generation has ended")])
def test_errors_after_connections_were_broken_are_echoes(error):
    left = report(error, broken=True, stepped=True)
    assert (left.reason, left.error_kind) == (ExitReason.FAILED, "")


def test_an_error_of_the_package_is_no_echo_though_another_rank_was_faster():
    """The guards end a run on all ranks in the same step; the first rank to raise breaks the others' connections."""
    left = report(ConfigError("loss is not a number at step 3"), broken=True, stepped=True)
    assert (left.reason, left.error_kind) == (ExitReason.FATAL, "ConfigError")


def test_unavailable_storage_is_fatal_only_before_the_first_step():
    away = StorageAwayError("does not answer")
    assert report(away, broken=False, stepped=False).reason is ExitReason.FATAL
    left = report(away, broken=False, stepped=True)
    assert (left.reason, left.error_kind) == (ExitReason.FAILED, "StorageAwayError")


def test_corruption_accuses_the_ranks_that_computed_wrongly():
    left = report(SilentCorruptionError("at step 7: gradient of rank 2", where="runs/x", ranks=(2,)), broken=False,
                  stepped=True)
    assert (left.reason, left.error_kind, left.accused) == (ExitReason.FAILED, "", (2,))


def test_a_hang_accuses_the_ranks_that_are_behind():
    error = "rank 3 is still at step 7 (data); rank 5 does not answer; 6 ranks have waited 5 s at step 8 (step)"
    left = report(HangError(error, (3, 5)), broken=False, stepped=True)
    assert (left.reason, left.error_kind, left.accused) == (ExitReason.FAILED, "", (3, 5))
