"""Which requests the board answers: those of its own page, on its own address, with its token where it has one.

A page of another site can make a browser send requests here. They are refused by what browsers say of them: Host (a
name of another site that leads here), Origin and Sec-Fetch-Site (a page of another site), and by the content type of
posts, which no form of another site can have.
"""

import hmac
import secrets
from email.message import Message
from http.cookies import CookieError, SimpleCookie
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

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
        is_page = method == "GET" and urlsplit(target).path == "/"  # which a link may lead to
        if headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none") and not is_page:
            raise Refusal(403, "requests from other origins are refused")
        if method == "POST" and headers.get("Content-Type", "").partition(";")[0].strip() != "application/json":
            raise Refusal(415, "posts are JSON")
        if self.token is not None and not self.is_known(headers) and not self.has_token(target):
            raise Refusal(401, "open the address that the board has printed: it ends with a token")

    def has_token(self, target: str) -> bool:
        """Whether the page is opened with the token, which its address then loses for a cookie."""
        parts = urlsplit(target)
        given = parse_qs(parts.query).get("token", [""])[0]
        return self.token is not None and parts.path == "/" and same(given, self.token)

    def is_known(self, headers: Message) -> bool:
        """Whether the browser has the cookie."""
        try:
            cookies = SimpleCookie(headers.get("Cookie", ""))
        except CookieError:
            return False
        return self.token is not None and self.cookie in cookies and same(cookies[self.cookie].value, self.token)

    @property
    def set_cookie(self) -> str:
        return f"{self.cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/"


def same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(errors="surrogateescape"), token.encode())
