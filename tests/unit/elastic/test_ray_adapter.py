"""How the adapter to Ray Train judges failures, without a cluster."""

import pickle

from ray.exceptions import RayActorError
from ray.train import ControllerError, WorkerGroupError
from ray.train.v2._internal.exceptions import UserExceptionWithTraceback

from tidewheel.elastic import ray_adapter
from tidewheel.elastic.ray_adapter import Failure
from tidewheel.elastic.ray_process import LostWorkerError, SilentWorkerError, unwrapped
from tidewheel.errors import ClusterError, ShardError


def raised(error: Exception) -> UserExceptionWithTraceback:
    """Return an error of the training function as Ray Train passes it on."""
    return pickle.loads(pickle.dumps(UserExceptionWithTraceback(error, "trace")))


def group(**by_rank: Exception) -> WorkerGroupError:
    return WorkerGroupError("failed", {int(rank[1:]): error for rank, error in by_rank.items()})


def test_a_lost_worker_and_the_errors_of_its_peers_are_retried():
    for lost in (RayActorError(), LostWorkerError("ended"), SilentWorkerError("silent")):
        assert Failure.of(group(r1=lost)).retryable
        assert Failure.of(group(r1=lost)).lost
    assert Failure.of(group(r0=raised(RuntimeError("Connection closed by peer")))).retryable
    assert Failure.of(group(r0=raised(ValueError("no process group")), r1=RayActorError())).retryable


def test_an_error_that_a_restart_cannot_fix_is_not_retried():
    failure = Failure.of(group(r0=raised(ShardError("damaged"))))
    assert not failure.retryable
    assert failure.text.startswith("ShardError: damaged")
    assert not Failure.of(group(r0=raised(TypeError("bug")), r1=raised(RuntimeError("peer")))).retryable
    assert not Failure.of(ControllerError(ClusterError("no nodes came"))).retryable


def test_the_cause_is_taken_out_of_rays_wrappers_only():
    cause = ShardError("damaged")
    assert unwrapped(ControllerError(raised(cause))).what == cause.what
    holder = RuntimeError(OSError("raised inside the user's own error"))
    assert unwrapped(holder) is holder


def test_the_driver_raises_our_error_or_a_cluster_error():
    assert isinstance(ray_adapter._final(group(r0=raised(ShardError("damaged")))), ShardError)
    assert isinstance(ray_adapter._final(group(r0=raised(RuntimeError("boom")))), ClusterError)
