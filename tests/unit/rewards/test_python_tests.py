"""Code in a sandbox: what passes, and what hostile code does not reach."""

from __future__ import annotations

import gc
import json
import os
import re
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tidewheel as tw
from tidewheel.errors import ConfigError
from tidewheel.rewards.python_tests import code_of
from tidewheel.rewards.sandbox import isolation, running
from tidewheel.rewards.sandbox.cases import Unusable, cases_of
from tidewheel.rewards.sandbox.child import text_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Landlock and seccomp are Linux's")
ADD = "def add(a, b):\n    return a + b\n"
ONE_SECOND = {"seconds": 1, "wall_seconds": 1000}
"""Of processor time, which takes longer on a busy machine."""
SUMS = "assert add(2, 3) == 5\nassert add('a', 'b') == 'ab'\nassert 1.5 == add(1, .5)"


def judged(code: str, reference: str, **options: object) -> tw.Scores:
    reward = tw.rewards.PythonTests(**{"seconds": 60, "wall_seconds": 1000, **options})
    return reward.judge([tw.Sample("", code, reference)])


def score(code: str, reference: str = SUMS, **options: object) -> float:
    scores = judged(code, reference, **options)
    assert not scores.failures, scores.failures
    return float(scores.values[0])


def blocked(attack: str, error: str = "OSError", before: str = "", **options: object) -> bool:
    """Return whether the code runs up to the attack, and the attack raises this error there."""
    code = f"import ctypes, os, socket, sys\n{before}\ndef attack():\n    try:\n        {attack}\n" \
           f"    except {error}:\n        return 'blocked'\n    return 'done'\n"
    return score(code, "assert attack() == 'blocked'", **options) == 1


@pytest.mark.parametrize(("code", "expected"), [
    (ADD, 1), (f"Here it is:\n```python\n{ADD}```\nDone.", 1), (f"```\n{ADD}```\nno:\n```\nx = 1\n```", 0),
    ("def add(a, b):\n    return 5", 0), ("", 0), ("def add(", 0), ("raise ValueError", 0),
    ("import sys\nsys.exit(0)", 0), ("import os\nos._exit(0)", 0), (f"{ADD}\nraise SystemExit(0)", 0),
    ("def add(a, b):\n    raise SystemExit(0)", 0), ("add = print", 0),
    ("import ctypes\nctypes.string_at(0)", 0), ("def add(a, b):\n    return add(a, b)", 0),
    ("class Any:\n    def __eq__(self, other):\n        return True\ndef add(a, b):\n    return Any()", 0),
    ("class Five(int):\n    pass\ndef add(a, b):\n    return Five(5)", 0),
    ("import os\nfor fd in range(1, 20):\n    try:\n        os.write(fd, b'5\\n' * 3)\n    except OSError: pass\n"
     "os._exit(0)", 0)])
def test_code_passes_if_all_its_results_are_right(code: str, expected: float):
    assert score(code) == expected


def test_code_cannot_redefine_what_is_true():
    code = "bool = lambda value: True\ndef is_even(number):\n    return number % 2 == 1"
    assert score(code, "assert is_even(4)") == 0
    assert score(code, "assert not is_even(3)") == 0


def test_a_part_of_the_tests_may_count():
    code = "def add(a, b):\n    return a + b if b == 3 else os"
    assert score(code, partial=True) == pytest.approx(1 / 3)
    assert score(code) == 0


def test_programs_read_their_input_and_have_the_right_output():
    cases = json.dumps([{"input": "2 3\n", "output": "5"}, {"input": "4 5", "output": "9\n"}])
    program = "if __name__ == '__main__':\n    print(sum(map(int, input().split())), ' ')"
    assert score(program, cases) == 1
    assert score(f"{program}\n    print()\n    print('x')", cases) == 0
    assert score(f"{program}\n    raise SystemExit(3)", cases) == 0, "it printed the right text and failed"
    assert score("print(5)", cases, partial=True) == 0.5
    assert score("import sys\nprint(sum(int(word) for word in open(0).read().split()))", cases) == 1
    assert score("input()\ninput()", cases) == 0, "the input ends"


@pytest.mark.parametrize("reference", [
    "", "# nothing", "[]", "[1]", '[{"call": "f("}]', '[{"call": "f(", "equals": 1}]', '[{"input": "1"}]', "print(1)",
    "assert", "assert 1 == 1 == 1", "assert f(1) < 2", "assert f(1) == g(1)", "x = 1", "assert abs(f(2) - 1.4) < 0.1",
    "{", "[" * 10_000, "(" * 500])
def test_a_reference_without_cases_is_a_failure_and_no_score(reference: str):
    with pytest.raises(Unusable):
        cases_of(reference)
    assert judged(ADD, reference).failures[0].reason == "unusable_reference"


def test_assertions_of_truth_are_cases():
    assert [(case.call, case.expected) for case in cases_of("assert f(1)\nassert not f(2)\nassert f(3) == -1")] == [
        ("not not (f(1))", "1"), ("not not (f(2))", "0"), ("f(3)", "-1")]


def test_the_parser_of_another_thread_does_not_disturb():
    """Another thread gets its turn when garbage is collected in the middle of a tree."""
    def yield_turn(*_: object) -> None:
        time.sleep(0)

    reference = "\n".join(f"assert f([[[[{number}]]]]) == {{'a': [{number}]}}" for number in range(30))
    gc.callbacks.append(yield_turn)
    try:
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(cases_of, [reference] * 200))
    finally:
        gc.callbacks.remove(yield_turn)
    assert all(cases == found[0] for cases in found)


VALUES = st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from([0.5, 1.0, -0.0, 1e300, 2j])
                      | st.text(max_size=2) | st.binary(max_size=1),
                      lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple)
                      | st.dictionaries(st.integers(0, 3) | st.text(max_size=1), inner, max_size=3))


@settings(derandomize=True, database=None, deadline=None, max_examples=60)
@given(VALUES, VALUES)
def test_two_values_have_one_text_if_they_are_equal(one: object, other: object):
    assert (text_of(one) == text_of(other)) == (one == other)
    assert "\n" not in text_of(one)
    assert text_of({1, "a", 2.5}) == text_of(frozenset([2.5, "a", True]))


def test_an_endless_loop_ends():
    ignores = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True:\n    pass"
    assert score(ignores, **ONE_SECOND) == 0


def test_code_that_waits_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(running._Watch, "_waited", lambda self: 0.0)  # a busy machine would give no score
    assert score("import time\ntime.sleep(1000)", wall_seconds=0.3) == 0


def test_an_answer_that_had_no_processor_is_no_zero(monkeypatch: pytest.MonkeyPatch):
    began = time.monotonic()
    monkeypatch.setattr(running._Watch, "_waited", lambda self: time.monotonic() - began)
    assert judged("import time\ntime.sleep(1000)", SUMS, wall_seconds=0.3).failures[0].reason == "starved"


@pytest.mark.parametrize("attack", [
    "os.fork()", "__import__('subprocess').run(['/bin/true'])", "os.posix_spawn('/bin/true', ['true'], {})",
    "os.execv('/bin/true', ['true'])", "os.system('true') == 0 or sys.exit()", "os.kill(os.getppid(), 0)",
    "os.kill(-1, 0)", "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    "__import__('resource').prlimit(os.getppid(), __import__('resource').RLIMIT_NOFILE, (1, 1))",
    "__import__('resource').setrlimit(__import__('resource').RLIMIT_AS, (-1, -1))", "os.setuid(1)",
    "open(f'/proc/{os.getppid()}/environ')", "open('/proc/self/mem')", "os.memfd_create('x')"])
def test_other_processes_and_limits_are_out_of_reach(attack: str):
    assert blocked(attack, "(OSError, ValueError, SystemExit)")


def test_a_fork_bomb_starts_nothing():
    bomb = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    before = set(os.listdir("/proc"))
    ours = os.path.realpath(running.CHILD).encode()
    assert score(bomb, **ONE_SECOND) == 0
    new = [name for name in os.listdir("/proc") if name.isdigit() and name not in before]
    assert not [name for name in new if (path := Path(f"/proc/{name}/cmdline")).exists() and ours in path.read_bytes()]


def test_threads_may_run_within_the_memory():
    before = "import threading, time\ndef run(n):\n    for _ in range(n):\n" \
             "        threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n"
    assert blocked("run(3) or 1 / 0", "ZeroDivisionError", before)
    assert blocked("run(10_000)", "(RuntimeError, MemoryError)", before)


@pytest.mark.parametrize("attack", [
    "open({path!r}, 'a')", "open({path!r})", "os.truncate({path!r}, 0)", "os.unlink({path!r})", "os.chmod({path!r}, 0)",
    "os.utime({path!r})", "os.rename({path!r}, 'here')", "os.link({path!r}, 'here')", "open({path!r} + '2', 'w')",
    "os.mkdir({path!r} + '3')", "os.listdir(os.path.dirname({path!r}))",
    "os.symlink({path!r}, 'link') or open('link', 'a')", "open('../x', 'w')", "open('/dev/shm/x', 'w')",
    "os.mkfifo({path!r} + '4')", "os.setxattr({path!r}, 'user.a', b'1')"])
def test_files_outside_are_out_of_reach(tmp_path: Path, attack: str):
    secret = tmp_path / "prompts.jsonl"
    secret.write_text("the answers")
    secret.chmod(0o666)
    assert blocked(attack.format(path=str(secret)))
    assert secret.read_text() == "the answers"
    assert secret.stat().st_mode & 0o777 == 0o666
    assert [path.name for path in tmp_path.iterdir()] == [secret.name]


def test_files_inside_are_small_and_vanish():
    use = "open('note', 'w').write('x' * 100) and open('note').read() and os.rename('note', 'n') or 1 / 0"
    assert blocked(use, "ZeroDivisionError")
    before = "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)"
    assert blocked("open('large', 'wb', 0).write(bytes(5000)) == 5000 or os.stat('missing')", before=before, file_kb=4)
    assert blocked("os.listdir() and 1 / 0 or os.stat('missing')"), "the folder is empty"


@pytest.mark.parametrize("kind", ["AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"])
def test_there_is_no_network(kind: str):
    assert blocked(f"socket.socket(socket.{kind}, socket.SOCK_DGRAM)", "PermissionError")


def test_a_server_of_this_machine_is_out_of_reach():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect = f"socket.create_connection(('127.0.0.1', {port}))"
        assert not blocked(connect, "PermissionError", sandbox="limits"), "without isolation it is there"
        server.accept()[0].close()
        assert blocked(connect, "PermissionError")
        assert blocked("ctypes.CDLL(None, use_errno=True).syscall(425, 1, bytes(120)) < 0 and os.stat('missing')")
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_a_memory_hog_has_an_error_and_no_memory():
    assert blocked("bytearray(1 << 30)", "MemoryError")
    assert score("x = []\nwhile True:\n    x.append(bytearray(1 << 24))") == 0


def test_a_huge_output_ends():
    cases = '[{"input": "", "output": "x"}]'
    assert score("while True:\n    print('x' * 65536)", cases, output_kb=64) == 0
    assert score("def add(a, b):\n    return 'x' * 10**6", output_kb=64) == 0


def test_the_answers_of_the_tests_are_not_in_the_process():
    look = """
import gc, os, sys
def text(thing):
    try:
        return repr(thing)[:10**6]
    except Exception:  # half-made objects of the interpreter's own have no text
        return ''
def add(a, b):
    texts = [text(thing) for thing in gc.get_objects()] + [repr(sys.argv), repr(dict(os.environ))]
    frame = sys._getframe()
    while frame:
        texts += [repr(frame.f_locals), repr(frame.f_globals)]
        frame = frame.f_back
    return 'seen' if any(str(97531) + str(8642086420) in text for text in texts) else 'hidden'
"""
    assert score(look, '[{"call": "add(1, 2)", "equals": "hidden"}, {"call": "add(1, 2)", "equals": 975318642086420}]',
                 partial=True) == 0.5


def test_secrets_of_the_environment_are_not_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SECRET")
    assert blocked("os.environ['AWS_SECRET_ACCESS_KEY']", "KeyError")


def test_a_machine_that_cannot_isolate_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "sandbox"
    folder.mkdir()
    (folder / "child.py").write_text(running.CHILD.read_text())
    source = Path(isolation.__file__).read_text()
    (folder / "isolation.py").write_text(source.replace("444, 445, 446", "4440, 445, 446"))  # a kernel without Landlock
    monkeypatch.setattr(running, "CHILD", folder / "child.py")
    with pytest.raises(ConfigError, match=r"(?s)cannot isolate .* has no Landlock.*sandbox to limits"):
        judged(ADD, SUMS)
    assert score(ADD, sandbox="limits") == 1, "the user says that limits are enough"
    (folder / "isolation.py").write_text("raise SystemExit(7)")
    assert judged(ADD, SUMS).failures[0] == tw.Failure("sandbox", "it ended before the code began, exit code 7")


def test_an_end_from_outside_is_no_zero():
    """As the kernel does when the machine is short of memory."""
    scores = judged(f"{ADD}\nimport os\nos.kill(os.getpid(), 9)", SUMS, sandbox="limits")
    assert scores.failures[0].reason == "killed"


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_has_the_numbers_of_the_kernels_headers(machine: str):
    header = Path({"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h",
                   "aarch64": "/usr/include/asm-generic/unistd.h"}[machine])
    if not header.exists():
        pytest.skip("the headers of the kernel are not installed")
    words = [line.split() for line in header.read_text().splitlines() if line.startswith("#define __NR")]
    known = {re.sub("__NR(3264)?_", "", word[1]): int(word[2]) for word in words if word[2].isdigit()}
    column = machine == "aarch64"
    wrong = {name: pair[column] for name, pair in isolation.FORBIDDEN.items() if pair[column] != known.get(name, -1)}
    assert not wrong
    assert (isolation.CLONE[machine], isolation.LIMITS_OF_OTHERS[machine]) == (known["clone"], known["prlimit64"])
    assert len(isolation.filter_program(machine)) % 8 == 0


def test_the_last_block_is_the_code():
    assert code_of("a ```x``` b\n```py\n1\n```\n```python\n2\n```") == "2\n"
    assert code_of("```py\n1\n") == "```py\n1\n"
