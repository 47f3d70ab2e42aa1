"""Who may ask, for how long, and what every answer carries. In front of all addresses.

A page from elsewhere must not use the studio through a visitor's browser: the Host of a request is an address, localhost or
the name the studio was started with (so that a name that was pointed here later is refused), and what changes anything comes
from the studio's own page or from no page. Where others reach the studio, they need its token.
"""

import hashlib
import ipaddress
import json
import re
import secrets
from asyncio import Transport
from collections.abc import Mapping
from itertools import count
from urllib.parse import urlsplit

import h11
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from recollect.studio.uploads import MOST_BYTES

COOKIE = "recollect-studio"
HEADER_SECONDS, BODY_SECONDS = 10.0, 60.0  # until all of a request's header is there, and then of its body
MOST_CONNECTIONS, MOST_OF_ADDRESS = 120, 32
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


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine reaches a host's address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """ASGI middleware: checks Host, Origin, the token and the size of bodies, names the client, adds headers."""

    def __init__(self, app: ASGIApp, host: str, token: str | None = None):
        self.app, self.names, self.token = app, {"localhost", host.lower()}, token
        self.ticket = f"{COOKIE}-{hashlib.sha256((token or '').encode()).hexdigest()[:8]}"
        """the cookie that stands for the token: another studio of the same host has another name for it"""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        request = Request(scope)
        client = request.cookies.get(COOKIE, "")  # the name that an earlier answer gave to it
        is_named = re.fullmatch(r"[0-9a-f]{32}", client) is not None
        address = request.client.host if request.client else "nobody"
        request.state.client, request.state.address = client if is_named else address, address

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                if not is_named:
                    headers.append("Set-Cookie", f"{COOKIE}={secrets.token_hex(16)}; Path=/; HttpOnly; SameSite=Strict")
            await send(message)

        await (self._refusal(request) or self._admission(request) or self.app)(scope, _limited(receive), sending)

    def _admission(self, request: Request) -> Response | None:
        """With a token, none but for those who have it: the address with it leads to the page, and leaves a cookie."""
        if self.token is None or _same(request.cookies.get(self.ticket, ""), self.token):
            return None
        if not _same(request.query_params.get("token", ""), self.token):
            return problem(403, "this studio asks for its token: open the address that its terminal shows")
        if request.url.path != "/" or request.method != "GET":
            return None
        answer = RedirectResponse("/", 303)
        answer.set_cookie(self.ticket, self.token, httponly=True, samesite="lax")
        return answer

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


def _same(one: str, other: str) -> bool:
    return secrets.compare_digest(one.encode("utf-8", "replace"), other.encode())


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


class Patient(H11Protocol):
    """A connection whose requests come in time, and that makes room for others of its address and of all.

    Of too many, the one that has been waited for longest is closed, so that silent ones keep nobody out.
    """

    _numbers = count()

    def connection_made(self, transport: Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self.number, self.deadline = next(self._numbers), None
        self._wait(HEADER_SECONDS)
        others = [each for each in self.connections if isinstance(each, Patient)]
        alike = [each for each in others if each.address == self.address]
        for group, most in ((alike, MOST_OF_ADDRESS), (others, MOST_CONNECTIONS)):
            if len(group) > most:
                self._make_room(group)
                break

    def _make_room(self, group: list["Patient"]) -> None:
        waited_for = [each for each in group if each is not self and each.is_waited_for]
        if waited_for:
            oldest = min(waited_for, key=lambda each: (each.conn.their_state is h11.SEND_BODY, each.number))
            self.connections.discard(oldest)
            oldest.transport.abort()
        else:
            body = json.dumps({"error": "too many connections: try again in a minute"}).encode()
            head = f"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
            self.transport.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            self.transport.close()

    @property
    def address(self) -> str:
        return self.client[0] if self.client else ""

    @property
    def is_waited_for(self) -> bool:
        """Whether it owes a request, or the rest of one."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def data_received(self, data: bytes) -> None:
        before = self.conn.their_state
        super().data_received(data)
        if not self.is_waited_for:
            self._wait(None)
        elif self.conn.their_state is h11.SEND_BODY and before is not h11.SEND_BODY:
            self._wait(BODY_SECONDS)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE:
            self._wait(HEADER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait(None)
        super().connection_lost(exc)

    def _wait(self, seconds: float | None) -> None:
        """For what is owed, so long; None: no longer."""
        if self.deadline:
            self.deadline.cancel()
        self.deadline = None if seconds is None else self.loop.call_later(seconds, self.transport.close)
