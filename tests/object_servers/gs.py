"""A server for the part of Google Cloud Storage's JSON API that the gs:// store uses."""

from __future__ import annotations

import datetime
import json
import re
import uuid

from tests.object_servers.base import Answer, Object, ObjectServer, Request, byte_range

PAGE = 1000
QUANTUM = 256 << 10
"""Google keeps a multiple of this many bytes of a part that is not the last, and requests the rest again."""


class GSServer(ObjectServer):
    """A server of buckets, simple uploads with preconditions, and resumable uploads."""

    kind = "gs"

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self._uploads: dict[str, tuple[str, str, bytearray]] = {}
        self._completed: dict[str, Answer] = {}

    def variables(self) -> dict[str, str]:
        return {"STORAGE_EMULATOR_HOST": self.endpoint}

    def refusal(self, status: int, code: str) -> Answer:
        body = json.dumps({"error": {"code": status, "message": code}}).encode()
        return Answer(status, body, {"Content-Type": "application/json"})

    def answer(self, request: Request) -> Answer:
        if request.path.startswith("/resumable/"):
            return self._resume(request)
        match = re.fullmatch(r"(/upload)?/storage/v1/b/([^/]+)/o(?:/(.*))?", request.path, re.DOTALL)
        if match is None:
            return self.refusal(400, "invalid request")
        upload, bucket, name = match.groups()
        if bucket not in self.buckets:
            return self.refusal(404, "The specified bucket does not exist.")
        if upload:
            return self._upload(bucket, request)
        if name is None:
            return self._list(bucket, request.query)
        if name not in self.buckets[bucket]:
            return self.refusal(404, f"No such object: {bucket}/{name}")
        if request.method == "DELETE":
            del self.buckets[bucket][name]
            return Answer(204)
        return self._get(name, self.buckets[bucket][name], request)

    def _get(self, name: str, stored: Object, request: Request) -> Answer:
        if request.query.get("alt") != "media":
            return _json(_resource(name, stored))
        if not (header := request.headers.get("Range")):
            return Answer(200, stored.data)
        requested = byte_range(header, len(stored.data))
        return Answer(206, stored.data[slice(*requested)]) if requested else self.refusal(416, "out of range")

    def _list(self, bucket: str, query: dict[str, str]) -> Answer:
        objects = self.buckets[bucket]
        names = [name for name in sorted(objects)
                 if name.startswith(query.get("prefix", "")) and name > query.get("pageToken", "")]
        page = names[:int(query.get("maxResults", PAGE))]
        following = {"nextPageToken": page[-1]} if len(page) < len(names) else {}
        return _json({"items": [_resource(name, objects[name]) for name in page], **following})

    def _upload(self, bucket: str, request: Request) -> Answer:
        name = request.query["name"]
        if request.query["uploadType"] == "resumable":
            key = uuid.uuid4().hex
            self._uploads[key] = bucket, name, bytearray()
            return Answer(200, headers={"Location": f"{self.endpoint}/resumable/{key}"})
        if request.query.get("ifGenerationMatch") == "0" and name in self.buckets[bucket]:
            return self.refusal(412, "At least one of the pre-conditions you specified did not hold.")
        return self._store(bucket, name, request.body)

    def _store(self, bucket: str, name: str, data: bytes) -> Answer:
        self.buckets[bucket][name] = Object(data)
        return _json(_resource(name, self.buckets[bucket][name]))

    def _resume(self, request: Request) -> Answer:
        key = request.path.rpartition("/")[2]
        if key in self._completed:
            return self._completed[key]
        if key not in self._uploads:
            return self.refusal(410, "The upload was cancelled.")
        if request.method == "DELETE":
            del self._uploads[key]
            return Answer(499)
        bucket, name, data = self._uploads[key]
        match = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", request.headers["Content-Range"])
        assert match is not None
        if match[1] is not None:
            start = int(match[1])
            if start > len(data) or int(match[2]) - start + 1 != len(request.body):
                return self.refusal(400, "invalid Content-Range")
            data[start:] = request.body
            if match[3] == "*":
                del data[len(data) // QUANTUM * QUANTUM:]
            elif len(data) == int(match[3]):
                self._completed[key] = self._store(bucket, name, bytes(data))
                return self._completed[key]
        return Answer(308, headers={"Range": f"bytes=0-{len(data) - 1}"} if data else {})


def _resource(name: str, stored: Object) -> dict[str, str]:
    updated = datetime.datetime.fromtimestamp(stored.written, datetime.UTC).isoformat().replace("+00:00", "Z")
    return {"name": name, "size": str(len(stored.data)), "md5Hash": stored.md5, "updated": updated}


def _json(value: object) -> Answer:
    return Answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})
