"""Requests that the board's own page would not send: refused, whoever sends them."""

import http.client
import socket
import threading
import time

import pytest

from ligermodels.board import server
from ligermodels.errors import InputError
from tests.board.serving import serving, write_run

JSON = "application/json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folder")
    write_run(folder / "runs/one", status={"state": "finished"})
    (folder / "secret").mkdir()
    (folder / "secret/metrics.jsonl").write_text('{"step": 1, "loss": 42.0}\n')
    (folder / "secret/train.toml").write_text('model = "hidden"\n')
    (folder / "runs/link").symlink_to(folder / "secret")
    (folder / "runs/inner").mkdir()
    (folder / "runs/inner/metrics.jsonl").symlink_to(folder / "secret/metrics.jsonl")
    return folder


@pytest.fixture(scope="module")
def board(folder):
    with serving(folder / "runs") as board:
        board.summary("0:one")
        yield board


@pytest.mark.parametrize(
    "path",
    [
        *("/../secret/metrics.jsonl", "/%2e%2e/secret/metrics.jsonl", "//etc/passwd", "/static/../index.html"),
        *("/..%2f..%2fetc%2fpasswd", "/style.css/../../server.py", "/\\..\\secret", "http://127.0.0.1/etc/passwd"),
        *("/style.css%00.html", "/index.html/", "/.board/one.toml", "/one/metrics.jsonl", "/api", "/api/nothing"),
    ],
)
def test_no_path_reaches_the_file_system(board, path):
    status, _, content = board.raw("GET", path)
    assert status == 404 and b"nothing at this address" in content


@pytest.mark.parametrize("path", ["http://[", "//[", "http://[::1/api/run", "GET://]"])
def test_what_is_no_address_is_refused_without_a_traceback(board, capfd, path):
    with socket.create_connection(("127.0.0.1", board.port)) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{board.port}\r\n\r\n".encode())
        assert connection.recv(100).split()[1] in (b"400", b"404")
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("host, port", [("127.0.0.1", 99999), ("a" * 100, 0)])
def test_where_it_cannot_listen_it_says_so(host, port):
    with pytest.raises(InputError, match=f"--host {host} --port {port}: cannot listen there: .*; give another"):
        server.Server(server.Access.at(host, port), {})


@pytest.mark.parametrize("name", ["0:../secret", "../secret", "0:link", "0:inner/../../secret", "0:", "1:one", "/", ""])
@pytest.mark.parametrize("path", ["/api/run", "/api/samples", "/api/completions"])
def test_a_run_is_named_by_an_id_that_was_given_out(board, path, name):
    status, _, content = board.raw("GET", f"{path}?run={name}")
    assert status == 404 and b"no such run" in content


def test_links_out_of_the_folder_are_not_there(board):
    assert set(board.library.runs) == {"0:one"}
    assert board.get("/api/curves?runs=0:link%0A0:inner%0A0:../secret&names=loss") == {}


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (421, {"Host": "evil.example"}), (421, {"Host": "evil.example:80"}), (421, {"Host": ""}),
        (421, {"Host": "127.0.0.1.evil.example"}), (403, {"Origin": "http://evil.example"}), (403, {"Origin": "null"}),
        (403, {"Origin": "http://127.0.0.1:1"}), (403, {"Sec_Fetch_Site": "cross-site"}),
        (403, {"Sec_Fetch_Site": "same-site"}),
    ],
)  # fmt: skip
def test_requests_from_other_origins_are_refused(board, status, headers):
    for method, path, body in (("GET", "/api/run?run=0:one", None), ("POST", "/api/stop", {"run": "0:one"})):
        more = {"Content_Type": JSON} if body else {}
        assert board.raw(method, path, body, **more, **headers)[0] == status
    own = {"Origin": f"http://127.0.0.1:{board.port}", "Sec_Fetch_Site": "same-origin"}
    assert board.raw("GET", "/api/run?run=0:one", **own)[0] == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_a_post_that_a_form_of_another_site_can_send_is_refused(board, kind):
    assert board.raw("POST", "/api/start", {"name": "x", "settings": {}}, Content_Type=kind)[0] == 415


@pytest.mark.parametrize(
    ("status", "body", "headers"),
    [
        (400, b"no JSON", {}), (400, b"[1]", {}), (400, b"[" * 100_000, {}),
        (413, b"{}", {"Content_Length": "9999999999"}),
        (411, b"{}", {"Content_Length": "-1"}), (411, b"{}", {"Content_Length": "1e3"}), (400, b"\xff\xfe", {}),
    ],
)  # fmt: skip
def test_a_body_that_is_no_small_json_object_is_refused(board, status, body, headers):
    assert board.raw("POST", "/api/plan", body, Content_Type=JSON, **headers)[0] == status


@pytest.mark.parametrize("query", ["first=x", "last=nan", "first=inf", "points=1e99", "last=-1e300"])
def test_a_number_of_a_query_is_one(board, query):
    assert board.raw("GET", f"/api/curves?runs=0:one&names=loss&{query}")[0] == 400


def test_other_methods_are_refused(board):
    for method in ("PUT", "DELETE", "OPTIONS", "HEAD", "TRACE"):
        assert board.raw(method, "/api/run?run=0:one")[0] == 501


def test_every_answer_has_the_policy_that_runs_no_foreign_script(board):
    for path in ("/", "/app.js", "/style.css", "/api/run?run=0:one", "/nowhere"):
        headers = board.raw("GET", path)[1]
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff" and "frame-ancestors 'none'" in policy
        assert "Access-Control-Allow-Origin" not in headers
    assert board.raw("GET", "/chart.js")[1]["Content-Type"] == "text/javascript; charset=utf-8"


def test_the_page_refers_to_its_own_files_alone():
    for name, (_, content) in server.page_files().items():
        text = content.decode()
        assert "innerHTML" not in text and "eval(" not in text and "insertAdjacentHTML" not in text, name
        outside = text.replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in outside and "https://" not in outside and 'style="' not in text, name


def test_elsewhere_than_on_this_machine_a_token_is_needed(folder):
    with serving(folder / "runs", host="0.0.0.0") as board:
        assert board.token is not None and board.address.endswith(f"/?token={board.token}")
        for path in ("/", "/app.js", "/api/run?run=0:one", f"/api/run?run=0:one&token={board.token}", "/?token=x"):
            assert board.raw("GET", path)[0] == 401
        assert board.raw("POST", "/api/stop", {"run": "0:one"}, Content_Type=JSON)[0] == 401
        status, headers, _ = board.raw("GET", f"/?token={board.token}")
        assert status == 303 and headers["Location"] == "/"
        cookie = headers["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        known = {"Cookie": cookie.partition(";")[0], "Host": "my-machine:80"}
        assert board.raw("GET", "/api/run?run=0:one", **known)[0] == 200
        assert board.raw("GET", "/", Cookie="ligermodels-board-1=x; \x01")[0] == 401
        wrong = board.raw(
            "GET", "/", Cookie=f"ligermodels-board-{board.port}={board.token[:-1]}é".encode().decode("latin1")
        )
        assert wrong[0] == 401


def test_a_browser_that_leaves_or_says_nothing_keeps_no_thread_of_others_waiting(board, capfd):
    silent = socket.create_connection(("127.0.0.1", board.port))
    leaving = socket.create_connection(("127.0.0.1", board.port))
    leaving.sendall(b"POST /api/plan HTTP/1.1\r\nContent-Length: 1000\r\n\r\n{")
    leaving.close()
    assert board.raw("GET", "/")[0] == 200
    silent.close()
    assert "Traceback" not in capfd.readouterr().err


def test_only_so_many_streams_are_open_and_each_ends_with_the_board(board, monkeypatch):
    monkeypatch.setattr(server, "MAX_STREAMS", 1)
    connection = http.client.HTTPConnection("127.0.0.1", board.port)
    connection.request("GET", "/api/events", headers={"Host": f"127.0.0.1:{board.port}"})
    response = connection.getresponse()
    assert response.headers["Content-Type"] == "text/event-stream"
    line = response.readline()
    assert line.startswith(b"data: {") and b'"0:one"' in line and b"secret" not in line
    status, _, content = board.raw("GET", "/api/events")
    assert status == 503 and b"too many pages" in content
    response.close()
    connection.close()
    end = time.monotonic() + 600
    while board.server.streams and time.monotonic() < end:  # until the next write notices that the browser is gone
        board.library.notify([])
        threading.Event().wait(0.05)
    assert board.server.streams == 0
