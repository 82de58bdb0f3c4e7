"""A board that answers in this process, folders for it, and requests as they come over the wire."""

import http.client
import json
import threading
from contextlib import contextmanager

from ligermodels.board.actions import Actions
from ligermodels.board.folders import open_folders
from ligermodels.board.runs import Library
from ligermodels.board.server import Access, Server


class Board:
    """host, port, token: where it listens. library, actions: what answers."""

    def __init__(self, server, library, actions):
        self.server, self.library, self.actions = server, library, actions
        self.port, self.token = server.access.port, server.access.token

    @property
    def address(self):
        return self.server.access.address

    def raw(self, method, path, body=None, **headers):
        """(status, headers, content) of a request with these headers alone, beside Host; `_` stands for `-`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        given = {"Host": f"127.0.0.1:{self.port}"} | {name.replace("_", "-"): value for name, value in headers.items()}
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        content = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        if content is not None:
            given.setdefault("Content-Length", str(len(content)))
        for name, value in given.items():
            connection.putheader(name, value)
        connection.endheaders(content)
        response = connection.getresponse()
        result = response.status, dict(response.getheaders()), response.read()
        connection.close()
        return result

    def get(self, path):
        status, _, content = self.raw("GET", path)
        assert status == 200, content
        return json.loads(content)

    def post(self, path, body):
        status, _, content = self.raw("POST", path, body, Content_Type="application/json")
        return status, json.loads(content) if content.startswith(b"{") else content.decode()

    def refused(self, path, body):
        status, answer = self.post(path, body)
        assert (status == 200) == (path == "/api/plan"), answer
        return answer["refused" if status == 200 else "error"]

    def summary(self, run, condition=lambda run: run["read"] == 1):
        """A run's summary as soon as it meets a condition."""
        for _ in range(10**6):
            found = self.library.runs.get(run)
            if found is not None and condition(found.summary()):
                return found.summary()
            version = self.library.version
            self.library.look_again()
            self.library.wait(version, 0.2)
        raise AssertionError(f"{run}: never; {found and found.summary()}")


@contextmanager
def serving(*folders, host="127.0.0.1"):
    opened = open_folders(folders)
    with (
        Library(opened[:1]) as library,
        Actions(library, opened) as actions,
        Server(Access.at(host, 0), actions.routes()) as server,
    ):
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield Board(server, library, actions)
        finally:
            server.shutdown()
            thread.join()


def write_run(folder, steps=5, settings='model = "qwen2"\nsteps = 5\n', status=None, lines=()):
    """The files of a run."""
    folder.mkdir(parents=True)
    records = [{"step": step, "loss": 4.0 / step, "grad_norm": 1.0} for step in range(1, steps + 1)]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(text + "".join(f"{line}\n" for line in lines))
    (folder / "train.toml").write_text(settings)
    if status is not None:
        (folder / "run.json").write_text(json.dumps(status))
    return folder
