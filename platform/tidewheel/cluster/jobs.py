"""Jobs on a Ray cluster's job server: submit, follow, stop. The connection may be lost meanwhile; the job is not.

A job is submitted under an id that is made here, so that a submission whose answer was lost is found, not repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tidewheel import yaml_text
from tidewheel.cluster.upload import Upload, survey
from tidewheel.errors import ClusterError, ConfigError
from tidewheel.private_folders import temporary_folder

STOPPED_CODE = 143  # as of a process that SIGTERM ended
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
#: Between SIGTERM and SIGKILL when a job is stopped (Ray's own: 3 s): training saves and leaves in this time.
STOP_SECONDS = 120
PATIENCE_SECONDS = 600.0  # how long a job server may be away before we stop following
POLL_SECONDS = 1.0
JOBS = {"prepare_data": ("data", "run"), "train": ("train",), "evaluate": ("evaluate",),
        "export": ("checkpoint", "export"), "workflow": ("workflow", "run")}
"""The command that each job runs."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Submission:
    """What is handed to the job server."""

    command: str
    """The shell command that the cluster's head runs in the uploaded folder."""
    working_dir: str = "."
    """Uploaded; "" for none."""
    id: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the job and its workers. They are visible to all who may list jobs: no secrets."""
    excludes: Sequence[str] = ()
    """Patterns of more files to leave out, as in .gitignore."""
    includes: Sequence[str] = ()
    """Patterns of files to upload although they are ignored or may hold secrets."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Selector of the node that the driver runs on (`placement`). Without one Ray runs it on the head, which is never a
    spot node and which an autoscaler never takes away; with one, on any node that matches."""
    metadata: Mapping[str, str] = field(default_factory=dict)

    def upload(self) -> Upload | None:
        """The files that would be uploaded."""
        return survey(self.working_dir, self.excludes, self.includes) if self.working_dir else None

    def runtime_env(self, package: Path | None = None) -> dict[str, Any]:
        """Ray's runtime environment: the `package` of the code, and variables. Other packages belong into the cluster's
        image."""
        variables = {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS), **self.environment}
        found: dict[str, Any] = {"env_vars": variables}
        if self.working_dir:
            if package is not None:
                found["working_dir"] = str(package)
            if (Path(self.working_dir) / "platform/tidewheel").is_dir():  # a checkout: its code, not the image's
                variables.setdefault("PYTHONPATH", "platform")
        return found


def command_of(tokens: Sequence[str], working_dir: str = ".") -> str:
    """The shell command of what is submitted: a job's name with its options, a YAML file (of a pipeline or a training)
    with the options of its job, or any command.

    Args:
        tokens: as given to `tidewheel submit`.
        working_dir: folder that is uploaded. A job is its module there if it has one, as a checkout does, else the
            command of the installed package.

    Raises:
        ConfigError: nothing is given, or there is no such file.
    """
    if not tokens:
        raise ConfigError("nothing to submit", where="tidewheel submit", mend=f"name a job ({', '.join(JOBS)}), a "
                          "YAML file or a command, with its options, behind --")
    first, rest = tokens[0], tokens[1:]
    if (name := first.removeprefix("jobs.")) in JOBS:
        return shlex.join([*_program(name, working_dir), *rest])
    if first.endswith((".yaml", ".yml")):
        return shlex.join([*_program(_job_of(first), working_dir), "--config", first, *rest])
    return shlex.join(["python", *tokens] if first.endswith(".py") else list(tokens))


def _program(name: str, working_dir: str) -> list[str]:
    if working_dir and (Path(working_dir) / "jobs" / f"{name}.py").is_file():
        return ["python", "-m", f"jobs.{name}"]
    return ["python", "-m", "tidewheel.cli", *JOBS[name]]


def _job_of(path: str) -> str:
    """Pipelines read documents; what else is a YAML file here trains."""
    try:
        values = yaml_text.load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot be read as YAML ({type(error).__name__})", where=path,
                          mend="give the path of a pipeline's or a training's configuration") from None
    return "prepare_data" if isinstance(values, dict) and "read" in values else "train"


#: Of Ray's client: what is left out of an upload, and that a connection has closed, we tell ourselves.
CHATTY = ("ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk", "ray._private.runtime_env.packaging",
          "ray._private.runtime_env.working_dir")


class JobServer:
    """A client of one job server that waits for it when it is away.

    Args:
        address: "http://head:8265"; that of the cluster of `tidewheel cluster up` by default, after
            RAY_API_SERVER_ADDRESS.
        patience_seconds: how long the server may be away.
        say: where notices about the connection go.

    Raises:
        ClusterError: no address is known, or no job server answers there.
    """

    def __init__(self, address: str | None = None, *, patience_seconds: float = PATIENCE_SECONDS,
                 say: Say | None = None) -> None:
        self.address = server_address(address)
        self._patience, self._say = patience_seconds, say or _to_stderr
        import ray.exceptions
        import requests
        from ray.job_submission import JobSubmissionClient

        for name in CHATTY:
            logging.getLogger(name).setLevel(logging.ERROR)

        self._away = (ConnectionError, requests.exceptions.ConnectionError, requests.exceptions.Timeout)
        refused = (RuntimeError, ray.exceptions.AuthenticationError)
        named = os.environ.get("RAY_API_SERVER_ADDRESS")
        os.environ["RAY_API_SERVER_ADDRESS"] = self.address  # Ray takes it before the address that it is given
        try:
            self._client: Any = JobSubmissionClient(self.address)
        except (*self._away, *refused) as error:
            mend = ("export RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH (`tidewheel cluster env` for a local one)"
                    if "oken" in str(error) else "give the URL of the cluster's dashboard, --address http://head:8265, "
                                                 "or start a cluster: `tidewheel cluster up`")
            raise ClusterError(f"no job server answers ({str(error).splitlines()[0]})", where=self.address,
                               mend=mend) from None
        finally:
            os.environ.pop("RAY_API_SERVER_ADDRESS")
            os.environ.update({} if named is None else {"RAY_API_SERVER_ADDRESS": named})

    def submit(self, submission: Submission) -> str:
        """Upload and start; the job's id. Safe against a lost answer: the same id is not started twice.

        Raises:
            ClusterError: the server refuses.
        """
        job = submission.id or f"tidewheel-{time.strftime('%H%M%S')}-{uuid.uuid4().hex[:8]}"
        arguments: dict[str, Any] = {"entrypoint": submission.command, "submission_id": job,
                                     "metadata": dict(submission.metadata)}
        if submission.labels:
            arguments["entrypoint_label_selector"] = dict(submission.labels)

        def send() -> str:
            try:
                return str(self._client.submit_job(**arguments))
            except RuntimeError as error:
                if "already exists" in str(error) and not submission.id:
                    return job  # the answer to our first try was lost
                raise ClusterError(f"the job server refuses: {_short(error)}", where=self.address,
                                   mend="correct the submission; an id can be used once on a cluster") from None

        uploaded = submission.upload()
        with temporary_folder("upload") as folder:  # Ray sends the package in submit_job
            package = None
            if uploaded is not None:
                package = Path(folder, "package.zip")
                uploaded.pack(package)
                if uploaded.secrets:
                    self._say(uploaded.left_out())
            arguments["runtime_env"] = submission.runtime_env(package)
            return self._patiently(send)

    def info(self, job: str) -> Any:
        """Ray's `JobDetails`; ClusterError when there is no such job."""
        def look() -> Any:
            try:
                return self._client.get_job_info(job)
            except RuntimeError as error:
                raise ClusterError(f"no such job ({_short(error)})", where=job,
                                   mend="`tidewheel job list` shows the cluster's jobs; a cluster that was started "
                                        "anew has forgotten them") from None

        return self._patiently(look)

    def jobs(self) -> list[Any]:
        """Submitted jobs, oldest first."""
        found = self._patiently(self._client.list_jobs)
        return sorted((job for job in found if job.submission_id), key=lambda job: job.start_time or 0)

    def follow(self, job: str, write: Callable[[str], Any]) -> int:
        """Pass the job's log to `write` as it grows, until the job has ended; its exit code (`exit_code`).

        Each part of the log is written once, however often the connection is lost."""
        shown = _Shown(write)
        while True:
            try:
                asyncio.run(self._tail(job, shown))
            except Exception as error:  # whatever broke the stream: the job's state decides what that means
                self._say(f"the log's connection was lost ({_short(error)}); following on")
            if self.info(job).status in ENDED:
                shown.from_start(self._patiently(lambda: self._client.get_job_logs(job)))
                return exit_code(self.info(job))
            time.sleep(POLL_SECONDS)

    def stop(self, job: str) -> bool:
        """SIGTERM to the job, SIGKILL after STOP_SECONDS; False when it has ended before. Returns at once."""
        self.info(job)
        return bool(self._patiently(lambda: self._client.stop_job(job)))

    async def _tail(self, job: str, shown: _Shown) -> None:
        """A new connection sends the log from its beginning."""
        place = 0
        async for text in self._client.tail_job_logs(job):
            shown.part(text, place)
            place += len(text)

    def _patiently(self, request: Callable[[], Any]) -> Any:
        """`request`, repeated while the server is away."""
        until, wait, told = time.monotonic() + self._patience, 0.5, False
        while True:
            try:
                return request()
            except self._away as error:
                if time.monotonic() + wait > until:
                    raise ClusterError(f"the job server has not answered for {self._patience:g} s", where=self.address,
                                       mend="the job may go on without us: `tidewheel job follow ID` when the server "
                                            "is back") from error
            if not told:
                self._say(f"{self.address} does not answer; trying on for {self._patience:g} s")
                told = True
            time.sleep(wait)
            wait = min(2 * wait, 10.0)


class _Shown:
    """How much of a log has been written."""

    def __init__(self, write: Callable[[str], Any]) -> None:
        self._write, self._characters = write, 0

    def part(self, text: str, place: int) -> None:
        """`text` stands at the log's character `place`."""
        fresh = text[max(0, self._characters - place):]
        self._characters = max(self._characters, place + len(text))
        if fresh:
            self._write(fresh)

    def from_start(self, log: str) -> None:
        """The whole log as it is now."""
        self.part(log, 0)


def exit_code(info: Any) -> int:
    """Of a job that has ended: its driver's own, 143 when it was stopped, 1 when its driver could not say."""
    if info.status == "SUCCEEDED":
        return 0
    if info.status == "STOPPED":
        return STOPPED_CODE
    return info.driver_exit_code or 1


def server_address(given: str | None = None) -> str:
    """URL of the job server that is meant; also lets this process in, so call it before Ray is imported."""
    from tidewheel.cluster import background

    given = given or os.environ.get("RAY_API_SERVER_ADDRESS")
    background.show_token(given)
    if given is None:
        state = background.find()
        given = state.dashboard_url if state is not None else "http://127.0.0.1:8265"
    return given


def _short(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:300]


def _to_stderr(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"[tidewheel] {text}", file=sys.stderr, flush=True)
