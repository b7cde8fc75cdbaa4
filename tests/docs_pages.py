"""Read the Markdown of `docs/`: its fenced blocks, and the shell script of a task page.

The language of a fence decides how tests use the block:

| fence | |
|---|---|
| ```sh | run by bash; `# exit code 2` after a command states its code; `# the tests add: --limit 9` adds options |
| ```python, ```yaml | written to the file that the first line names (`# mine.yaml`); Python without a name is run |
| ```diff | applied to the checkout |
| ```console | not run; the paragraph before says why, and the block only calls programs in `OUTSIDE` |
| ```text | output of a command: neither run nor compared |
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TASKS = ("first_run", "csv_to_model", "bring_your_data", "inputs", "clean_text", "pretrain_on_a_cluster",
         "on_kubernetes", "spot_training", "diloco", "recover", "write_a_filter",
         "write_an_optimizer", "write_an_objective", "write_a_callback", "write_a_reward", "add_a_model",
         "long_context", "sft", "preferences", "distillation",
         "adapters", "evaluation", "reinforcement", "write_an_environment", "coming_from")
#: Programs of blocks that are not run, because they need a cloud, an API server or a container engine.
OUTSIDE = ("kubectl", "docker", "helm", "aws", "gcloud", "ray up")
NOT_RUN = re.compile(r"[Nn]ot run by the tests, which have no [^:]+:$")
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_EXIT_CODE = re.compile(r"^(?P<command>[^#\n]*[^\s#])\s+# exit code (?P<code>\d+)\b.*$")
_ADDED = re.compile(r"^(?P<command>[^#\n]*[^\s#])\s+# the tests add: (?P<options>--\S.*)$")
_FILE = re.compile(r"^# ([\w./-]+\.\w+)\n")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the line of its fence and the paragraph before it."""

    language: str
    text: str
    line: int
    before: str

    @property
    def file(self) -> str:
        """Return the name of the file that the block writes, or "" if it writes none."""
        match = _FILE.match(self.text) if self.language in ("python", "yaml") else None
        return match.group(1) if match else ""


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page."""
    text = page.read_text()
    return [Block(fence.group(1), fence.group(2), text.count("\n", 0, fence.start()) + 1,
                  text[: fence.start()].rstrip().rpartition("\n\n")[2]) for fence in _FENCE.finditer(text)]


def commands(text: str) -> list[str]:
    """Return the commands of a shell block, with continued lines joined and without comment lines."""
    joined = re.sub(r"\\\n\s*", "", text)
    return [line.strip() for line in joined.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def script(page: Path) -> str:
    """Return a bash script of all blocks that are run or written, in order; it ends at the first failing command.

    Raises:
        ValueError: a block has an unknown language.
    """
    parts = ["set -eo pipefail"]
    for block in blocks(page):
        if block.language in ("text", "console"):
            continue
        parts.append(f"echo '--- {page.name}:{block.line}'")
        if block.language == "sh":
            parts += (_expecting(_ADDED.sub(r"\g<command> \g<options>", line)) for line in block.text.splitlines())
        elif block.language == "diff":
            parts.append(_fed("git apply -C1 -", block.text))
        elif block.file:
            parts.append(f"mkdir -p \"$(dirname '{block.file}')\"")
            parts.append(_fed(f"cat > '{block.file}'", block.text))
        elif block.language == "python":
            parts.append(_fed("python -", block.text))
        else:
            raise ValueError(f"{page.name}:{block.line}: unknown language {block.language!r} of a block")
    return "\n".join([*parts, "echo '--- end'", ""])


def _fed(command: str, text: str) -> str:
    return f"{command} <<'END_OF_BLOCK'\n{text}END_OF_BLOCK"


def _expecting(line: str) -> str:
    """Return a command line that fails on any exit code except the one that its comment states."""
    match = _EXIT_CODE.match(line)
    if not match:
        return line
    return (f"code=0; {match['command']} || code=$?; "
            f"test \"$code\" -eq {match['code']} || {{ echo \"exit code $code, not {match['code']}\"; exit 1; }}")
