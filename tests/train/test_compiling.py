"""When a training is compiled, that a run keeps to it, and that one compiled block serves all layers."""

import functools
import shutil

import pytest
import torch
from training import Crash, StopAt, Toy, bits, gpt, pretraining, trainer

import regard
from regard.data.batch import Batch
from regard.train import Run, RunError, TrainConfig, compiling, stage
from regard.train.compiling import CompiledLoss, choose_compile, decide_compile, seconds_saved
from regard.train.distributed import Process
from regard.train.progress import Lines, Progress

LONG = 10**12  # steps
# torch.compile asks this of every tensor, and hides the warning in ways that pytest undoes.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture
def h200(monkeypatch):
    """Makes models believe that they lie on an H200 whose machine can compile."""
    monkeypatch.setattr(regard.GPT, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(compiling, "find_spec", lambda name: True)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")


ALONE = Process()


def choose(run, task=None, process=ALONE, progress=None, **changes):
    config = TrainConfig().but(**({"steps": LONG, "batch": 8} | changes))
    return choose_compile(config, gpt(), task or Toy(), run, process, progress or Progress())


def new_run(folder):
    return Run.create(folder, {"recipe": "toy", "train": {"compile": "auto"}})


# Deciding


def test_a_longer_run_a_larger_model_and_a_larger_batch_are_compiled_sooner(h200):
    small = gpt()
    wide = regard.GPT(vocabulary=10, length=6, width=32, layers=1, attention={"heads": 2})
    deep = regard.GPT(vocabulary=10, length=6, width=8, layers=4, attention={"heads": 2})
    assert seconds_saved(wide, 100) == seconds_saved(deep, 100) == 4 * seconds_saved(small, 100)
    assert seconds_saved(small, 300) == pytest.approx(3 * seconds_saved(small, 100))
    pays = compiling.MARGIN * compiling.COMPILE_SECONDS
    assert decide_compile(1000, 0.99 * pays).mode == "graph"
    assert decide_compile(1000, pays).mode == "both"


def test_a_machine_that_cannot_compile_is_told_so(h200, monkeypatch):
    monkeypatch.setattr(compiling, "find_spec", lambda name: None)
    mode, reason = decide_compile(10, 1e6)
    assert mode == "graph" and reason.endswith("but there is no triton")
    monkeypatch.setattr(compiling, "find_spec", lambda name: True)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    mode, reason = decide_compile(10, 1e6)
    assert mode == "graph" and reason.endswith("but there is no C compiler")


def test_the_decision_is_told_in_a_line_and_kept_in_the_config(h200, tmp_path):
    lines = []
    run = new_run(tmp_path / "run")
    assert choose(run, progress=Lines("toy", lines.append)) == "both"
    assert len(lines) == 1 and lines[0].startswith("toy: train.compile = auto is both here: compiling takes")
    opened = Run.open(run.path)
    assert opened.compiled == run.compiled == "both"
    assert opened.config["train"]["compile"] == "auto"  # what was asked for stays as it was
    # Going on, a run keeps what was decided, whatever would be decided now.
    assert choose(opened, steps=1, progress=Lines("toy", lines.append)) == "both"
    assert len(lines) == 1


def test_a_short_run_is_never_compiled(h200, tmp_path):
    run = new_run(tmp_path / "run")
    assert choose(run, steps=100) == run.compiled == "graph"
    assert choose(run) == "graph"


def test_a_run_begun_before_there_were_decisions_goes_on_as_it_was(h200, tmp_path):
    run = new_run(tmp_path / "run")
    (run.checkpoints / "step-5").mkdir(parents=True)
    assert choose(run) == "graph"
    assert run.compiled is None


def test_what_is_asked_for_is_done_and_not_written_down(h200, tmp_path):
    run = new_run(tmp_path / "run")
    assert [choose(run, compile=name, steps=1) for name in ("off", "graph", "inductor", "both")] == [
        "off",
        "graph",
        "inductor",
        "both",
    ]
    assert run.compiled is None


def test_a_run_that_goes_on_elsewhere_decides_anew(h200, tmp_path, monkeypatch):
    run = new_run(tmp_path / "run")
    assert choose(run) == "both"
    assert choose(run, process=Process(0, 2, 0)) == "off"
    monkeypatch.setattr(regard.GPT, "device", torch.device("cpu"))
    assert choose(run) == "off"
    assert run.compiled == "both"


class OwnLoss(Toy):
    def loss(self, model, batch, smoothing=0.0):
        return super().loss(model, batch, smoothing)


def test_a_loss_of_a_tasks_own_is_compiled_only_when_asked_for(h200, tmp_path):
    run = new_run(tmp_path / "run")
    assert choose(run, OwnLoss()) == "graph"
    assert choose(run, OwnLoss(), compile="both") == "both"


def test_a_damaged_decision_is_told(tmp_path):
    run = new_run(tmp_path / "run")
    run.compiled = "sometimes"
    with pytest.raises(RunError, match=r"config.toml: compiled = 'sometimes', expected auto, off"):
        _ = run.compiled


def test_a_job_that_starts_again_finds_its_run(tmp_path):
    config = {"job": "7", "train": {"compile": "auto"}}
    run = Run.create(tmp_path / "run", config)
    run.compiled = "both"
    assert Run.open(run.path).was_begun_as(config)
    assert not Run.open(run.path).was_begun_as(config | {"train": {"compile": "off"}})


def test_a_run_of_a_gpu_goes_on_on_a_cpu(tmp_path):
    with pytest.raises(Crash):
        stage.train(pretraining(), tmp_path / "run", progress=StopAt(7))
    Run.open(tmp_path / "run").compiled = "both"
    stage.resume(tmp_path / "run")
    stage.train(pretraining(), tmp_path / "whole")
    assert bits(tmp_path / "run") == bits(tmp_path / "whole")


# Compiling


@pytest.fixture
def graphs(monkeypatch):
    """Compiles without a compiler, and gives the list of graphs that would have been compiled."""
    found = []

    def backend(module, inputs):
        found.append(module)
        return module.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    return found


BLOCKS = {
    "gpt2": {"position": "learned", "block": {"mlp": "gelu_tanh"}},
    "lm": {"position": "rotary", "block": {"norm": "rms", "mlp": "swiglu", "bias": False}},
    "elu": {"mechanism": "elu"},
}


@pytest.mark.parametrize("name", BLOCKS)
def test_one_compiled_block_serves_all_layers(name, graphs):
    torch.manual_seed(0)
    heads = {"heads": 2, "window": 8}  # as long as the text: it hides nothing
    model = regard.GPT(vocabulary=20, length=8, width=8, layers=3, attention=heads, **BLOCKS[name])
    tokens = torch.randint(0, 20, (2, 8))
    losses = {}
    gradients = {}
    for kind, loss in {"compiled": CompiledLoss(model, _loss_of(model)), "plain": _loss_of(model)}.items():
        losses[kind] = loss(Batch(tokens, tokens))
        gradients[kind] = torch.autograd.grad(losses[kind], list(model.parameters()))
    assert len(graphs) == 5  # embedding, positions, a block, the last norm, the head
    assert torch.equal(losses["compiled"], losses["plain"])
    assert all(map(torch.equal, gradients["compiled"], gradients["plain"]))
    if name != "elu":
        calls = [node for node in graphs[2].graph.nodes if "scaled_dot_product_attention" in str(node.target)]
        assert len(calls) == 1 and calls[0].kwargs["is_causal"] and "attn_mask" not in calls[0].kwargs


def _loss_of(model):
    return lambda batch: model.loss(batch.x, batch.y, mean=False)


def test_layers_of_two_kinds_are_compiled_twice_and_nothing_outside_of_training(graphs):
    model = regard.GPT(
        vocabulary=20, length=8, width=8, layers=4, attention={"heads": 2}, mechanism=["softmax", "elu"] * 2
    )
    tokens = torch.randint(0, 20, (2, 8))
    CompiledLoss(model, _loss_of(model))(Batch(tokens, tokens))
    assert len(graphs) == 6
    model.eval()(tokens[:, :5])
    assert len(graphs) == 6


def test_a_model_has_its_methods_back_after_an_error(graphs):
    model = gpt()

    def fail(batch):
        raise Crash

    with pytest.raises(Crash):
        CompiledLoss(model, fail)(Batch(torch.zeros(1, 1), torch.zeros(1, 1)))
    assert "forward" not in vars(model.stack.blocks[0]) and "_norm_output" not in vars(model.stack)


def test_a_compiled_training_goes_on_in_the_same_bits(graphs, tmp_path):
    changes = {"compile": "inductor", "saving": {"every": 2}}
    trainer(tmp_path / "whole", model=gpt(0.1), **changes).fit()
    assert len(graphs) == 5
    with pytest.raises(Crash):
        trainer(tmp_path / "stopped", model=gpt(0.1), progress=StopAt(5), **changes).fit()
    resumed = trainer(tmp_path / "stopped", model=gpt(0.1), **changes)
    assert resumed.resume() == 4
    resumed.fit()
    assert bits(tmp_path / "stopped") == bits(tmp_path / "whole")
