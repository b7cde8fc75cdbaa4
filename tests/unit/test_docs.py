"""Commands, options, files, links, tests, settings and defaults named in README.md and `docs/` exist."""

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
#: Folders relative to which a page may name a file.
ABOVE = ("", "platform", "platform/tidewheel", "docs", "k8s", "tests")
_INDENTED = re.compile(r"(?:^(?: {4}.*)?\n)+", re.MULTILINE)
#: A test file, a test in one, or `::name` alone.
_TEST = re.compile(r"`(?=[t:])(((?:tests/[\w/]+/)?test_\w+\.py)?(?:::(\w+))?)`")
TESTS = ROOT / "tests"
_SPAN = re.compile(r"`([^`\n]+)`")


def shell_lines(page: Path) -> list[str]:
    """Return the commands in fenced, indented and inline code."""
    text = page.read_text()
    lines = [line.removeprefix("$ ") for block in blocks(page) if block.language in ("sh", "console")
             for line in commands(block.text)]
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    lines += [line for block in _INDENTED.findall(prose) for line in commands(block)]
    return lines + _SPAN.findall(prose)


def calls(page: Path, program: str) -> list[str]:
    """Return the commands of a program, also those after a pipe or a variable, and those in a list."""
    parts = [part.strip() for line in shell_lines(page) for part in re.split(r"\s\|\s|&&|;|\s&(?:\s|$)", line)]
    parts = [re.sub(r"^(?:\w+=\S* |env (?:-u \w+ |\w+=\S+ )*)+", "", part) for part in parts]
    return [part for part in parts if part.startswith(program + " ")]


def words(command: str) -> list[str]:
    """Return the words of a command.

    Comments, brackets around optional words, a final `...` and shell variables that hold options are left out; a test
    that runs the page covers the variables.
    """
    command = re.sub(r"\s+\.\.\.$", "", re.sub(r"\[(-[^]]*)\]", r"\1", command))
    parts = shlex.split(command, comments=True)
    return [word for word, before in zip(parts, ["", *parts]) if not re.fullmatch(r"\$[a-z]+", word)
            or before.startswith("--")]


@pytest.mark.parametrize("name", NAMES)
def test_commands_exist_with_their_options(name):
    for command in calls(ROOT / name, "tidewheel"):
        tokens = words(command)[1:]
        if "|" in tokens[-1] or not tokens[0].isalpha():  # alternatives, as in `checkpoint list|verify`
            continue
        try:
            parsed(tokens)
        except cyclopts.CycloptsError as error:
            pytest.fail(f"{name}: {command}\n{error}")


def parsed(tokens: list[str]) -> None:
    """Parse a command line, and the one inside a submission; prose may leave arguments out."""
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
def test_modules_exist_with_their_options(name):
    for command in calls(ROOT / name, "python -m"):
        module, *options = words(command)[2:]
        spec = importlib.util.find_spec(module)
        assert spec is not None, f"{name}: {command}"
        assert spec.origin is not None
        if module.startswith("tests."):
            is_package = spec.submodule_search_locations is not None
            source = (Path(spec.origin).with_name("__main__.py") if is_package else Path(spec.origin)).read_text()
            long_options = [option.partition("=")[0] for option in options if option.startswith("--")]
            unknown = [option for option in long_options if f'"{option}"' not in source]
            assert not unknown, f"{name}: {command}: no {unknown}"


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name):
    page = ROOT / name
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path) if path else page
        assert linked.exists(), f"{name}: {target}"
        assert not anchor or anchor in anchors(linked), f"{name}: {target}"


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", NAMES)
def test_named_files_exist(name):
    for span in _SPAN.findall((ROOT / name).read_text()):
        path = span.rstrip("/")
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)+", path) or (
                path.split("/")[0] not in ROOMS and Path(path).suffix not in (".py", ".md")):
            continue
        assert any((ROOT / above / path).exists() for above in ABOVE), f"{name}: `{span}`"


@pytest.mark.parametrize("name", NAMES)
def test_named_tests_exist(name):
    """A page may write `tests/unit/test_docs.py`, or `test_docs.py` if the name is unique or the page has named it in
    full, `test_docs.py::test_links_lead_somewhere`, or `::test_links_lead_somewhere` for the file before."""
    assert not missing_tests((ROOT / name).read_text())


def missing_tests(text: str) -> list[str]:
    """Return the tests that a page names and that do not exist."""
    missing: list[str] = []
    named: dict[str, Path] = {}
    file = None
    for span, path, function in _TEST.findall(text):
        if path:
            matches = [named[path]] if path in named else [ROOT / path] if "/" in path else [*TESTS.rglob(path)]
            file = matches[0] if len(matches) == 1 and matches[0].exists() else None
            if file is not None:
                named[file.name] = file
        if file is None or (function and not re.search(rf"^def {function}\(", file.read_text(), re.MULTILINE)):
            missing.append(span)
    return missing


def test_a_named_test_that_does_not_exist_is_reported():
    assert missing_tests("`tests/unit/test_docs.py`, `::test_links_lead_somewhere`, `tests/unit/train/test_stop.py`, "
                         "`test_stop.py`, `test_docs.py::test_links_lead_somewhere`") == []
    for wrong in ("tests/unit/test_nothing.py", "test_nothing.py", "test_layout.py::test_nothing", "test_stop.py",
                  "tests/unit/test_docs.py::test_links"):
        assert missing_tests(f"`{wrong}`") == [wrong]


def configs() -> dict[str, type[Config]]:
    """Return the groups of settings of both configurations, by name."""
    groups: dict[str, type[Config]] = {}
    for root in (TrainConfig, PipelineConfig):
        for name, field in root.model_fields.items():
            kinds = _configs_in(field.annotation)
            if kinds:
                groups[name] = kinds[0]
    return groups


def known_fields(kind: type[Config]) -> dict[str, Any]:
    """Return the annotations of a group's settings; for a part, those of every built-in one and of `kind`."""
    fields = {name: field.annotation for name, field in kind.model_fields.items()}
    if issubclass(kind, Part):
        fields["kind"] = str
        for subclass in kind.__subclasses__():
            fields |= known_fields(subclass)
    return fields


@pytest.mark.parametrize("name", NAMES)
def test_named_settings_exist(name):
    groups = configs()
    for span in _SPAN.findall((ROOT / name).read_text()):
        match = re.fullmatch(r"(\w+)((?:\.[a-z_]\w*)+)(?:[:=].*)?", span)
        if not match or match.group(1) not in groups or span.endswith((".py", ".md", ".yaml", ".jsonl")):
            continue
        kind: Any = groups[match.group(1)]
        for part in match.group(2)[1:].split("."):
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
        settings = re.findall(r"`(\w+)`", names)
        values = defaults.split(", ")
        if settings[0] not in kind.model_fields:
            continue
        assert len(settings) == len(values), names
        for setting, value in zip(settings, values):
            default = kind.model_fields[setting].default
            if not isinstance(default, bool | int | float | str):
                continue  # a group of settings, which the table describes in words
            shown = f"{default:g}" if isinstance(default, float) else str(default)
            assert value.strip().split(" ")[0] == shown, f"{setting}: {default}, not {value}"
            checked += 1
    assert checked >= 5


@pytest.mark.parametrize("page", TASKS)
def test_commands_that_a_task_page_does_not_run_need_another_machine_and_say_so(page):
    page_blocks = blocks(DOCS / f"{page}.md")
    assert any(block.language == "sh" for block in page_blocks)
    shell_text = "\n".join(block.text for block in page_blocks if block.language == "sh")
    for block in page_blocks:
        if block.language == "console":
            assert NOT_RUN.search(block.before.replace("\n", " ")), f"{page}:{block.line}: say why this is not run"
            for command in commands(block.text):
                assert command.startswith(tuple(f"$ {program} " for program in OUTSIDE)), f"{page}: {command}"
        if block.file:
            assert Path(block.file).name in shell_text, f"{page}:{block.line}: {block.file} is not used"
        assert block.language != "text" or block.text.strip(), f"{page}:{block.line}: empty"


@pytest.mark.parametrize("page", TASKS)
def test_options_that_the_tests_add_are_part_of_the_command(page):
    """Otherwise a test would run the page's full command although it says that it shortens it."""
    run = script(DOCS / f"{page}.md")
    for options in re.findall(r"# the tests add: (.*)", (DOCS / f"{page}.md").read_text()):
        assert re.search(rf"^[^#]* {re.escape(options)}$", run, re.MULTILINE), options


def test_the_readme_names_every_package():
    text = (ROOT / "README.md").read_text()
    tree = text[text.index("platform/tidewheel/ "):].split("```")[0]
    root = ROOT / "platform/tidewheel"
    missing = [folder.name for folder in root.iterdir() if (folder / "__init__.py").exists()
               and not re.search(rf"^  (?:[\w, .]*, )?{folder.name}/", tree, re.MULTILINE)]
    assert not missing


def test_the_pages_show_what_a_newcomer_needs():
    run = {command for page in TASKS for command in calls(DOCS / f"{page}.md", "tidewheel")}
    for start in ("data run", "train", "checkpoint export", "plan", "k8s render", "k8s lint", "doctor",
                  "doctor --address", "cluster up", "cluster drain", "submit", "workflow plan", "workflow status",
                  "checkpoint verify", "shards verify", "audit", "report"):
        assert any(command.startswith(f"tidewheel {start}") for command in run), start
    index = (DOCS / "README.md").read_text()
    assert not [page.name for page in DOCS.glob("*.md") if page.name != "README.md" and f"({page.name})" not in index]


def test_contributing_has_every_kind_of_part():
    kinds = set()
    for path in (ROOT / "platform/tidewheel").rglob("*.py"):
        kinds |= set(re.findall(r'= Kind\("([\w ]+)", (\w+), [^,]+, "(tidewheel\.\w+)"', path.read_text()))
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = re.findall(r"^\| ([\w ]+) \| `tw\.(\w+)` \| `[\w/]+` \| `([\w.]+)` \|", text, re.MULTILINE)
    assert len(kinds) >= 8
    assert set(table) == kinds


def test_the_glossary_has_each_term_once_in_order():
    terms = re.findall(r"^\| ([\w ]+) \|", (DOCS / "glossary.md").read_text(), re.MULTILINE)[1:]
    assert len(terms) > 30
    assert terms == sorted(set(terms))
