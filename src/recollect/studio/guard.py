"""Who may ask, and what every answer carries. In front of all addresses.

A page from elsewhere must not use the studio through a visitor's browser: the Host of a request is an address, localhost or
the name the studio was started with (so that a name that was pointed here later is refused), and what changes anything comes
from the studio's own page or from no page.
"""

import ipaddress
import re
import secrets
from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from recollect.studio.uploads import MOST_BYTES

COOKIE = "recollect-studio"
TOO_LARGE = f"the upload is too large: at most {MOST_BYTES // 2**20} MB"
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


def problem(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Every error is answered like this: one line."""
    line = " ".join(message.split())[:500].encode("utf-8", "replace").decode()
    return JSONResponse({"error": line}, status, headers)


class Guard:
    """ASGI middleware: checks Host, Origin and the size of bodies, names the client, adds headers."""

    def __init__(self, app: ASGIApp, host: str):
        self.app, self.names = app, {"localhost", host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        request = Request(scope)
        client = request.cookies.get(COOKIE, "")  # the name that an earlier answer gave to it
        is_named = re.fullmatch(r"[0-9a-f]{32}", client) is not None
        address = request.client.host if request.client else "nobody"
        request.state.client = client if is_named else address

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                if not is_named:
                    headers.append("Set-Cookie", f"{COOKIE}={secrets.token_hex(16)}; Path=/; HttpOnly; SameSite=Strict")
            await send(message)

        await (self._refusal(request) or self.app)(scope, _limited(receive), sending)

    def _refusal(self, request: Request) -> JSONResponse | None:
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        try:
            name = urlsplit(f"//{host}").hostname or ""
            if name not in self.names:
                ipaddress.ip_address(name)
        except ValueError:
            return problem(400, "this studio does not answer to that name: open it by its address, or as localhost")
        is_foreign = origin is not None and origin.partition("://")[2].lower() != host.lower()
        if is_foreign and request.method not in ("GET", "HEAD", "OPTIONS"):
            return problem(403, "this request comes from another page: use the studio's own")
        length = request.headers.get("content-length", "0")
        is_number = length.isdecimal() and len(length) <= 15
        return None if is_number and int(length) <= MOST_BYTES else problem(413, TOO_LARGE)


def _limited(receive: Receive) -> Receive:
    """A body that does not say how long it is ends in an error once it is too long."""
    total = 0

    async def limited() -> Message:
        nonlocal total
        message = await receive()
        total += len(message.get("body", b""))
        if total > MOST_BYTES:
            raise HTTPException(413, TOO_LARGE)
        return message

    return limited
