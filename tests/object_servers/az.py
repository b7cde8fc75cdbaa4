"""A server for the part of Azure's Blob service that the az:// store uses."""

from __future__ import annotations

import email.utils
import re
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from tests.object_servers.base import Answer, Object, ObjectServer, Request, byte_range

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Account and key that every emulator of the service accepts."""


class AZServer(ObjectServer):
    """A server of containers, block blobs with preconditions, and block lists."""

    kind = "az"

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self._blocks: dict[tuple[str, str], dict[str, bytes]] = {}
        self._committed: dict[tuple[str, str], dict[str, bytes]] = {}
        self._md5: dict[tuple[str, str], str] = {}

    def variables(self) -> dict[str, str]:
        return {"AZURE_STORAGE_CONNECTION_STRING":
                f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
                f"BlobEndpoint={self.endpoint}/{ACCOUNT};"}

    def refusal(self, status: int, code: str) -> Answer:
        body = f"<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>{code} was refused</Message></Error>"
        return Answer(status, body.encode(), {"x-ms-error-code": code, "Content-Type": "application/xml"})

    def answer(self, request: Request) -> Answer:
        match = re.fullmatch(rf"/{ACCOUNT}/([^/]+)(?:/(.*))?", request.path, re.DOTALL)
        if match is None or not request.headers.get("Authorization", "").startswith(f"SharedKey {ACCOUNT}:"):
            return self.refusal(403, "AuthenticationFailed")
        container, name = match.groups()
        if container not in self.buckets:
            return self.refusal(404, "ContainerNotFound")
        if not name:
            return self._list(container, request.query)
        if request.method == "PUT":
            return self._put(container, name, request)
        if name not in self.buckets[container]:
            return self.refusal(404, "BlobNotFound")
        if request.method == "DELETE":
            del self.buckets[container][name]
            return Answer(202)
        return self._get(container, name, request)

    def _put(self, container: str, name: str, request: Request) -> Answer:
        key = container, name
        if request.query.get("comp") == "block":
            self._blocks.setdefault(key, {})[request.query["blockid"]] = request.body
            return Answer(201)
        if request.headers.get("If-None-Match") == "*" and name in self.buckets[container]:
            return self.refusal(409, "BlobAlreadyExists")
        if request.query.get("comp") == "blocklist":
            known = {**self._committed.get(key, {}), **self._blocks.get(key, {})}
            blocks = [str(entry.text) for entry in ElementTree.fromstring(request.body)]
            if any(block not in known for block in blocks):
                return self.refusal(400, "InvalidBlockList")
            self._committed[key] = {block: known[block] for block in blocks}
            data = b"".join(known[block] for block in blocks)
            md5 = request.headers.get("x-ms-blob-content-md5", "")
        else:
            self._committed.pop(key, None)
            data = request.body
            md5 = Object(data).md5
        self._blocks.pop(key, None)  # the service drops the blocks of other writers too
        self.buckets[container][name] = Object(data)
        self._md5[key] = md5
        return Answer(201, headers=self._headers(container, name))

    def _headers(self, container: str, name: str) -> dict[str, str]:
        stored = self.buckets[container][name]
        return {"ETag": f'"0x{int(stored.written * 1e6):X}"', "x-ms-blob-type": "BlockBlob",
                "Last-Modified": email.utils.formatdate(stored.written, usegmt=True),
                "Content-MD5": self._md5[container, name]}

    def _get(self, container: str, name: str, request: Request) -> Answer:
        data = self.buckets[container][name].data
        headers = self._headers(container, name)
        header = request.headers.get("x-ms-range") or request.headers.get("Range")
        if not header or request.method == "HEAD":
            return Answer(200, data, headers)
        requested = byte_range(header, len(data))
        if requested is None:
            return self.refusal(416, "InvalidRange")
        start, end = requested
        return Answer(206, data[start:end], {**headers, "Content-Range": f"bytes {start}-{end - 1}/{len(data)}"})

    def _list(self, container: str, query: dict[str, str]) -> Answer:
        objects = self.buckets[container]
        names = [name for name in sorted(objects)
                 if name.startswith(query.get("prefix", "")) and name > query.get("marker", "")]
        page = names[:min(1000, int(query.get("maxresults", 1000)))]
        following = page[-1] if len(page) < len(names) else ""
        blobs = "".join(self._listed(container, name) for name in page)
        body = (f"<?xml version=\"1.0\" encoding=\"utf-8\"?><EnumerationResults ServiceEndpoint=\"{self.endpoint}\" "
                f"ContainerName=\"{container}\"><Blobs>{blobs}</Blobs><NextMarker>{escape(following)}</NextMarker>"
                "</EnumerationResults>")
        return Answer(200, body.encode(), {"Content-Type": "application/xml"})

    def _listed(self, container: str, name: str) -> str:
        headers = self._headers(container, name)
        return (f"<Blob><Name>{escape(name)}</Name><Properties>"
                f"<Last-Modified>{headers['Last-Modified']}</Last-Modified><Etag>{escape(headers['ETag'])}</Etag><Content-Length>{len(self.buckets[container][name].data)}"
                f"</Content-Length><Content-MD5>{headers['Content-MD5']}</Content-MD5><BlobType>BlockBlob</BlobType>"
                "</Properties><Metadata/></Blob>")
