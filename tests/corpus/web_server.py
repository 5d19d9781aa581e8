"""A web server of files in memory, with ranges, versions and the faults that a test plants."""

import re
import threading
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Page:
    """breaks: bytes of the next answers, after which the connection ends. statuses: of the next answers."""

    content: bytes
    version: str = "v1"
    has_ranges: bool = True
    breaks: list[int] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    later: "Page | None" = None  # takes its place after the first GET


class WebServer:
    """asked: method, path and range of each request."""

    def __init__(self) -> None:
        self.pages: dict[str, Page] = {}
        self.asked: list[tuple[str, str, str | None]] = []
        served = self

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                served.answer(self)

            do_HEAD = do_GET

            def log_message(self, *words) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path, headers = request.path.partition("?")[0], request.headers
        self.asked.append((request.command, path, headers.get("Range")))
        page = self.pages.get(path)
        if page is None:
            return self._end(request, 404)
        if page.statuses and (status := page.statuses.pop(0)) != 200:
            return self._end(request, status)
        if request.command == "HEAD":
            return self._end(request, 200, page, page.content)
        if page.later is not None:
            self.pages[path] = page.later
        part, status, more = page.content, 200, {}
        if page.has_ranges and (given := _range(headers)):
            first, last = given[0], min(given[1], len(page.content) - 1)
            part, status = page.content[first : last + 1], 206
            more = {"Content-Range": f"bytes {first}-{last}/{len(page.content)}"}
        cut = page.breaks.pop(0) if page.breaks else None
        return self._end(request, status, page, part, more, cut)

    def _end(self, request, status, page=None, part=b"", more=None, cut=None) -> None:
        request.send_response(status)
        for name, value in ((page.headers if page else {}) | (more or {})).items():
            request.send_header(name, value)
        if page is not None and page.version:
            request.send_header("ETag", f'"{page.version}"')
        if page is not None:
            request.send_header("Accept-Ranges", "bytes" if page.has_ranges else "none")
        request.send_header("Content-Length", str(len(part)))
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(part[:cut])
        if cut is not None:
            request.close_connection = True


def _range(headers: Message) -> tuple[int, int] | None:
    found = re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("Range") or "")
    return (int(found[1]), int(found[2])) if found else None
