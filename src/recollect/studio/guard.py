"""Who may ask, and what every answer carries. In front of all addresses.

A page from elsewhere must not use the studio through a visitor's browser: the Host of a request is an address, localhost or
the name the studio was started with (so that a name that was pointed here later is refused), and what changes anything comes
from the studio's own page or from no page.
"""

import ipaddress
import re
import secrets
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from recollect.studio.uploads import MOST_BYTES

COOKIE = "recollect-studio"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def problem(status: int, message: str) -> JSONResponse:
    """Every error is answered like this: one line."""
    line = " ".join(message.split())[:500].encode("utf-8", "replace").decode()
    return JSONResponse({"error": line}, status)


class Guard:
    """ASGI middleware: checks Host, Origin and the size of bodies, names the client, adds headers."""

    def __init__(self, app: ASGIApp, host: str):
        self.app, self.names = app, {"localhost", host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        client = _client(headers.get("cookie", ""))
        scope["state"] = {**scope.get("state", {}), "client": client or _address(scope)}
        answer = self._refusal(scope["method"], headers)

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                out = MutableHeaders(raw=message["headers"])
                message["headers"] = out.raw
                for name, value in HEADERS.items():
                    out[name] = value
                if client is None:
                    cookie = f"{COOKIE}={secrets.token_hex(16)}; Path=/; HttpOnly; SameSite=Strict"
                    out.append("Set-Cookie", cookie)
            await send(message)

        await (answer or self.app)(scope, _limited(receive), sending)

    def _refusal(self, method: str, headers: Headers) -> JSONResponse | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_ours(host):
            return problem(400, "this studio does not answer to that name: open it by its address, or as localhost")
        if method not in ("GET", "HEAD", "OPTIONS") and origin is not None and urlsplit_host(origin) != host.lower():
            return problem(403, "this request comes from another page: use the studio's own")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 15 or int(length) > MOST_BYTES:
            return problem(413, f"the upload is too large: at most {MOST_BYTES // 2**20} MB")
        return None

    def _is_ours(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
            if name in self.names:
                return True
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def urlsplit_host(origin: str) -> str:
    """host:port of an Origin; nothing for "null" and nonsense"""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _client(cookies: str) -> str | None:
    """The name that an earlier answer gave to this client."""
    try:
        found = SimpleCookie(cookies).get(COOKIE)
    except CookieError:
        return None
    return found.value if found and re.fullmatch(r"[0-9a-f]{32}", found.value) else None


def _address(scope: Scope) -> str:
    """What stands for a client without one."""
    return str((scope.get("client") or ("nobody",))[0])


def _limited(receive: Receive) -> Receive:
    """A body that does not say how long it is ends in an error once it is too long."""
    total = 0

    async def limited() -> Message:
        nonlocal total
        message = await receive()
        total += len(message.get("body", b""))
        if total > MOST_BYTES:
            raise HTTPException(413, f"the upload is too large: at most {MOST_BYTES // 2**20} MB")
        return message

    return limited
