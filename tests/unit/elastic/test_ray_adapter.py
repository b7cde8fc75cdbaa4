"""The adapter holds Ray to what it uses, and judges failures; no cluster is started here."""

import pytest
import ray
from ray.exceptions import RayActorError
from ray.train.v2._internal.exceptions import UserExceptionWithTraceback, WorkerGroupStartupTimeoutError
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from tidewheel.elastic import ray_adapter, ray_contract
from tidewheel.elastic.ray_adapter import Failure
from tidewheel.elastic.ray_contract import check_ray
from tidewheel.errors import ClusterError, ShardError


def test_the_installed_ray_fits():
    check_ray()


def test_another_release_is_refused(monkeypatch):
    monkeypatch.setattr(ray, "__version__", "2.99.0")
    with pytest.raises(ClusterError, match=r"2\.99\.0 instead of 2\.60\.0"):
        check_ray()


def test_what_is_gone_is_named(monkeypatch):
    gone = (("ray.train.v2._internal.execution.scaling_policy", "ScalingPolicy.no_such_method", None),
            ("ray.train.v2._internal.execution.failure_handling", "FailurePolicy.make_decision", ("renamed",)),
            ("ray.train.v2.no_such_module", "Thing", None))
    monkeypatch.setattr(ray_contract, "CONTRACT", gone)
    with pytest.raises(ClusterError) as caught:
        check_ray()
    assert "no_such_method is gone" in str(caught.value)
    assert "no longer takes renamed" in str(caught.value)
    assert "no_such_module.Thing is gone" in str(caught.value)


def test_every_internal_import_is_in_the_contract():
    named = {(module, attribute.split(".")[0]) for module, attribute, _ in ray_contract.CONTRACT}
    for value in vars(ray_adapter).values():
        module = getattr(value, "__module__", "") or ""
        if "ray.train.v2._internal" in module and isinstance(value, type):
            assert any(attribute == value.__name__ for _, attribute in named), value


def user(error: Exception) -> UserExceptionWithTraceback:
    return UserExceptionWithTraceback(error, "trace")


def group(**by_rank: Exception) -> WorkerGroupError:
    return WorkerGroupError("failed", {int(rank[1:]): error for rank, error in by_rank.items()})


def test_a_lost_worker_and_what_its_peers_say_are_retried():
    assert Failure.of(group(r1=RayActorError())).retryable
    assert Failure.of(group(r0=user(RuntimeError("Connection closed by peer")))).retryable
    assert Failure.of(group(r0=user(ValueError("no process group")), r1=RayActorError())).retryable


def test_what_a_restart_cannot_mend_is_not():
    found = Failure.of(group(r0=user(ShardError("damaged"))))
    assert not found.retryable
    assert found.text.startswith("ShardError: damaged")
    assert not Failure.of(group(r0=user(TypeError("bug")), r1=user(RuntimeError("peer")))).retryable
    assert not Failure.of(ControllerError(ClusterError("no nodes came"))).retryable


def test_no_place_is_not_charged():
    found = Failure.of(ControllerError(WorkerGroupStartupTimeoutError(2)))
    assert found.retryable
    assert found.placement


def test_the_drivers_error_is_ours():
    assert isinstance(ray_adapter._final(group(r0=user(ShardError("damaged")))), ShardError)
    assert isinstance(ray_adapter._final(group(r0=user(RuntimeError("boom")))), ClusterError)
