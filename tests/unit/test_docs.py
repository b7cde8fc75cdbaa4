"""What README.md and the pages of `docs/` name is there: commands and options, files, links, settings, defaults."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import cyclopts
import pytest

from tests.docs_pages import DOCS, NOT_RUN, OUTSIDE, ROOT, TASKS, blocks, commands, script
from tidewheel.cli import app
from tidewheel.cluster.jobs import command_of
from tidewheel.config import Config, _configs_in
from tidewheel.data.config import PipelineConfig
from tidewheel.parts import Part
from tidewheel.train.config import TrainConfig

PAGES = sorted([*DOCS.glob("*.md"), *(ROOT / name for name in (
    "README.md", "CONTRIBUTING.md", "k8s/README.md", "cluster/README.md", "tests/benchmarks/README.md",
    "tests/chaos/README.md"))])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
ROOMS = ("tests", "docs", "jobs", "pipelines", "k8s", "cluster", "platform", "tidewheel")
#: From where a page may name a file.
ABOVE = ("", "platform", "platform/tidewheel", "docs", "k8s", "tests")
_INDENTED = re.compile(r"(?:^(?: {4}.*)?\n)+", re.MULTILINE)
#: A file of tests, a test in one, or `::name` alone.
_TEST = re.compile(r"`(?=[t:])(((?:tests/[\w/]+/)?test_\w+\.py)?(?:::(\w+))?)`")
TESTS = ROOT / "tests"
_SPAN = re.compile(r"`([^`\n]+)`")


def shell_lines(page: Path) -> list[str]:
    """Commands in fenced, indented and inline code."""
    text = page.read_text()
    found = [line.removeprefix("$ ") for block in blocks(page) if block.language in ("sh", "console")
             for line in commands(block.text)]
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    found += [line for block in _INDENTED.findall(prose) for line in commands(block)]
    return found + _SPAN.findall(prose)


def calls(page: Path, program: str) -> list[str]:
    """Commands of this program, also behind a pipe, a variable or in a list."""
    parts = [part.strip() for line in shell_lines(page) for part in re.split(r"\s\|\s|&&|;|\s&(?:\s|$)", line)]
    parts = [re.sub(r"^(?:\w+=\S* |env (?:-u \w+ |\w+=\S+ )*)+", "", part) for part in parts]
    return [part for part in parts if part.startswith(program + " ")]


def words(command: str) -> list[str]:
    """The words of a command, without comments, optional brackets, what stands for more, and the options that a shell
    variable of the page holds (the page is run, too)."""
    command = re.sub(r"\s+\.\.\.$", "", re.sub(r"\[(-[^]]*)\]", r"\1", command))
    found = shlex.split(command, comments=True)
    return [word for word, before in zip(found, ["", *found]) if not re.fullmatch(r"\$[a-z]+", word)
            or before.startswith("--")]


@pytest.mark.parametrize("name", NAMES)
def test_commands_are_there_with_their_options(name):
    for command in calls(ROOT / name, "tidewheel"):
        tokens = words(command)[1:]
        if "|" in tokens[-1] or not tokens[0].isalpha():  # `checkpoint list|verify`: each of them
            continue
        try:
            parsed(tokens)
        except cyclopts.CycloptsError as error:
            pytest.fail(f"{name}: {command}\n{error}")


def parsed(tokens: list[str]) -> None:
    """Parse a command line, and the one inside a submission; missing arguments are no mistake of a page in prose."""
    try:
        _, bound, _ = app.parse_args(tokens, exit_on_error=False, print_error=False)
    except cyclopts.MissingArgumentError:
        return
    if tokens[0] == "submit" and bound.args and "--help" not in tokens:
        inner = shlex.split(command_of(bound.args)) if Path(bound.args[0]).suffix != ".py" else []
        if inner[:2] == ["python", "-m"] and inner[2].startswith("jobs."):
            job = {"jobs.prepare_data": ["data", "run"], "jobs.train": ["train"], "jobs.evaluate": ["evaluate"],
                   "jobs.export": ["checkpoint", "export"], "jobs.workflow": ["workflow", "run"]}[inner[2]]
            parsed([*job, *inner[3:]])


@pytest.mark.parametrize("name", NAMES)
def test_modules_are_there_with_their_options(name):
    for command in calls(ROOT / name, "python -m"):
        module, *options = words(command)[2:]
        spec = importlib.util.find_spec(module)
        assert spec is not None, f"{name}: {command}"
        assert spec.origin is not None
        if module.startswith("tests."):
            source = Path(spec.origin).read_text()
            long = [each.partition("=")[0] for each in options if each.startswith("--")]
            unknown = [each for each in long if f'"{each}"' not in source]
            assert not unknown, f"{name}: {command}: no {unknown}"


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name):
    page = ROOT / name
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path) if path else page
        assert there.exists(), f"{name}: {target}"
        assert not anchor or anchor in anchors(there), f"{name}: {target}"


def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", NAMES)
def test_files_that_are_named_are_there(name):
    for span in _SPAN.findall((ROOT / name).read_text()):
        path = span.rstrip("/")
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)+", path) or (
                path.split("/")[0] not in ROOMS and Path(path).suffix not in (".py", ".md")):
            continue
        assert any((ROOT / above / path).exists() for above in ABOVE), f"{name}: `{span}`"


@pytest.mark.parametrize("name", NAMES)
def test_tests_that_are_named_are_there(name):
    """`tests/unit/test_docs.py`, `test_docs.py` where one file has that name or the page has named it in full,
    `test_docs.py::test_links_lead_somewhere`, `::test_links_lead_somewhere` of the file before."""
    assert not missing_tests((ROOT / name).read_text())


def missing_tests(text: str) -> list[str]:
    """Return the tests that a page names and that do not exist."""
    missing: list[str] = []
    named: dict[str, Path] = {}
    file = None
    for span, path, function in _TEST.findall(text):
        if path:
            there = [named[path]] if path in named else [ROOT / path] if "/" in path else [*TESTS.rglob(path)]
            file = there[0] if len(there) == 1 and there[0].exists() else None
            if file is not None:
                named[file.name] = file
        if file is None or (function and not re.search(rf"^def {function}\(", file.read_text(), re.MULTILINE)):
            missing.append(span)
    return missing


def test_a_test_that_is_not_there_is_found():
    assert missing_tests("`tests/unit/test_docs.py`, `::test_links_lead_somewhere`, `tests/unit/train/test_stop.py`, "
                         "`test_stop.py`, `test_docs.py::test_links_lead_somewhere`") == []
    for wrong in ("tests/unit/test_nothing.py", "test_nothing.py", "test_layout.py::test_nothing", "test_stop.py",
                  "tests/unit/test_docs.py::test_links"):
        assert missing_tests(f"`{wrong}`") == [wrong]


def configs() -> dict[str, type[Config]]:
    """Groups of settings by name, of both configurations."""
    groups: dict[str, type[Config]] = {}
    for root in (TrainConfig, PipelineConfig):
        for name, field in root.model_fields.items():
            found = _configs_in(field.annotation)
            if found:
                groups[name] = found[0]
    return groups


def known_fields(kind: type[Config]) -> dict[str, Any]:
    """Annotations of a group's settings; of a part those of every built-in one, and its name's."""
    found = {name: field.annotation for name, field in kind.model_fields.items()}
    if issubclass(kind, Part):
        found["kind"] = str
        for other in kind.__subclasses__():
            found |= known_fields(other)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_settings_that_are_named_are_there(name):
    groups = configs()
    for span in _SPAN.findall((ROOT / name).read_text()):
        found = re.fullmatch(r"(\w+)((?:\.[a-z_]\w*)+)(?:[:=].*)?", span)
        if not found or found.group(1) not in groups or span.endswith((".py", ".md", ".yaml", ".jsonl")):
            continue
        kind: Any = groups[found.group(1)]
        for part in found.group(2)[1:].split("."):
            fields = known_fields(kind)
            assert part in fields, f"{name}: `{span}`: {kind.__name__} has no {part}"
            inner = _configs_in(fields[part])
            if not inner:
                break
            kind = inner[0]


@pytest.mark.parametrize(("name", "group"), [("elastic", "elastic"), ("checkpoints", "checkpoint")])
def test_tables_of_settings_have_the_defaults(name, group):
    kind = configs()[group]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| ([^|]+) \|", (DOCS / f"{name}.md").read_text(), re.MULTILINE)
    checked = 0
    for names, defaults in rows:
        settings, told = re.findall(r"`(\w+)`", names), defaults.split(", ")
        if settings[0] not in kind.model_fields:
            continue
        assert len(settings) == len(told), names
        for setting, value in zip(settings, told):
            default = kind.model_fields[setting].default
            if not isinstance(default, bool | int | float | str):
                continue  # a group of settings, which is told in words
            shown = f"{default:g}" if isinstance(default, float) else str(default)
            assert value.strip().split(" ")[0] == shown, f"{setting}: {default}, not {value}"
            checked += 1
    assert checked >= 5


@pytest.mark.parametrize("page", TASKS)
def test_what_a_task_page_does_not_run_is_outside_and_says_so(page):
    found = blocks(DOCS / f"{page}.md")
    assert any(block.language == "sh" for block in found)
    said = "\n".join(block.text for block in found if block.language == "sh")
    for block in found:
        if block.language == "console":
            assert NOT_RUN.search(block.before.replace("\n", " ")), f"{page}:{block.line}: why is it not run?"
            for command in commands(block.text):
                assert command.startswith(tuple(f"$ {program} " for program in OUTSIDE)), f"{page}: {command}"
        if block.file:
            assert Path(block.file).name in said, f"{page}:{block.line}: {block.file} is not used"
        assert block.language != "text" or block.text.strip(), f"{page}:{block.line}: empty"


@pytest.mark.parametrize("page", TASKS)
def test_what_the_tests_add_is_part_of_the_command(page):
    """Else a test would run what it says it shortens."""
    run = script(DOCS / f"{page}.md")
    for options in re.findall(r"# the tests add: (.*)", (DOCS / f"{page}.md").read_text()):
        assert re.search(rf"^[^#]* {re.escape(options)}$", run, re.MULTILINE), options


def test_the_pages_show_what_a_newcomer_needs():
    run = {command for page in TASKS for command in calls(DOCS / f"{page}.md", "tidewheel")}
    for start in ("data run", "train", "checkpoint export", "plan", "k8s render", "k8s lint", "doctor",
                  "doctor --address", "cluster up", "cluster drain", "submit", "workflow plan", "workflow status",
                  "checkpoint verify", "shards verify", "audit", "report"):
        assert any(command.startswith(f"tidewheel {start}") for command in run), start
    index = (DOCS / "README.md").read_text()
    assert not [page.name for page in DOCS.glob("*.md") if page.name != "README.md" and f"({page.name})" not in index]


def test_contributing_has_every_kind_of_part():
    found = set()
    for path in (ROOT / "platform/tidewheel").rglob("*.py"):
        found |= set(re.findall(r'= Kind\("([\w ]+)", (\w+), [^,]+, "(tidewheel\.\w+)"', path.read_text()))
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = re.findall(r"^\| ([\w ]+) \| `tw\.(\w+)` \| `[\w/]+` \| `([\w.]+)` \|", text, re.MULTILINE)
    assert len(found) >= 8
    assert set(table) == found


def test_the_glossary_has_each_term_once_in_order():
    terms = re.findall(r"^\| ([\w ]+) \|", (DOCS / "glossary.md").read_text(), re.MULTILINE)[1:]
    assert len(terms) > 30
    assert terms == sorted(set(terms))
