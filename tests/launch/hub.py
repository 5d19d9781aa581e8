"""A Hugging Face hub on this machine: one repository with a model, and a dataset of the same name."""

import hashlib
import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 4096,
}  # fmt: skip
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TEXT = "".join(
    json.dumps({"text": f"Kord elas {number} kuningat suures metsas. " * 8}) + "\n" for number in range(40)
)


class Hub:
    """A hub with one model and one dataset.

    damage: a file → what is sent in its place, once. cut: called with the number of each request, from 0;
    where it returns True, half of the answer is sent.
    """

    def __init__(self, files: dict[str, bytes]):
        self.files, self.damage, self.asked = files, {}, []
        self.cut: Callable[[int], bool] = lambda number: False
        hub = self

        class Answer(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                hub.answer(self, with_body=False)

            def do_GET(self) -> None:
                hub.answer(self, with_body=True)

            def log_message(self, *words) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler, with_body: bool) -> None:
        path = request.path.partition("?")[0]
        is_cut = self.cut(len(self.asked))
        self.asked.append(f"{request.command} {path}")
        headers = {"X-Repo-Commit": COMMIT}
        if path.startswith("/api/"):
            kind = "datasets/" if path.startswith("/api/datasets") else ""
            names = [
                name.removeprefix(kind) for name in self.files if name.startswith("datasets/") == bool(kind)
            ]
            files = [{"type": "file", "path": name, "size": 1, "oid": ""} for name in names]
            siblings = [{"rfilename": name} for name in names]
            told = files if "/tree/" in path else {"id": "org/one", "sha": COMMIT, "siblings": siblings}
            body = json.dumps(told).encode()
        else:
            kind, name = re.fullmatch(r"/(datasets/)?org/one/resolve/[^/]+/(.+)", path).groups()
            name = (kind or "") + name
            if name not in self.files:
                request.send_response(404)
                request.send_header("X-Error-Code", "EntryNotFound")
                request.send_header("Content-Length", "0")
                request.end_headers()
                return
            body = self.files[name]
            headers["ETag"] = f'"{hashlib.sha256(body).hexdigest()}"'
            if with_body:
                body = self.damage.pop(name, body)
        first = re.match(r"bytes=(\d+)-", request.headers.get("Range") or "")
        begin = int(first[1]) if first else 0
        request.send_response(206 if first else 200)
        for key, value in (headers | {"Content-Length": str(len(body) - begin)}).items():
            request.send_header(key, value)
        request.end_headers()
        if with_body:
            request.wfile.write(body[begin : begin + len(body[begin:]) // 2] if is_cut else body[begin:])
        request.close_connection = request.close_connection or is_cut
