"""A small server that speaks the Hugging Face Hub's protocol, for the real huggingface_hub client to talk to.

A test sets the repositories, who may read them, which requests fail (`faults`), and which wait for each other (`gates`,
by method and last part of the path), and what answers say instead of the truth (`lies`: by the names of headers,
sha or lfs_oid). The server records all requests and the bytes it sent.
As on the Hub, large files are served by a redirect to another host (here the same server under another name).
Protocol: https://huggingface.co/docs/hub/api, and the headers that huggingface_hub names in its `constants`.
"""

import hashlib
import json
import os
import re
import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = 10_000  # bytes; files of this size or more are served by the other host
ASKED_ONCE_A_DAY = "/api/agent-harnesses"  # a request that the client sends once, in whichever test runs first
INVALID, UNKNOWN = "Invalid credentials in Authorization header", "Invalid username or password."


@dataclass
class Repository:
    """commits: hash → path → content. refs: branch or tag → hash. readers: tokens with access if gated or private."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False
    readers: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    token: str | None
    range: str | None


@dataclass(frozen=True)
class Fault:
    """Makes one request fail: with `status`, or by closing the connection after `cut` bytes of the body.

    reset: close by a TCP reset instead of an orderly end.
    """

    method: str
    path: str
    status: int = 0
    cut: int = -1
    reset: bool = False


class HubServer(ThreadingHTTPServer):
    """Serves on a free port until `stop`."""

    daemon_threads = True
    users = frozenset({"a-token", "another-token"})

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[str, Repository] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[Request] = []
        self.sent: dict[str, int] = {}
        self.faults: list[Fault] = []
        self.lies: dict[str, str] = {}
        self.gates: dict[tuple[str, str], threading.Barrier] = {}
        self.connections: list[socket.socket] = []
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()

    def process_request(self, request, client_address) -> None:
        self.connections.append(request)
        super().process_request(request, client_address)

    def stop(self) -> None:
        self.shutdown()
        self.server_close()
        self.thread.join()
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def add(self, name: str, files: Mapping[str, bytes], *refs: str, **access) -> str:
        """Adds a commit to a new or existing repository, sets `refs` (main) to it, and returns its hash."""
        repository = self.repositories.setdefault(name, Repository(**access))
        commit = hashlib.sha1(repr((name, sorted(files.items()))).encode()).hexdigest()
        repository.commits[commit] = dict(files)
        repository.refs |= dict.fromkeys(refs or ("main",), commit)
        self.blobs |= {etag(content): content for content in files.values()}
        return commit

    def spoil(self, method: str, path: str, times: int = 1, **how) -> None:
        """Makes the next `times` requests of this method with this end of the path fail."""
        self.faults += [Fault(method, path, **how)] * times

    def next_fault(self, method: str, path: str) -> Fault | None:
        with self.lock:
            fault = next((f for f in self.faults if f.method == method and path.endswith(f.path)), None)
            if fault:
                self.faults.remove(fault)
            return fault

    def asked(self, method: str, path: str = "") -> list[Request]:
        return [request for request in self.requests if request.method == method and path in request.path]

    def bytes_sent(self, content: bytes) -> int:
        """Bytes of a file's body sent over all requests, at any path."""
        return self.sent.get(etag(content), 0)


class Handler(BaseHTTPRequestHandler):
    """Routes: /api/models/NAME/revision/REV, /api/models/NAME/tree/REV, /NAME/resolve/REV/PATH, /cdn/ETAG."""

    protocol_version = "HTTP/1.1"
    server: HubServer

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        authorization = self.headers.get("Authorization")
        self.token = authorization.removeprefix("Bearer ") if authorization else None
        if url.path != ASKED_ONCE_A_DAY:
            self.server.requests.append(Request(self.command, unquote(url.path), self.token, self.headers.get("Range")))
        self.fault = self.server.next_fault(self.command, unquote(url.path))
        if gate := self.server.gates.get((self.command, url.path.rpartition("/")[2])):
            gate.wait()
        if self.fault and self.fault.status:
            return self.refuse(self.fault.status, "", "spoiled")
        api = re.fullmatch(r"/api/models/(.+)/(revision|tree)/([^/]+)/?", url.path)
        if api:
            name, what, revision = api.groups()
            if self.may_see(name) and (commit := self.commit_of(name, unquote(revision))):
                recursive = parse_qs(url.query).get("recursive") in (["true"], ["True"])
                self.answer_json(self.info(name, commit) if what == "revision" else self.tree(name, commit, recursive))
            return None
        resolve = re.fullmatch(r"/(.+)/resolve/([^/]+)/(.+)", url.path)
        if resolve:
            name, revision, path = map(unquote, resolve.groups())
            if self.may_see(name) and self.may_read(name) and (commit := self.commit_of(name, revision)):
                self.answer_file(name, commit, path)
            return None
        cdn = re.fullmatch(r"/cdn/(\w+)", url.path)
        if cdn and cdn[1] in self.server.blobs:
            return self.answer_content(self.server.blobs[cdn[1]])
        return self.refuse(404, "", "no such page")

    do_HEAD = do_GET

    def may_see(self, name: str) -> bool:
        if self.token and self.token not in self.server.users:
            return self.refuse(401, "", INVALID)
        repository = self.server.repositories.get(name)
        if repository is None or (repository.private and self.token not in repository.readers):
            return (
                self.refuse(404, "RepoNotFound", "Repository not found")
                if self.token
                else self.refuse(401, "", UNKNOWN)
            )
        return True

    def may_read(self, name: str) -> bool:
        repository = self.server.repositories[name]
        if not repository.gated or self.token in repository.readers:
            return True
        message = f"Access to model {name} is restricted."
        return self.refuse(403 if self.token else 401, "GatedRepo", message)

    def commit_of(self, name: str, revision: str) -> str | None:
        repository = self.server.repositories[name]
        commit = repository.refs.get(revision, revision)
        if commit in repository.commits:
            return commit
        self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return None

    def info(self, name: str, commit: str) -> dict:
        repository = self.server.repositories[name]
        siblings = [{"rfilename": path} for path in repository.commits[commit]]
        access = {"private": repository.private, "gated": "manual" if repository.gated else False}
        sha = self.server.lies.get("sha", commit)
        return {"id": name, "modelId": name, "sha": sha, "siblings": siblings, "tags": [], **access}

    def tree(self, name: str, commit: str, recursive: bool) -> list[dict]:
        files = self.server.repositories[name].commits[commit]
        folders = {path.partition("/")[0] for path in files if "/" in path}
        entries = [entry(path, content) for path, content in files.items() if recursive or "/" not in path]
        for found in entries:
            if "lfs" in found and "lfs_oid" in self.server.lies:
                found |= {"lfs": {**found["lfs"], "oid": self.server.lies["lfs_oid"]}, "xetHash": "0" * 64}
        return entries + [{"type": "directory", "path": folder, "oid": "0" * 40} for folder in sorted(folders)]

    def answer_json(self, value) -> None:
        self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def answer_file(self, name: str, commit: str, path: str) -> None:
        content = self.server.repositories[name].commits[commit].get(path)
        if content is None:
            return self.refuse(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
        headers = {"X-Repo-Commit": commit}
        if len(content) < LARGE:
            return self.answer_content(content, headers)
        headers |= {"X-Linked-Size": str(len(content)), "X-Linked-Etag": f'"{etag(content)}"'}
        location = f"http://localhost:{self.server.server_port}/cdn/{etag(content)}"
        return self.answer(302, b"", headers | {"Location": location})

    def answer_content(self, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        headers = {"ETag": f'"{etag(content)}"', "Accept-Ranges": "bytes", **(headers or {})}
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if not wanted:
            return self.answer(200, content, headers, of=etag(content))
        begin = int(wanted[1])
        headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        return self.answer(206, content[begin:], headers, of=etag(content))

    def answer(self, status: int, body: bytes, headers: Mapping[str, str], of: str = "") -> None:
        """Sends a reply. of: the file whose body this is, for the byte count; a fault may truncate it."""
        self.send_response(status)
        lies = {key: self.server.lies[key] for key in headers if key in self.server.lies}
        for key, value in {**headers, **lies, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.fault and self.fault.cut >= 0:
            body = body[: self.fault.cut]
            self.close_connection = True
        with suppress(ConnectionError):
            self.wfile.write(body)
            self.wfile.flush()
        with self.server.lock:
            self.server.sent[of] = self.server.sent.get(of, 0) + len(body)
        if self.fault and self.fault.reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(self.connection.detach())

    def refuse(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> bool:
        errors = {"X-Error-Code": code, "X-Error-Message": message}
        self.answer(status, b"", {**(headers or {}), **{key: value for key, value in errors.items() if value}})
        return False

    def log_message(self, *args) -> None:
        pass


def etag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def entry(path: str, content: bytes) -> dict:
    linked = {"lfs": {"oid": etag(content), "size": len(content), "pointerSize": 134}} if len(content) >= LARGE else {}
    return {"type": "file", "path": path, "oid": hashlib.sha1(content).hexdigest(), "size": len(content), **linked}
