"""Measure reading: documents and megabytes of text per CPU second by format, and the memory of a line of 200 MB."""

from __future__ import annotations

import argparse
import gzip
import html
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from tidewheel.data.config import ReadConfig
from tidewheel.data.readers import Record, read_records
from tidewheel.storage import store

CORPUS = Path(__file__).parents[3] / "shared" / "corpus"
CONFIG = ReadConfig(paths=("*",))
_MEMORY = """
import sys
from tests.benchmarks.sources import CONFIG, peak, read_records, store
before = peak()
found = list(read_records(store(sys.argv[1]), "long.jsonl", CONFIG))
print(found[0].reason, peak() - before >> 10)
"""


def write(folder: Path, documents: list[dict], pages: int) -> dict[str, Callable[[], int]]:
    """Write the documents in every format, and return for each file its peer's function, which counts documents."""
    lines = b"".join(json.dumps(document).encode() + b"\n" for document in documents)
    (folder / "plain.jsonl").write_bytes(lines)
    (folder / "packed.jsonl.gz").write_bytes(gzip.compress(lines))
    with pa.CompressedOutputStream(str(folder / "packed.jsonl.zst"), "zstd") as sink:
        sink.write(lines)
    table = pa.Table.from_pylist(documents)
    pq.write_table(table, folder / "table.parquet", compression="zstd")
    with pa.ipc.new_file(str(folder / "table.arrow"), table.schema) as sink:
        sink.write_table(table)
    (folder / "texts.warc.wet.gz").write_bytes(b"".join(
        gzip.compress(_block("conversion", "text/plain", index, document["text"].encode()))
        for index, document in enumerate(documents)))
    shown = [_page(document["text"]) for document in documents[:pages]]
    (folder / "pages.warc.gz").write_bytes(b"".join(gzip.compress(_block(
        "response", "application/http", index, b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n" + page))
        for index, page in enumerate(shown)))

    def loads(stream: Any) -> int:
        with stream:
            return sum(1 for line in stream.read().splitlines() if json.loads(line))

    def extract() -> int:
        import trafilatura

        texts = [trafilatura.extract(page, favor_precision=True, include_comments=False) for page in shown]
        return sum(text is not None for text in texts)

    return {
        "plain.jsonl": lambda: loads((folder / "plain.jsonl").open("rb")),
        "packed.jsonl.gz": lambda: loads(gzip.open(folder / "packed.jsonl.gz")),
        "packed.jsonl.zst": lambda: loads(pa.input_stream(str(folder / "packed.jsonl.zst"), compression="zstd")),
        "table.parquet": lambda: len(pq.read_table(folder / "table.parquet").to_pylist()),
        "table.arrow": lambda: len(pa.ipc.open_file(str(folder / "table.arrow")).read_all().to_pylist()),
        "texts.warc.wet.gz": lambda: gzip.open(folder / "texts.warc.wet.gz").read().count(b"WARC-Record-ID"),
        "pages.warc.gz": extract,
    }


def _block(kind: str, media: str, index: int, content: bytes) -> bytes:
    return (f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Record-ID: <urn:uuid:{index}>\r\nWARC-Target-URI: http://a.org/\r\n"
            f"Content-Type: {media}\r\nContent-Length: {len(content)}\r\n\r\n").encode() + content + b"\r\n\r\n"


def _page(text: str) -> bytes:
    menu = "".join(f"<li><a href='/{index}'>Link {index}</a></li>" for index in range(30))
    body = "".join(f"<p>{html.escape(part)}</p>" for part in text.split("\n") if part.strip())
    return f"<html><body><nav><ul>{menu}</ul></nav><article>{body}</article></body></html>".encode()


def peak() -> int:
    """Return the largest memory of this process so far in KiB; getrusage would include the parent's."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])


def measure(work: Callable[[], int], rounds: int) -> tuple[int, float]:
    """Return the count and the least CPU seconds of `work`."""
    best, count = float("inf"), 0
    for _ in range(rounds):
        began = time.process_time()
        count = work()
        best = min(best, time.process_time() - began)
    return count, best


def corpus() -> Iterator[dict]:
    """Yield the documents of the project's corpus."""
    with gzip.open(CORPUS / "dev-00000.jsonl.gz") as stream:
        for line in stream:
            yield {name: str(value) for name, value in json.loads(line).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=3000)
    parser.add_argument("--pages", type=int, default=200, help="number of HTML pages, which take much longer")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if not CORPUS.is_dir():
        raise SystemExit(f"needs the documents of {CORPUS}")
    documents = [document for document, _ in zip(corpus(), range(options.documents))]
    shown = Table("file", "docs/CPU-s", "text MB/CPU-s", "peer takes", title=f"reading {len(documents):,} documents")
    with tempfile.TemporaryDirectory() as name:
        peers = write(Path(name), documents, options.pages)
        for file, peer in peers.items():
            texts: list[int] = []

            def read(file: str = file, texts: list[int] = texts) -> int:
                texts[:] = [len(record.text.encode()) for record in read_records(store(name), file, CONFIG)
                            if isinstance(record, Record)]
                return len(texts)

            count, seconds = measure(read, options.rounds)
            peer_count, peer_seconds = measure(peer, options.rounds)
            assert count == peer_count, f"{file}: {count} documents, its peer finds {peer_count}"
            shown.add_row(file, f"{count / seconds:,.0f}", f"{sum(texts) / seconds / 1e6:.1f}",
                          f"{peer_seconds / seconds:.0%} of the time")
        Console().print(shown)
        with (Path(name) / "long.jsonl").open("wb") as sink:
            sink.truncate(200_000_000)
        process = subprocess.run([sys.executable, "-c", _MEMORY, name], capture_output=True, check=True, text=True)
        reason, megabytes = process.stdout.split()
        print(f"a line of 200 MB: {reason}, {megabytes} MiB more than before "
              f"(max_record_bytes {CONFIG.max_record_bytes >> 20} MiB)")


if __name__ == "__main__":
    main()
