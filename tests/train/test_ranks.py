"""A process that ends while others train: they notice, they end, and the job goes on with its own run."""

import importlib.util
import socket
import subprocess
import sys
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
import torch.distributed as dist

from regard.errors import RunError
from regard.train import Run, watch
from regard.train.distributed import Process, peer_errors
from regard.train.rendezvous import ProcessError, _invite, _join, job_id
from regard.train.run import JOB, find_begun

ROOT = Path(__file__).parents[2]
CAMPAIGN = ROOT / "tests" / "reliability" / "ranks.py"
SCRIPT = ROOT / "examples" / "slurm.sh"
SETTINGS = {"recipe": "lm", "task": "lm", "train": {"steps": 3, "saving": {"log": ()}, "init": None}}


class Watcher:
    """Watches some peers by connections within this process; `lost` are those for which it would have ended."""

    def __init__(self, *ranks: int) -> None:
        self.stop = Event()
        self.lost: list[int] = []
        pairs = {rank: socket.socketpair() for rank in ranks}
        self.peers = {rank: pair[1] for rank, pair in pairs.items()}
        connections = {rank: pair[0] for rank, pair in pairs.items()}
        arguments = (connections, self.stop, self.lost.append, 0.2)
        self.thread = Thread(target=watch._watch, args=arguments)
        self.thread.start()

    def end(self) -> None:
        """Waits until the watch is over."""
        self.thread.join()
        for peer in self.peers.values():
            peer.close()


def test_rank_0_names_the_lost_rank_to_all_and_ends():
    watcher = Watcher(1, 2, 3)
    watcher.peers[2].close()
    assert watcher.peers[1].recv(64) == b"2"
    assert watcher.peers[3].recv(64) == b"2"
    watcher.end()
    assert watcher.lost == [2]


@pytest.mark.parametrize(("said", "lost"), [(b"5", 5), (b"", 0)], ids=["told by rank 0", "rank 0 itself"])
def test_others_end_with_the_rank_that_was_lost(said, lost):
    watcher = Watcher(0)
    watcher.peers[0].sendall(said)
    watcher.peers[0].close()
    watcher.end()
    assert watcher.lost == [lost]


def test_nobody_ends_for_a_peer_that_was_done():
    watcher = Watcher(1, 2)
    for peer in watcher.peers.values():
        peer.sendall(watch.DONE)
        peer.close()
    watcher.end()
    assert watcher.lost == []


def test_a_training_that_fails_by_itself_is_not_ended():
    """Its own message says more."""
    watcher = Watcher(1)
    watcher.peers[1].close()
    watcher.stop.set()
    watcher.end()
    assert watcher.lost == []


def test_a_stranger_is_not_let_in():
    server = watch._listen()
    address = ("localhost", server.getsockname()[1])
    token = b"t" * watch.TOKEN_BYTES
    clients = [socket.create_connection(address) for _ in range(3)]
    clients[0].sendall(b"x" * watch.TOKEN_BYTES + (1).to_bytes(4, "big"))
    for rank, client in enumerate(clients[1:], 1):
        client.sendall(token + rank.to_bytes(4, "big"))
    connections = watch._accept(server, token, world_size=3)
    ports = {rank: connection.getpeername()[1] for rank, connection in connections.items()}
    assert ports == {rank: client.getsockname()[1] for rank, client in enumerate(clients[1:], 1)}
    assert clients[0].recv(1) == b""
    for open_socket in (server, *clients, *connections.values()):
        open_socket.close()


SLEEPER = """
import sys, time, torch
from regard.train import watch
from regard.train.distributed import Process

watch.GRACE_S = 1.0
process = Process.from_environment()
process.init_group(torch.device("cpu"))
with watch.watch_peers(process):
    print("watching", flush=True)
    time.sleep(300)
"""


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 2])
def test_a_process_that_waits_elsewhere_is_ended_with_a_line(monkeypatch, killed):
    """As inside nccl, which notices nothing; started without torchrun, which would end it itself."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("WORLD_SIZE", "3")
    ranks = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        words = [sys.executable, "-c", SLEEPER]
        ranks.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    assert [process.stdout.readline() for process in ranks] == ["watching\n"] * 3
    ranks[killed].kill()
    for rank, process in enumerate(ranks):
        _, said = process.communicate(timeout=60)
        if rank != killed:
            assert said.splitlines()[-1].startswith(f"error: process {killed} has ended")
            assert process.returncode == 2


def test_a_lost_peer_is_one_line_and_other_errors_pass():
    place = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537]"
    said = f"{place} Read error [127.0.0.1]:59014: Connection reset by peer. This is typically caused by others. GLHF!"
    with pytest.raises(ProcessError) as caught, peer_errors():
        raise RuntimeError(said)
    expected = "another process has ended, see what it says (Read error [127.0.0.1]:59014: Connection reset by peer)"
    assert str(caught.value) == expected
    with pytest.raises(ProcessError, match=r"remote process exited"), peer_errors():
        raise dist.DistBackendError("NCCL error: remote process exited or there was a network error")
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied"), peer_errors():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)")
    with pytest.raises(torch.OutOfMemoryError), peer_errors():
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_an_attempt_meets_under_a_new_name_in_an_old_store():
    """The store still has the greetings and answers of processes that were killed."""
    store = dist.HashStore()
    for attempt in ("first", "second"):
        joined = {}

        def join(rank, joined=joined):
            joined[rank] = _join(store, rank)

        threads = [Thread(target=join, args=(rank,)) for rank in (1, 2)]
        main = Thread(target=_invite, args=(store, 3, attempt))
        main.start()  # before the others, so that it finds the old greetings
        for thread in threads:
            thread.start()
        for thread in (main, *threads):
            thread.join(30)
        assert joined == {1: attempt, 2: attempt}


def test_a_job_is_known_by_its_name(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert job_id() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    assert job_id() == "job-7"


def test_a_job_without_a_name_is_known_by_its_logs(monkeypatch):
    """torchrun calls every such job "none": two of them must not take each other's runs."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/tmp/torchelastic_a/none_b/attempt_1/0/error.json")
    assert job_id() == "none_b"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "")
    assert job_id() is None


def test_a_job_goes_on_with_its_own_run_only(tmp_path):
    run = Run.create(tmp_path / "run", SETTINGS | {JOB: "mine"})
    assert run.was_begun_as(SETTINGS | {JOB: "mine"})
    assert not run.was_begun_as(SETTINGS | {JOB: "another"})
    assert not run.was_begun_as(SETTINGS | {JOB: None})
    assert not run.was_begun_as(SETTINGS | {JOB: "mine", "task": "knowledge"})
    assert not Run(tmp_path / "none").was_begun_as(SETTINGS | {JOB: "mine"})
    with pytest.raises(RunError, match=r"holds results already"):
        Run.create(run.path, SETTINGS | {JOB: "another"})


def test_a_job_finds_its_run_where_the_folder_was_named_by_the_clock(tmp_path):
    for job, stamp in (("mine", 1), ("another", 2)):
        Run.create(tmp_path / f"knowledge-scratch-{stamp}", SETTINGS | {JOB: job})
    assert find_begun("knowledge/scratch", SETTINGS | {JOB: "mine"}, tmp_path) == tmp_path / "knowledge-scratch-1"
    assert find_begun("knowledge/scratch", SETTINGS | {JOB: "third"}, tmp_path) is None
    assert find_begun("knowledge/scratch", SETTINGS | {JOB: None}, tmp_path) is None


def test_one_process_watches_nobody():
    with watch.watch_peers(Process()):
        pass


SLURM = {
    "scontrol": 'echo "scontrol $*" >> said; [ "$1" != show ] || echo node-1',
    "scancel": 'echo "scancel $*" >> said; kill -TERM "$(cat step)"',
    "srun": 'echo "srun $*" >> said; echo $$ > step; trap "exit 130" TERM; kill -USR1 $PPID; sleep 20 & wait $!',
}


@pytest.mark.parametrize("finished", [False, True])
def test_the_slurm_script_requeues_what_is_not_finished(tmp_path, monkeypatch, finished):
    """With stand-ins for SLURM's commands: the signal comes as soon as the training has started."""
    for name, code in SLURM.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/bash\n{code}\n")
        program.chmod(0o755)
    if finished:
        (tmp_path / "runs" / "slurm-7" / "model").mkdir(parents=True)
        (tmp_path / "runs" / "slurm-7" / "model" / "config.json").touch()
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for key, value in {"JOB_ID": "7", "JOB_NODELIST": "node-[1-2]", "NNODES": "2", "GPUS_ON_NODE": "8"}.items():
        monkeypatch.setenv(f"SLURM_{key}", value)
    done = subprocess.run(["bash", str(SCRIPT), "lm", "data.text=a b.txt"], cwd=tmp_path, timeout=15)
    said = (tmp_path / "said").read_text().splitlines()
    assert "scancel --signal=TERM 7" in said
    assert ("scontrol requeue 7" in said) != finished
    assert done.returncode == (130 if finished else 0)
    started = next(line for line in said if line.startswith("srun"))
    assert "--rdzv-endpoint node-1:29500 --rdzv-id 7 -m regard train lm data.text=a b.txt" in started


def test_the_page_shows_the_estimate_of_the_script():
    script = ROOT / "benchmarks" / "speed" / "scaling.py"
    spec = importlib.util.spec_from_file_location("scaling", script)
    made = importlib.util.module_from_spec(spec)
    sys.modules["scaling"] = made  # its dataclass looks there for its types
    spec.loader.exec_module(made)
    page = made.PAGE.read_text(encoding="utf-8")
    assert page == made.filled(page), "run: python benchmarks/speed/scaling.py --docs"
    # By hand: 8 GPUs pass 7/8 of 450 GB over NVLink in 0.875 s; 64 also pass 7/8 of an eighth of it over InfiniBand.
    assert made.exchange_seconds(450e9, 8) == pytest.approx(0.875)
    assert made.exchange_seconds(450e9, 64) == pytest.approx(0.875 + 7 / 8 * 450 / 8 / 50)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_a_killed_rank_changes_nothing(kind):
    """One kill, after which torchrun starts all again, and one after which two torchruns do, as on two machines."""
    words = [sys.executable, str(CAMPAIGN), "--kills", "2", "--kinds", kind, "--steps", "100"]
    done = subprocess.run([*words, "--ways", "restart", "two nodes"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
