"""The studio under load: recalls from this process for 20 seconds, while a training runs in the studio's.

    python experiments/studio_load.py [MEMORY] [--seconds 20] [--clients 4]

Prints requests a second and the 99th percentile, and writes them to results/studio-load.json. Every answer must be a
picture, and the page must go on answering; a slow or failed one is counted.
"""

import argparse
import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import quantiles
from typing import Any

from record import write

from recollect.runs import environment

ROOT = Path(__file__).parent.parent
MEMORY = ROOT / "tests" / "data" / "digits.safetensors"


class Client:
    """One connection that is kept, and the seconds that each answer took."""

    def __init__(self, port: int):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        self.cookie = ""

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json", "Cookie": self.cookie}
        self.connection.request(method, path, json.dumps(body) if body else None, headers)
        answer = self.connection.getresponse()
        self.cookie = (answer.getheader("Set-Cookie") or self.cookie).split(";")[0]
        return answer.status, answer.read()


def asking(port: int, until: float, method: str, path: str, body: Any, begins: bytes, took: list[float], bad: list[Any]):
    """Ask the same again and again."""
    client = Client(port)
    while time.perf_counter() < until:
        began = time.perf_counter()
        try:
            status, data = client.ask(method, path, body)
            if status != 200 or not data.startswith(begins):
                bad.append((path, status))
        except OSError as error:
            bad.append((path, str(error)))
        took.append(time.perf_counter() - began)


def train(port: int, until: float, epochs: list[int], classes: list[str]) -> None:
    """Keep a training under way; counts the epochs that were done."""
    client = Client(port)
    client.ask("GET", "/")
    order = {"classes": classes, "network": "small", "epochs": 2000}
    while time.perf_counter() < until:
        name = json.loads(client.ask("POST", "/api/trainings", order)[1])["id"]
        job = {"state": "waiting", "epoch": 0}
        while time.perf_counter() < until and job["state"] in ("waiting", "training", "testing"):
            time.sleep(0.2)
            job = json.loads(client.ask("GET", f"/api/trainings/{name}")[1])
        epochs.append(job["epoch"])
        client.ask("DELETE", f"/api/trainings/{name}")


def measure(port: int, seconds: float, clients: int) -> dict[str, Any]:
    client = Client(port)
    memory = json.loads(client.ask("GET", "/api/shelf")[1])["memories"][0]
    mix = {"coefficients": [0.1] * memory["bases"]}
    classes = [f"0:{label}" for label in range(len(memory["classes"]))]
    recalls: list[float] = []
    pages: list[float] = []
    bad: list[Any] = []
    epochs: list[int] = []
    until = time.perf_counter() + seconds
    recall = (port, until, "POST", "/api/memories/0/recall", mix, b"\x89PNG", recalls, bad)
    page = (port, until, "GET", "/", None, b"<!doctype html>", pages, bad)
    threads = [threading.Thread(target=train, args=(port, until, epochs, classes))]
    threads += [threading.Thread(target=asking, args=recall) for _ in range(clients)]
    threads += [threading.Thread(target=asking, args=page)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {
        "seconds": seconds,
        "clients": clients,
        "recalls a second": round(len(recalls) / seconds, 1),
        "recall, ms": {"median": percentile(recalls, 50), "99th percentile": percentile(recalls, 99)},
        "pages a second": round(len(pages) / seconds, 1),
        "page, ms": {"median": percentile(pages, 50), "99th percentile": percentile(pages, 99)},
        "errors": len(bad),
        "epochs trained meanwhile": sum(epochs),
    }


def percentile(values: list[float], which: int) -> float:
    return round(1000 * quantiles(values, n=100)[which - 1], 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("memory", nargs="?", type=Path, default=MEMORY)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--clients", type=int, default=4)
    given = parser.parse_args()
    command = [sys.executable, "-m", "recollect", "studio", str(given.memory), "--port", "0"]
    studio = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert studio.stdout is not None
        found = re.search(r":(\d+)/", studio.stdout.readline())
        assert found is not None
        figures = measure(int(found[1]), given.seconds, given.clients)
    finally:
        studio.terminate()
        studio.wait()
    load = round(os.getloadavg()[0], 1)  # of the last minute, this benchmark and whatever else ran
    figures |= {"memory": given.memory.name, "cores": os.cpu_count(), "load": load, "environment": environment()}
    write(ROOT / "results" / "studio-load.json", figures)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
