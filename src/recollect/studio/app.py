"""The addresses of the studio. Each checks what it is asked for, and calls the shelf or the trainings."""

import asyncio
import base64
import json
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import anyio
import anyio.to_thread
import torch
import uvicorn
from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi import Path as InPath
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from recollect.classifier import Classifier, read_picture
from recollect.data.images import Images
from recollect.errors import RecollectError
from recollect.show import terminal
from recollect.studio.guard import Guard, problem
from recollect.studio.jobs import Busy, Job, Jobs, Order, python_lines
from recollect.studio.shelf import Entry, Missing, Shelf, png, stock
from recollect.studio.uploads import MOST_BYTES, MOST_PIXELS, picture

STATIC = Path(__file__).parent / "static"
MOST_CLASSES = 1000  # in one classifier
BEAT = 0.1  # seconds between looks at a training that is watched
QUIET = 10.0  # seconds after which a stream without news says that it lives

Number = Annotated[int, InPath(ge=0, le=10**6)]
Chosen = Annotated[str, Field(pattern=r"^[0-9]{1,6}:[0-9]{1,6}$", description="memory:label", examples=["0:3"])]
Networks = Literal["memory", "small"]
Epochs = Annotated[int, Field(ge=1, le=2000)]
Seed = Annotated[int, Field(ge=0, le=2**31)]


class Coefficients(BaseModel):
    """One for each base."""

    model_config = ConfigDict(extra="forbid")
    coefficients: Annotated[
        list[Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]], Field(min_length=1, max_length=2**17)
    ]


class Training(BaseModel):
    """What to train: classes of memories on the shelf, and how."""

    model_config = ConfigDict(extra="forbid")
    classes: Annotated[list[Chosen], Field(min_length=2, max_length=MOST_CLASSES)]
    network: Networks = "memory"
    epochs: Epochs | None = None
    seed: Seed = 0


class Problem(BaseModel):
    """How every error is answered."""

    error: str


def _training(
    classes: Annotated[list[Chosen], Query(min_length=2, max_length=MOST_CLASSES)],
    network: Networks = "memory",
    epochs: Annotated[Epochs | None, Query()] = None,
    seed: Annotated[Seed, Query()] = 0,
) -> Training:
    """The same in an address."""
    return Training(classes=classes, network=network, epochs=epochs, seed=seed)


Asked = Annotated[Training, Depends(_training)]


def _order(training: Training) -> Order:
    choices = tuple((int(memory), int(label)) for memory, label in (text.split(":") for text in training.classes))
    return Order(choices, training.network == "small", training.epochs, training.seed)


def _file(media: str) -> dict[int | str, dict[str, Any]]:
    """For the description: this address answers with a file of this kind."""
    return {200: {"content": {media: {"schema": {"type": "string", "format": "binary"}}}}}


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": what}
    for status, what in {
        400: "it cannot be done, and why",
        403: "another page asks",
        404: "not there",
        409: "not yet",
        413: "too large",
        422: "not understood",
        429: "too many",
    }.items()
}
BODY = {
    "requestBody": {"required": True, "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
}


def create_app(shelf: Shelf, host: str = "127.0.0.1") -> FastAPI:
    """The studio of these memories, as an ASGI application."""
    jobs = Jobs(shelf)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        jobs.close()

    app = FastAPI(title="recollect studio", docs_url=None, redoc_url=None, lifespan=lifespan, responses=ERRORS)
    app.state.jobs = jobs
    app.add_middleware(Guard, host=host)
    _errors(app)
    _memories(app, shelf)
    _trainings(app, shelf, jobs)
    _results(app, jobs)
    _page(app)
    return app


def _errors(app: FastAPI) -> None:
    """Whatever goes wrong is answered with one line."""
    statuses: dict[type, int] = {Missing: 404, Busy: 429}

    async def refused(_: Request, error: Exception) -> JSONResponse:
        return problem(statuses.get(type(error), 400), str(error))

    async def invalid(_: Request, error: Exception) -> JSONResponse:
        first = error.errors()[0] if isinstance(error, RequestValidationError) else {"loc": (), "msg": "not understood"}
        where = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
        return problem(422, f"{where[:80] or 'the request'}: {first['msg']}")

    async def other(_: Request, error: Exception) -> JSONResponse:
        found = error if isinstance(error, HTTPException) else HTTPException(500)
        words = {404: "there is nothing at this address", 405: "this address does not do that"}
        plain = found.detail in ("Not Found", "Method Not Allowed")
        answer = problem(found.status_code, words[found.status_code] if plain else str(found.detail))
        answer.headers.update(found.headers or {})
        return answer

    async def broken(_: Request, error: Exception) -> JSONResponse:
        return problem(500, "the studio made a mistake: see its terminal")

    app.add_exception_handler(RecollectError, refused)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, other)
    app.add_exception_handler(Exception, broken)


def _page(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    def index() -> FileResponse:
        return FileResponse(STATIC / "index.html")

    app.mount("/static", StaticFiles(directory=STATIC))


def _memories(app: FastAPI, shelf: Shelf) -> None:
    """Looking at memories."""

    @app.get("/api/shelf")
    def show() -> dict[str, Any]:
        limits = {"bytes": MOST_BYTES, "pixels": MOST_PIXELS, "classes": MOST_CLASSES}
        data = [images.name for images in shelf.data]
        memories = [entry.to_json() for entry in shelf.entries]
        return {"memories": memories, "problems": shelf.problems, "data": data, "limits": limits}

    @app.get("/api/memories/{number}/pictures", response_class=Response, responses=_file("application/octet-stream"))
    def pictures(number: Number) -> Response:
        """What each base adds to a picture, and last the picture of no base: float32 [K + 1, C, h, w]; sizes in headers."""
        found = shelf[number].pictures()
        shape = {"X-Shape": ",".join(map(str, found.shape))}
        return Response(found.contiguous().numpy().tobytes(), media_type="application/octet-stream", headers=shape)

    @app.get(
        "/api/memories/{number}/classes/{label}/coefficients",
        response_class=Response,
        responses=_file("application/octet-stream"),
    )
    def coefficients(number: Number, label: Number) -> Response:
        """What a class is recalled with: float32 [r, K]."""
        found = shelf[number].coefficients(label)
        return Response(found.contiguous().numpy().tobytes(), media_type="application/octet-stream")

    @app.post("/api/memories/{number}/recall", response_class=Response, responses=_file("image/png"))
    def recall(number: Number, mix: Coefficients) -> Response:
        """The picture that these coefficients recall."""
        entry: Entry = shelf[number]
        return Response(entry.recall(mix.coefficients), media_type="image/png")


def _trainings(app: FastAPI, shelf: Shelf, jobs: Jobs) -> None:
    """Ordering trainings and watching them."""
    one_by_one = anyio.CapacityLimiter(1)  # what may hold many images

    @app.get("/api/recalled.npz", response_class=Response, responses=_file("application/octet-stream"))
    async def recalled(training: Asked) -> Response:
        """The training set of some classes."""
        order = _order(training)
        data = await anyio.to_thread.run_sync(shelf.recalled, order.choices, limiter=one_by_one)
        return _download(data, "recalled.npz")

    @app.get("/api/lines.py", response_class=Response, responses=_file("text/plain"))
    async def lines(training: Asked) -> Response:
        """The Python that trains the same classifier."""
        text = await anyio.to_thread.run_sync(python_lines, shelf, _order(training), limiter=one_by_one)
        return Response(text.encode("utf-8", "replace"), media_type="text/plain")

    @app.post("/api/trainings", status_code=201)
    async def train(training: Training, request: Request) -> dict[str, Any]:
        """Put a training in the queue."""
        order = _order(training)
        composition = await anyio.to_thread.run_sync(shelf.compose, order.choices, limiter=one_by_one)
        _check_network(order.recipe(composition).network)
        return jobs.add(order, request.state.client).to_json()

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

    @app.get(
        "/api/trainings/{name}/events",
        response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
    )
    async def events(name: str) -> StreamingResponse:
        """How it goes, as server-sent events until it is finished."""
        return StreamingResponse(_events(jobs[name]), media_type="text/event-stream")


def _check_network(network: str) -> None:
    if network.startswith("custom "):
        raise RecollectError(f"the memory's own network ({network}) was given in Python: choose another one")


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
        if news["state"] in ("done", "failed", "cancelled"):
            return
        await asyncio.sleep(BEAT)


def _results(app: FastAPI, jobs: Jobs) -> None:
    """Using what was trained."""
    few = anyio.CapacityLimiter(2)  # pictures decoded at a time

    @app.post("/api/trainings/{name}/classify", openapi_extra=BODY)
    async def classify(name: str, request: Request) -> dict[str, Any]:
        """What the classifier says of a picture: its bytes are the body."""
        classifier = _classifier(jobs[name])
        return await anyio.to_thread.run_sync(_classified, classifier, await request.body(), limiter=few)

    @app.get("/api/trainings/{name}/classifier.safetensors", response_class=Response, responses=_file("application/octet-stream"))
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
    pixels, notice = read_picture(picture(data), classifier.image_shape)
    shares = classifier.probabilities(pixels[None])[0]
    return {
        "class_name": classifier.class_names[int(shares.argmax())],
        "probabilities": shares.tolist(),
        "notice": notice,
        "seen": "data:image/png;base64," + base64.b64encode(png(pixels)).decode(),
    }


def _download(data: bytes, name: str) -> Response:
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(data, media_type="application/octet-stream", headers=headers)


def serve(memories: Sequence[Path], data: Sequence[Images], host: str, port: int) -> None:
    """Answer until Ctrl-C."""
    torch.set_num_threads(1)  # the rest of the machine is for answering
    app = create_app(stock(memories, data), host)
    listening = listen(host, port)
    address = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}/"
    terminal.say(f"studio at {address} (Ctrl-C ends it)")
    if host not in ("127.0.0.1", "::1", "localhost"):
        terminal.say("it is not on loopback: whoever reaches this machine can use it")
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
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, limit_concurrency=128, timeout_graceful_shutdown=1, server_header=False
    )
    return uvicorn.Server(config)
