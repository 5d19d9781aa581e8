"""A server with the part of the hub's interface that uploads use, with its repositories in memory."""

import hashlib
import json
import re
import threading
from base64 import b64decode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Uploads:
    """repositories: name → revision → path → content. refuse: (command, path) → a status, or None."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: dict[str, bool] = {}
        self.objects: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.tokens: set[str | None] = set()
        self.refuse = lambda command, path: None
        hub = self

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self)

            do_POST = do_PUT = do_HEAD = do_GET

            def log_message(self, *words) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        path = request.path.partition("?")[0]
        self.asked.append(f"{request.command} {path}")
        self.tokens.add(request.headers.get("Authorization"))
        status, told = self.refuse(request.command, path), {"error": "as the test wishes"}
        if status is None:
            status, told = self._told(request.command, path, body)
        content = json.dumps(told).encode()
        request.send_response(status)
        if status == 404:
            request.send_header("X-Error-Code", told.get("code", "RevisionNotFound"))
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)

    def _told(self, command: str, path: str, body: bytes) -> tuple[int, object]:
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            if name in self.repositories:
                return 409, {"url": f"{self.address}/{name}"}
            self.repositories[name] = {"main": {}}
            self.private[name] = asked.get("private", asked.get("visibility") == "private")
            return 200, {"url": f"{self.address}/{name}", "name": name, "id": name}
        if path == "/api/validate-yaml":
            return 200, {"warnings": [], "errors": []}
        if command == "PUT":
            self.objects[path.rsplit("/", 1)[1]] = body
            return 200, {}
        if path.endswith(".git/info/lfs/objects/batch"):
            return 200, {
                "transfer": "basic",
                "objects": [self._place(one) for one in json.loads(body)["objects"]],
            }
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(\w+)/?([^/]*)/?)?", path)
        if found is None:
            return 404, {"error": f"this stand-in has no {command} {path}"}
        name, what, revision = found.groups()
        if name not in self.repositories:
            return 404, {"error": "no such repository", "code": "RepoNotFound"}
        revisions = self.repositories[name]
        if what is None:
            return 200, {"id": name}
        if what == "branch":
            revisions[revision] = dict(revisions["main"])
            return 200, {}
        if what == "tree":
            if revision not in revisions:
                return 404, {"error": "no such revision"}
            return 200, [_entry(path, content) for path, content in revisions[revision].items()]
        if what == "preupload":
            files = json.loads(body)["files"]
            modes = [
                {"path": one["path"], "uploadMode": _mode(one["path"]), "shouldIgnore": False}
                for one in files
            ]
            return 200, {"files": modes}
        assert what == "commit", path
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                revisions[revision][value["path"]] = b64decode(value["content"])
            elif entry["key"] == "deletedFile":
                del revisions[revision][value["path"]]
            elif entry["key"] == "lfsFile":
                revisions[revision][value["path"]] = self.objects[value["oid"]]
        return 200, {
            "success": True,
            "commitUrl": f"{self.address}/{name}/commit/{'0' * 40}",
            "commitOid": "0" * 40,
        }

    def _place(self, wanted: dict) -> dict:
        here = (
            {}
            if wanted["oid"] in self.objects
            else {"upload": {"href": f"{self.address}/put/{wanted['oid']}"}}
        )
        return wanted | ({"actions": here} if here else {})


def _mode(path: str) -> str:
    return "lfs" if path.endswith((".safetensors", ".gguf")) else "regular"


def _entry(path: str, content: bytes) -> dict:
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    entry = {"type": "file", "path": path, "size": len(content), "oid": blob}
    if _mode(path) == "lfs":
        sha256 = hashlib.sha256(content).hexdigest()
        entry |= {"oid": "1" * 40, "lfs": {"oid": sha256, "size": len(content), "pointerSize": 130}}
    return entry
