"""The addresses of the studio. Each checks what it is asked for, and calls the shelf or the trainings."""

import asyncio
import base64
import json
import secrets
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import torch
import uvicorn
from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Query, Request, Response
from fastapi import Path as InPath
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from recollect.classifier import Classifier, read_picture
from recollect.data.images import Images
from recollect.errors import RecollectError
from recollect.show import terminal
from recollect.show.pictures import png
from recollect.studio.guard import Guard, Patient, is_loopback, problem
from recollect.studio.jobs import FINISHED, MOST_CLASSES, Busy, Job, Jobs, Order, python_lines
from recollect.studio.shelf import Missing, Shelf, stock
from recollect.studio.uploads import MOST_BYTES, MOST_PIXELS, picture

STATIC = Path(__file__).parent / "static"
BEAT = 0.1  # seconds between looks at a training that is watched
QUIET = 10.0  # seconds after which a stream without news says that it lives

Number = Annotated[int, InPath(ge=0, le=10**6)]
Coefficient = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]


class Coefficients(BaseModel):
    """One for each base."""

    model_config = ConfigDict(extra="forbid")
    coefficients: Annotated[list[Coefficient], Field(min_length=1, max_length=2**17)]


class Problem(BaseModel):
    """How every error is answered."""

    error: str


ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "it cannot be done, and why", "model": Problem},
    403: {"description": "another page asks, or somebody without the token", "model": Problem},
    404: {"description": "not there", "model": Problem},
    409: {"description": "not yet", "model": Problem},
    413: {"description": "too large", "model": Problem},
    422: {"description": "not understood", "model": Problem},
    429: {"description": "too many", "model": Problem},
}
BINARY = {"type": "string", "format": "binary"}
PICTURE = {"requestBody": {"required": True, "content": {"application/octet-stream": {"schema": BINARY}}}}


def _file(media: str, schema: dict[str, str] = BINARY) -> dict[str, Any]:
    """For the description: an address that answers with a file of this kind."""
    return {"response_class": Response, "responses": {200: {"content": {media: {"schema": schema}}}}}


class Plain(JSONResponse):
    """JSON of ASCII: what files call things may hold half characters, which UTF-8 does not have."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def create_app(shelf: Shelf, host: str = "127.0.0.1", token: str | None = None) -> FastAPI:
    """The studio of these memories, as an ASGI application; with a token, for those alone who have it."""
    jobs = Jobs(shelf)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        jobs.close()

    app = FastAPI(
        title="recollect studio", docs_url=None, redoc_url=None, lifespan=lifespan, responses=ERRORS, default_response_class=Plain
    )
    app.state.jobs = jobs
    app.add_middleware(Guard, host=host, token=token)
    _errors(app, shelf)
    _memories(app, shelf)
    _trainings(app, shelf, jobs)
    _results(app, jobs)
    app.mount("/static", StaticFiles(directory=STATIC))

    @app.get("/", include_in_schema=False)
    def index() -> FileResponse:
        return FileResponse(STATIC / "index.html")

    return app


def _errors(app: FastAPI, shelf: Shelf) -> None:
    """Whatever goes wrong is answered with one line."""

    @app.exception_handler(RecollectError)
    async def refused(_: Request, error: RecollectError) -> JSONResponse:
        return problem({Missing: 404, Busy: 429}.get(type(error), 400), shelf.without_paths(str(error)))

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, error: ClientDisconnect) -> JSONResponse:
        return problem(400, "the request ended before its body did")

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
        return problem(422, f"{where[:80] or 'the request'}: {first['msg']}")

    @app.exception_handler(HTTPException)
    async def other(_: Request, error: HTTPException) -> JSONResponse:
        words = {"Not Found": "there is nothing at this address", "Method Not Allowed": "this address does not do that"}
        return problem(error.status_code, words.get(error.detail, error.detail), error.headers)

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> JSONResponse:
        return problem(500, "the studio made a mistake: see its terminal")


def _memories(app: FastAPI, shelf: Shelf) -> None:

    @app.get("/api/shelf")
    def show() -> dict[str, Any]:
        return {
            "memories": [entry.to_json() for entry in shelf.entries],
            "problems": list(map(shelf.without_paths, shelf.problems)),
            "data": [images.name for images in shelf.data],
            "limits": {"bytes": MOST_BYTES, "pixels": MOST_PIXELS, "classes": MOST_CLASSES},
        }

    @app.get("/api/memories/{number}/pictures", **_file("application/octet-stream"))
    def pictures(number: Number) -> Response:
        """What each base adds to a picture, and last the picture of no base: float32 [K + 1, C, h, w]; sizes in headers."""
        found = shelf[number].pictures()
        return _octets(found.numpy().tobytes(), {"X-Shape": ",".join(map(str, found.shape))})

    @app.get("/api/memories/{number}/classes/{label}/coefficients", **_file("application/octet-stream"))
    def coefficients(number: Number, label: Number) -> Response:
        """What a class is recalled with: float32 [r, K]."""
        return _octets(shelf[number].coefficients(label).numpy().tobytes())

    @app.post("/api/memories/{number}/recall", **_file("image/png"))
    def recall(number: Number, mix: Coefficients) -> Response:
        """The picture that these coefficients recall."""
        return Response(shelf[number].recall(mix.coefficients), media_type="image/png")


def _trainings(app: FastAPI, shelf: Shelf, jobs: Jobs) -> None:
    one_by_one = CapacityLimiter(1)  # what may hold many images

    @app.get("/api/recalled.npz", **_file("application/octet-stream"))
    async def recalled(order: Annotated[Order, Query()]) -> Response:
        """The training set of some classes."""
        data = await to_thread.run_sync(shelf.recalled, order.choices, limiter=one_by_one)
        return _download(data, "recalled.npz")

    @app.get("/api/lines.py", **_file("text/plain"))
    async def lines(order: Annotated[Order, Query()]) -> Response:
        """The Python that trains the same classifier."""
        text = await to_thread.run_sync(python_lines, shelf, order, limiter=one_by_one)
        return PlainTextResponse(text.encode("utf-8", "replace"))

    @app.post("/api/trainings", status_code=201)
    async def train(order: Order, request: Request) -> dict[str, Any]:
        """Put a training in the queue."""
        composition = await to_thread.run_sync(shelf.compose, order.choices, limiter=one_by_one)
        network = order.recipe(composition).network
        if network.startswith("custom "):
            raise RecollectError(f"the memory's own network ({network}) was given in Python: choose another one")
        return jobs.add(order, request.state.client, request.state.address).to_json()

    @app.get("/api/trainings")
    def mine(request: Request) -> list[dict[str, Any]]:
        """This client's trainings, the newest last."""
        return [job.to_json() for job in jobs.of(request.state.client)]

    @app.get("/api/trainings/{name}")
    def one(name: str) -> dict[str, Any]:
        return jobs[name].to_json()

    @app.delete("/api/trainings/{name}")
    def cancel(name: str) -> dict[str, Any]:
        """Stop it, or take it out of the queue; of a finished one nothing changes."""
        jobs.cancel(jobs[name])
        return jobs[name].to_json()

    @app.get("/api/trainings/{name}/events", **_file("text/event-stream", {"type": "string"}))
    async def events(name: str) -> Response:
        """How it goes, as server-sent events until it is finished."""
        return StreamingResponse(_events(jobs[name]), media_type="text/event-stream")


async def _events(job: Job) -> AsyncIterator[str]:
    known, last, told = 0, None, time.monotonic()
    while True:
        news = job.to_json(known)
        seen = (news["state"], news["epoch"])
        if seen != last:
            yield f"data: {json.dumps(news)}\n\n"
            known, last, told = known + len(news["losses"]), seen, time.monotonic()
        elif time.monotonic() - told > QUIET:
            yield ": still here\n\n"
            told = time.monotonic()
        if news["state"] in FINISHED:
            return
        await asyncio.sleep(BEAT)


def _results(app: FastAPI, jobs: Jobs) -> None:
    few = CapacityLimiter(2)  # pictures decoded at a time

    @app.post("/api/trainings/{name}/classify", openapi_extra=PICTURE)
    async def classify(name: str, request: Request) -> dict[str, Any]:
        """What the classifier says of a picture: its bytes are the body."""
        classifier = _classifier(jobs[name])
        return await to_thread.run_sync(_classified, classifier, await request.body(), limiter=few)

    @app.get("/api/trainings/{name}/classifier.safetensors", **_file("application/octet-stream"))
    def download(name: str) -> Response:
        """The classifier as a file that recollect.Classifier.load reads."""
        classifier = _classifier(jobs[name])
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "classifier.safetensors"
            classifier.save(path)
            return _download(path.read_bytes(), path.name)


def _classifier(job: Job) -> Classifier:
    if job.state != "done" or job.classifier is None:
        raise HTTPException(409, f"this training is {job.state}: there is no classifier")
    return job.classifier


def _classified(classifier: Classifier, data: bytes) -> dict[str, Any]:
    pixels, notice = read_picture(picture(data), classifier.image_shape, classifier.preprocess.pictures)
    shares = classifier.probabilities(pixels[None])[0]
    return {
        "class_name": classifier.class_names[int(shares.argmax())],
        "probabilities": shares.tolist(),
        "notice": notice,
        "seen": "data:image/png;base64," + base64.b64encode(png(pixels[None])).decode(),
    }


def _octets(data: bytes, headers: Mapping[str, str] | None = None) -> Response:
    return Response(data, 200, headers, "application/octet-stream")


def _download(data: bytes, name: str) -> Response:
    return _octets(data, {"Content-Disposition": f'attachment; filename="{name}"'})


def serve(memories: Sequence[Path], data: Sequence[Images], host: str, port: int) -> None:
    """Answer until Ctrl-C."""
    torch.set_num_threads(1)  # the rest of the machine is for answering
    shelf, listening = stock(memories, data), listen(host, port)
    bound, port = listening.getsockname()[:2]
    token = None if is_loopback(bound) else secrets.token_urlsafe(24)
    app = create_app(shelf, host, token)
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}/{f'?token={token}' if token else ''}"
    terminal.say(f"studio at {address} (Ctrl-C ends it)")
    if token:
        terminal.say("others can reach it: whoever has this address, with its token, can use it")
    with suppress(KeyboardInterrupt):
        server(app).run(sockets=[listening])
    app.state.jobs.close()  # which a second Ctrl-C leaves out


def listen(host: str, port: int) -> socket.socket:
    """A socket at this address; port 0 is any that is free."""
    if not 0 <= port < 2**16:
        raise RecollectError(f"port {port} does not exist: give another --port, up to {2**16 - 1}")
    try:
        found = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or an answer's second packet waits for 40 ms
        return found
    except OSError as error:
        why = error.strerror or error
        raise RecollectError(f"cannot listen at {host}, port {port} ({why}): give another --port or --host") from None


def server(app: FastAPI) -> uvicorn.Server:
    """With limits of its own: connections, and seconds that open streams may delay an end."""
    options: dict[str, Any] = {"http": Patient, "ws": "none", "proxy_headers": False}  # a header must not name another address
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=1, server_header=False, **options
    )
    return uvicorn.Server(config)
