"""Submit, follow and stop jobs on a Ray cluster's job server. A lost connection does not lose the job.

The client makes the job's id, so it can find a submission whose answer was lost instead of repeating it.
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

STOPPED_CODE = 143
"""Exit code of a stopped job, as of a process that SIGTERM ended."""
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
#: Time between SIGTERM and SIGKILL when a job is stopped, in which training saves (Ray's default: 3 s).
STOP_SECONDS = 120
PATIENCE_SECONDS = 600.0
"""Longest time without an answer of the job server."""
POLL_SECONDS = 1.0
JOBS = {"prepare_data": ("data", "run"), "train": ("train",), "evaluate": ("evaluate",),
        "export": ("checkpoint", "export"), "workflow": ("workflow", "run")}
"""Command that each job runs."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Submission:
    """Job as the server receives it."""

    command: str
    """Shell command that the cluster's head runs in the uploaded folder."""
    working_dir: str = "."
    """Folder that is uploaded; "" for none."""
    id: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the job and its workers. Everyone who may list jobs sees them, so they must hold no secrets."""
    excludes: Sequence[str] = ()
    """Patterns of more files to leave out, as in .gitignore."""
    includes: Sequence[str] = ()
    """Patterns of files to upload although they are ignored or may hold secrets."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Selector of the driver's node (`placement`). With it the driver runs on any node that matches. Without it the
    driver runs on the head, which is not a spot node and which an autoscaler never ends."""
    metadata: Mapping[str, str] = field(default_factory=dict)

    def upload(self) -> Upload | None:
        """Return the files to upload; None without a working folder."""
        return survey(self.working_dir, self.excludes, self.includes) if self.working_dir else None

    def runtime_env(self, package: Path | None = None) -> dict[str, Any]:
        """Return Ray's runtime environment: the `package` of the code, and variables.

        Other packages belong in the cluster's image.
        """
        variables = {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS), **self.environment}
        runtime_env: dict[str, Any] = {"env_vars": variables}
        if self.working_dir:
            if package is not None:
                runtime_env["working_dir"] = str(package)
            if (Path(self.working_dir) / "platform/tidewheel").is_dir():  # a checkout's code precedes the image's
                variables.setdefault("PYTHONPATH", "platform")
        return runtime_env


def command_of(tokens: Sequence[str], working_dir: str = ".") -> str:
    """Return the shell command of a submission.

    Args:
        tokens: arguments of `tidewheel submit`: a job's name with its options, the YAML file of a pipeline or a
            training with the options of its job, or any command.
        working_dir: folder that is uploaded. If it has a module of the job, as a checkout does, the command runs that;
            otherwise it runs the command of the installed package.

    Raises:
        ConfigError: there is nothing to submit, or the file cannot be read.
    """
    if not tokens:
        raise ConfigError("nothing to submit", where="tidewheel submit", fix=f"name a job ({', '.join(JOBS)}), a "
                          "YAML file or a command, with its options, after --")
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
    """Return the job of a YAML file: a pipeline has a `read` section; any other file is a training."""
    try:
        values = yaml_text.load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot be read as YAML ({type(error).__name__})", where=path,
                          fix="give the path of a pipeline's or a training's configuration") from None
    return "prepare_data" if isinstance(values, dict) and "read" in values else "train"


#: Loggers of Ray's client whose messages about uploads and closed connections this module replaces.
CHATTY = ("ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk", "ray._private.runtime_env.packaging",
          "ray._private.runtime_env.working_dir")


class JobServer:
    """Client of a job server, which waits while the server does not answer.

    Args:
        address: such as "http://head:8265". None uses RAY_API_SERVER_ADDRESS, else the cluster of
            `tidewheel cluster up`.
        patience_seconds: longest time without an answer.
        say: function that shows notices about the connection.

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
        os.environ["RAY_API_SERVER_ADDRESS"] = self.address  # it takes precedence over Ray's argument
        try:
            self._client: Any = JobSubmissionClient(self.address)
        except (*self._away, *refused) as error:
            fix = ("export RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH (`tidewheel cluster env` for a local one)"
                    if "oken" in str(error) else "give the URL of the cluster's dashboard, --address http://head:8265, "
                                                 "or start a cluster: `tidewheel cluster up`")
            raise ClusterError(f"no job server answers ({str(error).splitlines()[0]})", where=self.address,
                               fix=fix) from None
        finally:
            os.environ.pop("RAY_API_SERVER_ADDRESS")
            os.environ.update({} if named is None else {"RAY_API_SERVER_ADDRESS": named})

    def submit(self, submission: Submission) -> str:
        """Upload the code and start the job; return its id. A lost answer does not start the job twice.

        Raises:
            ClusterError: the server refuses the job, or does not answer.
            ConfigError: the working folder cannot be uploaded.
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
                    return job  # the answer to the first try was lost
                raise ClusterError(f"the job server refuses: {_short(error)}", where=self.address,
                                   fix="correct the submission; an id can be used once on a cluster") from None

        uploaded = submission.upload()
        with temporary_folder("upload") as folder:  # Ray sends the package in submit_job
            package = None
            if uploaded is not None:
                package = Path(folder, "package.zip")
                uploaded.pack(package)
                if uploaded.secrets:
                    self._say(uploaded.left_out())
            arguments["runtime_env"] = submission.runtime_env(package)
            return self._retried(send)

    def info(self, job: str) -> Any:
        """Return Ray's `JobDetails` of a job.

        Raises:
            ClusterError: there is no such job, or the server does not answer.
        """
        def look() -> Any:
            try:
                return self._client.get_job_info(job)
            except RuntimeError as error:
                raise ClusterError(f"no such job ({_short(error)})", where=job,
                                   fix="`tidewheel job list` shows the cluster's jobs; a restarted cluster does not "
                                       "know earlier jobs") from None

        return self._retried(look)

    def jobs(self) -> list[Any]:
        """Return the submitted jobs, oldest first."""
        jobs = self._retried(self._client.list_jobs)
        return sorted((job for job in jobs if job.submission_id), key=lambda job: job.start_time or 0)

    def follow(self, job: str, write: Callable[[str], Any]) -> int:
        """Pass the job's log to `write` as it grows, until the job has ended; return its exit code.

        Each part of the log is written once, however often the connection is lost.
        """
        written = _WrittenLog(write)
        while True:
            try:
                asyncio.run(self._tail(job, written))
            except Exception as error:  # the job's state decides whether the stream's end is an error
                self._say(f"the connection to the log was lost ({_short(error)}); reconnecting")
            if self.info(job).status in ENDED:
                written.from_start(self._retried(lambda: self._client.get_job_logs(job)))
                return exit_code(self.info(job))
            time.sleep(POLL_SECONDS)

    def stop(self, job: str) -> bool:
        """Send SIGTERM to a job, and SIGKILL after STOP_SECONDS; return False if it has ended. Do not wait."""
        self.info(job)
        return bool(self._retried(lambda: self._client.stop_job(job)))

    async def _tail(self, job: str, written: _WrittenLog) -> None:
        """Show the log of a new connection, which sends it from its beginning."""
        position = 0
        async for text in self._client.tail_job_logs(job):
            written.part(text, position)
            position += len(text)

    def _retried(self, request: Callable[[], Any]) -> Any:
        """Return the result of `request`, called again while the server does not respond."""
        until = time.monotonic() + self._patience
        wait = 0.5
        is_reported = False
        while True:
            try:
                return request()
            except self._away as error:
                if time.monotonic() + wait > until:
                    raise ClusterError(f"the job server has not answered for {self._patience:g} s", where=self.address,
                                       fix="the job may still run: `tidewheel job follow ID` when the server is "
                                           "back") from error
            if not is_reported:
                self._say(f"{self.address} does not answer; trying again for up to {self._patience:g} s")
                is_reported = True
            time.sleep(wait)
            wait = min(2 * wait, 10.0)


class _WrittenLog:
    """A log, part of which has been written already."""

    def __init__(self, write: Callable[[str], Any]) -> None:
        self._write = write
        self._characters = 0

    def part(self, text: str, position: int) -> None:
        """Write the new characters of `text`, which begins at the log's character `position`."""
        fresh = text[max(0, self._characters - position):]
        self._characters = max(self._characters, position + len(text))
        if fresh:
            self._write(fresh)

    def from_start(self, log: str) -> None:
        """Write the new characters of the whole log."""
        self.part(log, 0)


def exit_code(info: Any) -> int:
    """Return the exit code of a job that has ended: its driver's, STOPPED_CODE if stopped, 1 if unknown."""
    if info.status == "SUCCEEDED":
        return 0
    if info.status == "STOPPED":
        return STOPPED_CODE
    return info.driver_exit_code or 1


def server_address(given: str | None = None) -> str:
    """Return the URL of the job server, and give this process its token; call it before Ray is imported."""
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
