"""The board's server: Python's http.server, a thread per request, answers as JSON, as a file of the page, or as a
stream of events. What an address answers is in actions.py.

Requests are answered to the board's own page, on its own address, with its token where it has one. A page of another
site can make a browser send requests here. They are refused by what browsers say of them: Host (a name of another site
that leads here), Origin and Sec-Fetch-Site (a page of another site), and by the content type of posts, which no form of
another site can have.
"""

import hmac
import json
import math
import secrets
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from email.message import Message
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import PurePath
from typing import Any, NamedTuple
from urllib.parse import SplitResult, parse_qs, urlsplit

from ligermodels.errors import InputError, first_line

MAX_BODY_BYTES, MAX_STREAMS, SOCKET_SECONDS = 2**20, 64, 60
MAX_DEPTH = 20  # of a JSON value that is answered
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src "
    "'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin", "Cache-Control": "no-store", "X-Frame-Options": "DENY",
}  # fmt: skip


class Refusal(Exception):
    """A request that is not answered. status: of HTTP."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Access(NamedTuple):
    """Says where the board listens. token: None on this machine alone."""

    host: str
    port: int
    token: str | None

    @classmethod
    def at(cls, host: str, port: int) -> "Access":
        """Makes a new token for a host that other machines reach."""
        host = f"[{host}]" if ":" in host and not host.startswith("[") else host  # IPv6
        return cls(host, port, None if host in LOOPBACK else secrets.token_urlsafe(24))

    @property
    def address(self) -> str:
        """What a browser is given."""
        return f"http://{self.host}:{self.port}/" + (f"?token={self.token}" if self.token else "")

    @property
    def cookie(self) -> str:
        return f"ligermodels-board-{self.port}"

    def check(self, method: str, target: str, headers: Message) -> None:
        """Raises Refusal for a request that the board's own page, or a person at its address, would not send."""
        host = headers.get("Host", "")
        if self.token is None and host not in {f"{name}:{self.port}" for name in LOOPBACK}:
            raise Refusal(421, "the board is reached as 127.0.0.1 or localhost")
        if "Origin" in headers and headers["Origin"] != f"http://{host}":
            raise Refusal(403, "requests from other origins are refused")
        is_page = method == "GET" and split_target(target).path == "/"  # which a link may lead to
        if headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none") and not is_page:
            raise Refusal(403, "requests from other origins are refused")
        if method == "POST" and headers.get("Content-Type", "").partition(";")[0].strip() != "application/json":
            raise Refusal(415, "posts are JSON")
        if self.token is not None and not self.is_known(headers) and not self.has_token(target):
            raise Refusal(401, "open the address that the board has printed: it ends with a token")

    def has_token(self, target: str) -> bool:
        """Whether the page is opened with the token, which its address then loses for a cookie."""
        parts = split_target(target)
        given = parse_qs(parts.query).get("token", [""])[0]
        return self.token is not None and parts.path == "/" and same(given, self.token)

    def is_known(self, headers: Message) -> bool:
        """Whether the browser has the cookie."""
        try:
            cookies = SimpleCookie(headers.get("Cookie", ""))
        except CookieError:
            return False
        return self.token is not None and self.cookie in cookies and same(cookies[self.cookie].value, self.token)


def split_target(target: str) -> SplitResult:
    """The parts of the address that a request asks for. Raises Refusal for what is none, such as "http://["."""
    try:
        return urlsplit(target)
    except ValueError:
        raise Refusal(400, "this is no address") from None


def same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(errors="surrogateescape"), token.encode())


class PageRequest(NamedTuple):
    """query: the last value of each name. body: a JSON object, empty for GET."""

    query: Mapping[str, str]
    body: Mapping[str, Any]


class Encoded(NamedTuple):
    """An answer that is JSON already."""

    text: str


class Events(NamedTuple):
    """An answer in parts: each is sent when it is there, as a server-sent event. None keeps the connection alive."""

    parts: Iterator[Any]


Route = Callable[[PageRequest], Any]  # returns a JSON value, Encoded or Events


class Server(ThreadingHTTPServer):
    """routes: by method and path, such as ("GET", "/api/runs"). access.port may be 0, for any that is free."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, access: Access, routes: Mapping[tuple[str, str], Route]) -> None:
        if ":" in access.host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((access.host.strip("[]"), access.port), Handler)
        except (OSError, OverflowError, UnicodeError) as error:  # no such port, no such name
            reason = error.strerror if isinstance(error, OSError) else first_line(error).rstrip(".")
            raise InputError(
                f"--host {access.host} --port {access.port}: cannot listen there: {reason}; give another"
            ) from error
        self.access = access._replace(port=self.server_port)
        self.routes = dict(routes)
        self.page = page_files()
        self.streams = 0

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that leaves in the middle is no error."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "ligermodels", ""
    timeout = SOCKET_SECONDS

    def do_GET(self) -> None:
        self.answer("GET")

    def do_POST(self) -> None:
        self.answer("POST")

    def answer(self, method: str) -> None:
        try:
            access = self.server.access
            access.check(method, self.path, self.headers)
            if method == "GET" and access.has_token(self.path):
                cookie = f"{access.cookie}={access.token}; HttpOnly; SameSite=Strict; Path=/"
                self.send(303, b"", {"Location": "/", "Set-Cookie": cookie})
                return
            parts = split_target(self.path)
            if method == "GET" and parts.path in self.server.page:
                kind, content = self.server.page[parts.path]
                self.send(200, content, {"Content-Type": f"{kind}; charset=utf-8"})
                return
            route = self.server.routes.get((method, parts.path))
            if route is None:
                raise Refusal(404, "there is nothing at this address")
            query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
            answer = route(PageRequest(query, self.body() if method == "POST" else {}))
            if isinstance(answer, Events):
                self.send_events(answer.parts)
            else:
                self.send_json(200, answer)
        except Refusal as refusal:
            self.close_connection = True
            self.send_json(refusal.status, {"error": str(refusal)})
        except InputError as error:
            self.send_json(400, {"error": str(error)})
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        except Exception as error:
            self.send_json(500, {"error": f"{type(error).__name__}: {first_line(error)}"})
            raise

    def body(self) -> Mapping[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal() and len(length) < 12):
            raise Refusal(411, "a post has a Content-Length")
        if int(length) > MAX_BODY_BYTES:
            raise Refusal(413, f"a post has at most {MAX_BODY_BYTES:,} bytes")
        try:
            value = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            raise Refusal(400, "the post is not JSON") from None
        if not isinstance(value, dict):
            raise Refusal(400, "the post is not a JSON object")
        return value

    def send_json(self, status: int, value: Any) -> None:
        text = value.text if isinstance(value, Encoded) else json.dumps(clean(value), ensure_ascii=False)
        self.send(status, text.encode(errors="replace"), {"Content-Type": "application/json"})

    def send(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        self.send_headers(status, {**headers, "Content-Length": str(len(content))})
        self.wfile.write(content)

    def send_headers(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**PAGE_HEADERS, **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def send_events(self, parts: Iterator[Any]) -> None:
        """Sends parts until there are no more, or the browser leaves."""
        if self.server.streams >= MAX_STREAMS:
            raise Refusal(503, "too many pages are open")
        self.close_connection = True
        self.server.streams += 1
        try:
            self.send_headers(200, {"Content-Type": "text/event-stream"})
            for part in parts:
                text = ": \n\n" if part is None else f"data: {json.dumps(clean(part), ensure_ascii=False)}\n\n"
                self.wfile.write(text.encode(errors="replace"))
                self.wfile.flush()
        finally:
            self.server.streams -= 1
            with suppress(Exception):
                parts.close()  # type: ignore[attr-defined]  # of a generator

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not printed."""


def page_files() -> dict[str, tuple[str, bytes]]:
    """The files of the page by their addresses, with their types. They are all that is served from a disk."""
    static = files("ligermodels.board").joinpath("static").iterdir()
    types = ((file, MEDIA_TYPES.get(PurePath(file.name).suffix)) for file in static)
    found = {f"/{file.name}": (kind, file.read_bytes()) for file, kind in types if kind}
    return found | {"/": found["/index.html"]}


def clean(value: Any, depth: int = 0) -> Any:
    """A value as JSON can have it: numbers that are not finite, and what else it lacks, as their texts."""
    if depth > MAX_DEPTH:
        return "…"
    if isinstance(value, Mapping):
        return {str(key): clean(item, depth + 1) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [clean(item, depth + 1) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if isinstance(value, str | int | None) else str(value)


def listen(access: Access, routes: Mapping[tuple[str, str], Route], started: Callable[[str], Any]) -> None:
    """Answers requests until it is interrupted. started: gets the address."""
    with Server(access, routes) as server:
        started(server.access.address)
        with suppress(KeyboardInterrupt):
            server.serve_forever(poll_interval=0.2)
