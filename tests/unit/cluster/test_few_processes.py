"""A cluster without a dashboard starts few of Ray's processes."""

from __future__ import annotations

import pytest
from ray._private import parameter, services

from tidewheel.cluster.few_processes import few_processes, no_idle_api_server


def test_ray_starts_no_monitors(monkeypatch):
    before = parameter.RayParams
    with few_processes():
        params = parameter.RayParams(num_cpus=1)
    assert params.no_monitor
    assert not params.include_log_monitor
    assert parameter.RayParams is before


@pytest.mark.parametrize(("include_dashboard", "started"), [(True, ["started"]), (False, [])])
def test_an_api_server_starts_only_for_a_dashboard(monkeypatch, include_dashboard, started):
    calls = []
    monkeypatch.setattr(services, "start_api_server", lambda *_, **__: calls.append("started") or ("url", "process"))
    with no_idle_api_server():
        url, process = services.start_api_server(include_dashboard, True)
    assert calls == started
    assert (url, process) == (("url", "process") if include_dashboard else ("", None))
