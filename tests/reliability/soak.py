"""Hours of use in minutes: `make soak`, or `python tests/reliability/soak.py --clients 50 --minutes 10 30`.

First many clients ask `regard serve` for recordings and for text; then one process trains and generates over and over.
Memory and open handles are sampled all the while: after the first third they must stay flat, and nothing may fail.
"""

from __future__ import annotations

import argparse
import gc
import http.client
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

TOKEN = "soak"
GROWTH = 1.1  # memory and handles of the last third, relative to those of the second, at the most
TEXT = "The dog ran because it was scared. "


class Use(NamedTuple):
    """What a process holds: megabytes of memory, and open files, sockets and pipes."""

    memory: float
    handles: int


def measure_use(pid: int) -> Use:
    """Returns what a process holds now, from /proc."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return Use(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, len(os.listdir(f"/proc/{pid}/fd")))


def find_growth(samples: list[Use]) -> list[str]:
    """Returns what grew from the second third of the samples to the last."""
    third = len(samples) // 3
    if third == 0:
        return ["too few samples: give it more time"]
    wrong = []
    for name in Use._fields:
        before, after = (
            statistics.median(getattr(use, name) for use in part)
            for part in (samples[third : 2 * third], samples[2 * third :])
        )
        print(f"    {name:8} {before:10.1f} → {after:10.1f}", flush=True)
        if after > GROWTH * before:
            wrong.append(f"{name} grew from {before:.1f} to {after:.1f}")
    return wrong


def _small_model() -> Any:
    import torch

    from regard import GPT
    from regard.data.tokenizers import Bytes

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT.preset("nano", vocabulary=256, length=256)
    model.tokenizer = Bytes()
    return model


def _serve(port: Any) -> None:
    """Serves a small model on a free port, which it tells."""
    from regard.lens.models import RecordableModel
    from regard.lens.pages.server import SharedModel, serve
    from regard.lens.recording.regard_models import regard_card

    model = _small_model()
    shared = SharedModel(RecordableModel(model, model.tokenizer, regard_card(model, "soak")))
    serve(shared, 0, lambda address: port.put(int(address.split(":")[2].split("/")[0])), TOKEN)


def _be_a_client(port: int, number: int, until: float, answers: list[str]) -> None:
    """Asks for a recording or for text until the time is up, and keeps a line of each answer."""
    n = number
    while time.monotonic() < until:
        n += 1
        path, body = ("/record", {"text": TEXT * (1 + n % 5), "name": "a"})
        if n % 3 == 0:
            path, body = ("/generate", {"text": TEXT, "max_tokens": 1 + n % 40})
        try:
            line = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
            line.request("POST", path, json.dumps(body), headers)
            reply = line.getresponse()
            said = reply.read()
            answers.append("answered" if reply.status == 200 and said else f"status {reply.status}")
            line.close()
        except (TimeoutError, OSError, http.client.HTTPException) as error:
            answers.append(f"{type(error).__name__}: {error}")


def soak_server(clients: int, minutes: float) -> list[str]:
    """Returns what went wrong with a server that many clients ask at the same time."""
    context = multiprocessing.get_context("spawn")
    ports = context.Queue()
    process = context.Process(target=_serve, args=(ports,), daemon=True)
    process.start()
    port = ports.get(timeout=120)
    assert process.pid is not None
    answers: list[str] = []
    until = time.monotonic() + 60 * minutes
    threads = [
        threading.Thread(target=_be_a_client, args=(port, n, until, answers), daemon=True) for n in range(clients)
    ]
    for thread in threads:
        thread.start()
    samples = _sample_until(process.pid, until)
    for thread in threads:
        thread.join(150)
    alive = process.is_alive()
    process.terminate()
    # 503 says that the model is busy, which is an answer; the client asks again.
    counts = {line: answers.count(line) for line in sorted(set(answers))}
    print(f"    {counts}", flush=True)
    wrong = [f"{n} × {line}" for line, n in counts.items() if line not in ("answered", "status 503")]
    if not alive:
        wrong.append("the server ended")
    if not counts.get("answered"):
        wrong.append("nobody was answered")
    return wrong + find_growth(samples)


def _work(folder: str, until: float) -> None:
    """Trains a small model for some steps and lets it write, over and over."""
    import torch

    from regard.generate import generate
    from regard.models import load
    from regard.train.recipe import load as load_recipe
    from regard.train.stage import train

    torch.set_num_threads(1)
    text = Path(folder) / "text.txt"
    text.write_text(TEXT * 400, encoding="utf-8")
    sizes = ["model.layers=1", "model.width=32", "model.length=32", "train.steps=30", "train.batch=4"]
    n = 0
    while time.monotonic() < until:
        n += 1
        recipe = load_recipe("lm", [f"data.text={text}", "data.block=32", *sizes])
        run = train(recipe, Path(folder) / f"run-{n % 3}-{n}")
        model = load(run.path)
        generate(model, model.tokenizer.encode("The dog"), max_tokens=60)
        gc.collect()  # mapped files of a training that is over wait for the collector, which comes when it likes


def soak_training(minutes: float) -> list[str]:
    """Returns what went wrong with a process that trains and generates over and over."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        until = time.monotonic() + 60 * minutes
        process = context.Process(target=_work, args=(folder, until), daemon=True)
        process.start()
        assert process.pid is not None
        time.sleep(min(20, 20 * minutes))  # imports
        samples = _sample_until(process.pid, until)
        process.join(300)
        runs = len(list(Path(folder).glob("run-*")))
        print(f"    {runs} trainings", flush=True)
        wrong = []
        if process.exitcode != 0 or runs < 2:
            wrong.append(f"it ended with {process.exitcode} after {runs} trainings")
        return wrong + find_growth(samples)


def _sample_until(pid: int, until: float) -> list[Use]:
    samples = []
    while time.monotonic() < until:
        time.sleep(2)
        try:
            samples.append(measure_use(pid))
        except OSError:  # it has ended, which its exit code tells
            break
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--minutes", type=float, nargs=2, default=(10.0, 30.0), help="of the server, of training")
    given = parser.parse_args()
    kinds: dict[str, Callable[[], list[str]]] = {
        f"{given.clients} clients for {given.minutes[0]:g} minutes": lambda: soak_server(
            given.clients, given.minutes[0]
        ),
        f"training and generating for {given.minutes[1]:g} minutes": lambda: soak_training(given.minutes[1]),
    }
    failed = False
    for name, soak in kinds.items():
        print(name, flush=True)
        for line in soak():
            failed = True
            print(f"  ✗ {line}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
