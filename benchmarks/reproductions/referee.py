"""Puts public implementations of attention to regard's laws, and shows what broke without regard.

`python benchmarks/reproductions/referee.py run` asks the laws and writes benchmarks/results/referee-DATE.json;
`… run --device cuda` asks those that need a GPU (see referee_gpu.py) and writes referee-cuda-DATE.json; `… docs`
writes the tables and programs of docs/referee.md from the newest of these files. Peers that are not installed are left
out, and named.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from referee_gpu import GPU_BROKEN, GPU_FUNCTIONS, use_first_configurations
from torch import Tensor, nn
from torch.nn import functional

import regard
from regard.checking import Verdicts
from regard.hub import untrained
from regard.laws import LAWS, Case, Finding, SameAs, ask, subject
from regard.laws.layouts import MaskForm, X
from regard.laws.strangers import Stranger

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "referee.md"
FAMILIES = (
    *("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma2", "phi", "gpt_neox", "opt", "bloom", "bert", "roberta"),
    *("modernbert", "t5", "bart", "whisper", "vit", "gpt_oss", "qwen3_next", "mamba2", "jamba"),
)
GPU_LAWS = ("looks-ahead", "recurrent", "batch", "hidden", "pure", "attends", "precision")
DRAWS = 8  # of laws over functions; flex_attention without compilation takes a second a case
# Every bare function is told the same of these: it has neither a second face nor a declared cost.
SILENT = "a bare function or module has only one face"


def flex(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """Returns torch's flex_attention, not compiled; the queries are the last T keys."""
    from torch.nn.attention.flex_attention import flex_attention

    offset = k.shape[2] - q.shape[2]

    def mask(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(i + offset >= j, score, -float("inf"))

    out: Tensor = flex_attention(q, k, v, score_mod=mask if causal else None, enable_gqa=q.shape[1] != k.shape[1])
    return out


def performer(causal: bool) -> Callable[..., Tensor]:
    """Returns performer-pytorch's attention with 32 random features, which are the same in every call."""
    from performer_pytorch import FastAttention

    built: dict[int, nn.Module] = {}

    def fast_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if causal and q.shape[2] != k.shape[2]:
            raise ValueError("its causal form is self-attention: as many queries as keys")
        width = q.shape[-1]
        if width not in built:
            torch.manual_seed(0)
            built[width] = FastAttention(width, nb_features=32, causal=causal)
        out: Tensor = built[width].to(q.dtype)(q, k, v)
        return out

    return fast_attention


class PerformerLayer(nn.Module):
    """performer-pytorch's layer over tokens x [B,T,D]."""

    def __init__(self) -> None:
        super().__init__()
        from performer_pytorch import SelfAttention

        torch.manual_seed(0)
        self.dim = 12
        self.layer = SelfAttention(12, heads=3, dim_head=4, nb_features=32).eval()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


def x_attend(flash: bool) -> Callable[..., Tensor]:
    """Returns x-transformers' attention over q, k and v."""
    from x_transformers.attend import Attend

    built = {causal: Attend(causal=causal, flash=flash) for causal in (False, True)}

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, mask: Tensor | None = None) -> Tensor:
        out: Tensor = built[causal](q, k, v, mask=mask)[0]
        return out

    return attend


def x_layer(causal: bool) -> nn.Module:
    """Returns x-transformers' attention layer over tokens x [B,T,D]."""
    from x_transformers.x_transformers import Attention

    torch.manual_seed(0)
    layer: nn.Module = Attention(12, dim_head=4, heads=3, causal=causal).eval()
    return layer


# Each: the distribution, what is made, and the mechanism that it is meant to compute.
FUNCTIONS: dict[str, tuple[str, Callable[[], Any], str | None]] = {
    "F.scaled_dot_product_attention": ("torch", lambda: functional.scaled_dot_product_attention, "softmax"),
    "nn.MultiheadAttention": ("torch", lambda: nn.MultiheadAttention(12, 3, batch_first=True).eval(), None),
    "flex_attention, not compiled": ("torch", lambda: flex, "softmax"),
    "Attend": ("x-transformers", lambda: x_attend(flash=False), "softmax"),
    "Attend(flash=True)": ("x-transformers", lambda: x_attend(flash=True), "softmax"),
    "Attention": ("x-transformers", lambda: x_layer(causal=False), None),
    "Attention(causal=True)": ("x-transformers", lambda: x_layer(causal=True), None),
    "FastAttention": ("performer-pytorch", lambda: performer(causal=False), None),
    "FastAttention(causal=True)": ("performer-pytorch", lambda: performer(causal=True), None),
    "SelfAttention": ("performer-pytorch", PerformerLayer, None),
}

_JAMBA = """import torch, transformers
torch.manual_seed(0)
config = transformers.JambaConfig(vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, attn_layer_period=2, attn_layer_offset=1, num_experts=4,
    mamba_d_state=8, mamba_dt_rank=4, initializer_range=0.2)
model, ids = transformers.JambaForCausalLM(config).eval(), torch.randint(3, 99, (1, 12))
"""
_QWEN = """import torch, transformers
torch.manual_seed(0)
config = transformers.Qwen3NextConfig(vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, linear_key_head_dim=16, linear_value_head_dim=16,
    linear_num_key_heads=2, linear_num_value_heads=4, num_experts=4, num_experts_per_tok=2)
model, ids = transformers.Qwen3NextForCausalLM(config).eval(), torch.randint(3, 99, (1, 12))
"""
_PACKED = """positions = torch.tensor([[0, 1, 2, 3, 4, 5] * 2])  # two documents of six tokens
packed = model(ids, position_ids=positions, use_cache=False).logits[:, 6:]
print("the second document, packed and alone:", (packed - model(ids[:, 6:]).logits).abs().max().item())
"""
# Each: the subject, the law, what is to be said, and a program of ten lines without regard.
BROKEN: dict[str, tuple[str, str, str, str]] = {
    "jamba-pieces": (
        "jamba",
        "cache, long",
        "In its Mamba layers, a piece of several tokens after the first one begins its scan from zero: the recurrent "
        "state of the pieces before is not used. One token at a time is right.",
        _JAMBA
        + """whole, first = model(ids).logits, model(ids[:, :6], use_cache=True)
second = model(ids[:, 6:], past_key_values=first.past_key_values, use_cache=True).logits
print("12 tokens at once and as 6 + 6:", (second - whole[:, 6:]).abs().max().item(), "of", whole.abs().max().item())
""",
    ),
    "jamba-packed": (
        "jamba",
        "packed",
        "Its attention layers keep documents apart that `position_ids` tell apart; its Mamba layers do not.",
        _JAMBA + _PACKED,
    ),
    "qwen3-next-packed": (
        "qwen3_next",
        "packed",
        "Its attention layers keep documents apart that `position_ids` tell apart; its linear layers do not, in "
        "transformers' own PyTorch code (flash-linear-attention was not installed). They take `cu_seq_lens_q` instead, "
        "and hand it to the kernels only.",
        _QWEN + _PACKED,
    ),
    "performer-looks-ahead": (
        "FastAttention(causal=True)",
        "looks-ahead",
        "Keys are stabilised by their maximum over the whole sequence, and 1e-4 is added after that, so a large later "
        "key changes what earlier tokens get.",
        """import torch
from performer_pytorch import FastAttention
torch.manual_seed(0)
attention = FastAttention(8, nb_features=32, causal=True)
q, k, v = torch.randn(3, 1, 1, 4, 8)
before = attention(q, k, v)
k[:, :, 3] *= 30  # the last token
print("the first three outputs change by", (attention(q, k, v) - before)[:, :, :3].abs().max().item())
""",
    ),
    "performer-gradients": (
        "FastAttention",
        "gradients",
        "That maximum is detached though 1e-4 is added after it, so gradients by keys are not those of what it "
        "computes.",
        """import torch
from performer_pytorch import FastAttention
torch.manual_seed(0)
attention = FastAttention(8, nb_features=32).double()
q, k, v = torch.randn(3, 1, 1, 4, 8, dtype=torch.double)
d = 1e-6 * torch.randn_like(k)
slope = (attention(q, k + d, v).sum() - attention(q, k - d, v).sum()) / 2
grad, = torch.autograd.grad(attention(q, k.requires_grad_(), v).sum(), k)
print("finite differences:", slope.item() / 1e-6, "gradient:", (grad * d).sum().item() / 1e-6)
""",
    ),
    "x-transformers-heads": (
        "Attend",
        "heads, same",
        "With fewer key/value heads than query heads it pairs them in the order a b a b; PyTorch's `enable_gqa` and "
        "Llama pair them a a b b. A convention of its own and no error, but grouped weights do not carry over.",
        """import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from x_transformers.attend import Attend
torch.manual_seed(0)
q, k, v = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
ours, theirs = Attend()(q, k, v)[0], sdpa(q, k, v, enable_gqa=True)
tiled = sdpa(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))
print("from a a b b:", (ours - theirs).abs().max().item(), "from a b a b:", (ours - tiled).abs().max().item())
""",
    ),
}
NOTED: dict[str, tuple[str, str, str, str]] = {
    "cache-and-packing": (
        "every family that packs",
        "packed",
        "Documents are told apart by `position_ids` only in a call without a cache, and a call has one unless it says "
        "`use_cache=False`.",
        """import torch, transformers
torch.manual_seed(0)
config = transformers.LlamaConfig(vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, initializer_range=0.2)
model, ids = transformers.LlamaForCausalLM(config).eval(), torch.randint(3, 99, (1, 12))
positions, alone = torch.tensor([[0, 1, 2, 3, 4, 5] * 2]), model(ids[:, 6:]).logits
for use_cache in (False, True):
    packed = model(ids, position_ids=positions, use_cache=use_cache).logits[:, 6:]
    print("use_cache =", use_cache, "packed and alone:", (packed - alone).abs().max().item())
""",
    ),
    "gpt-oss-packing": (
        "gpt_oss",
        "packed",
        "It takes `position_ids` and turns its heads by them, but does not look for documents there, so the law is not "
        "asked.",
        """import torch, transformers
torch.manual_seed(0)
config = transformers.GptOssConfig(vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=4)
model, ids = transformers.GptOssForCausalLM(config).eval(), torch.randint(3, 99, (1, 12))
"""
        + _PACKED,
    ),
    "one-step-of-padding": (
        "qwen3_next",
        "padding",
        "A step of a single token counts as a token even where the mask hides it. Nothing in transformers makes such a "
        "step, and the law is asked with padding in prompts only.",
        _QWEN
        + """pair, mask = torch.cat([ids, ids]), torch.tensor([[0] + [1] * 11, [1] * 12])  # one row begins with padding
cache, alone = model(pair[:, :1], attention_mask=mask[:, :1]).past_key_values, model(ids[:, 1:]).logits
rest = model(pair[:, 1:], attention_mask=mask, past_key_values=cache).logits[:1]
print("after a step of padding, and without it:", (rest - alone).abs().max().item())
""",
    ),
    "rows-that-see-nothing": (
        "nn.MultiheadAttention",
        "blind",
        "A query whose keys are all hidden gets NaN.",
        """import torch
attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
x = torch.randn(1, 3, 8)
print(attention(x, x, x, key_padding_mask=torch.ones(1, 3, dtype=torch.bool))[0].isnan().all().item())
""",
    ),
}


def run(arguments: argparse.Namespace) -> None:
    """Asks the laws of everything that is installed, runs the programs, and writes a file of results."""
    warnings.simplefilter("ignore")
    if arguments.device == "cuda":
        return run_on_gpu(arguments.seconds, arguments.only or list(GPU_FUNCTIONS))
    import transformers

    transformers.logging.set_verbosity_error()
    programs = {name: _run_program(entry[3]) for name, entry in (BROKEN | NOTED).items()}
    print(json.dumps(programs, indent=1))
    asked: list[dict[str, Any]] = []
    missing: list[str] = []
    for name in FAMILIES:
        model = untrained(f"{name}@tiny").model
        asked.append(_ask("transformers", name, type(model).__name__, lambda model=model: regard.check(model)))
    for name, (package, make, like) in FUNCTIONS.items():
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            missing.append(f"{package}: {name}")
            continue
        thing = make()
        asked.append(_ask(package, name, name, lambda t=thing, like=like: regard.check(t, like=like, draws=DRAWS)))
    packages = sorted({entry["package"] for entry in asked})
    document = {
        "date": date.today().isoformat(),
        "versions": {name: metadata.version(name) for name in packages},
        "python": sys.version.split()[0],
        "device": "cpu",
        "missing": missing,
        "asked": asked,
        "programs": programs,
    }
    path = RESULTS / f"referee-{document['date']}.json"
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{path}: {len(asked)} implementations; missing: {missing or 'none'}")


def _ask(package: str, name: str, kind: str, check: Callable[[], Verdicts]) -> dict[str, Any]:
    """Returns what the laws say of one implementation, as plain data."""
    start = time.perf_counter()
    verdicts = check()
    laws = [
        {"law": v.law, "status": v.status, "detail": v.detail, "error": v.error, "limit": v.limit}
        for v in verdicts
        if v.detail != SILENT
    ]
    for law in laws:
        if law["error"] == float("inf"):
            law["error"] = "inf"
    print(
        f"{package} {name}: {[law['law'] for law in laws if law['status'] == 'broken'] or 'nothing broken'}", flush=True
    )
    return {"package": package, "name": name, "kind": kind, "seconds": time.perf_counter() - start, "laws": laws}


def run_on_gpu(seconds: float, names: list[str]) -> None:
    """Asks the laws of what needs a GPU, one process an implementation, and writes a file of results."""
    until = time.monotonic() + seconds
    commands: dict[str, list[str]] = {}
    for name in names:
        commands[name] = [sys.executable, "-W", "ignore", __file__, "one", name]
    for name, entry in GPU_BROKEN.items():
        commands[name] = [sys.executable, "-W", "ignore", "-c", entry[3]]
    started = {
        name: subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for name, command in commands.items()
    }
    said: dict[str, str] = {}
    missing: list[str] = []
    for name, process in started.items():
        try:
            out, errors = process.communicate(timeout=max(1.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            out, errors = process.communicate()
            errors += "\nstill asked when time was up"
        said[name] = out.strip()  # lines as they came, also of one that was cut short
        print(name, process.returncode, out, errors[-1500:], flush=True)
        if process.returncode != 0:
            missing.append(f"{name}: {errors.strip().rpartition(chr(10))[2][:200]}")
    asked = [_gpu_row(name, said[name]) for name in names]
    packages = sorted({entry["package"] for entry in asked})
    document = {
        "date": date.today().isoformat(),
        "versions": {name: metadata.version(name) for name in [*packages, "triton"]},
        "python": sys.version.split()[0],
        "device": torch.cuda.get_device_name(),
        "missing": missing,
        "asked": asked,
        "programs": {name: said[name] for name in GPU_BROKEN if name in said},
    }
    path = Path(os.environ.get("OUT", RESULTS)) / f"referee-cuda-{document['date']}.json"
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{path}: {len(asked)} rows; missing: {missing or 'none'}")


def _gpu_row(name: str, said: str) -> dict[str, Any]:
    """Returns the row of one implementation from the lines that its process printed."""
    laws = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return {"package": GPU_FUNCTIONS[name][0], "name": name, "kind": name, "laws": laws}


def ask_one(arguments: argparse.Namespace) -> None:
    """Asks the laws of one implementation on a device, in float32, and prints a line of JSON a law."""
    warnings.simplefilter("ignore")
    use_first_configurations()
    _, make, like = GPU_FUNCTIONS[arguments.name]
    thing = subject(make(), label=arguments.name, causal=True).on(arguments.device)
    assert isinstance(thing, Stranger)
    laws: dict[str, Any] = {name: LAWS[name] for name in GPU_LAWS}
    if like is None:
        thing.assume(X, ("float32",), MaskForm("attention_mask", "keys", "ones"))
    else:
        laws["same"] = SameAs(subject(like).on(arguments.device))
    for name, law in laws.items():
        found = ask(law, thing, Case(B=2, T=67, K=16, V=16, dtype="float32", device=arguments.device, seed=1))
        if isinstance(found, Finding):
            status = "holds"
            if found.exceeded:
                status = "noted" if found.noted else "broken"
            row = {"law": name, "status": status, "detail": found.what, "error": found.error, "limit": found.limit}
        else:
            row = {"law": name, "status": found.status, "detail": found.reason, "error": None, "limit": None}
        print(json.dumps(row, ensure_ascii=False).replace("Infinity", '"inf"'), flush=True)


def _run_program(text: str) -> str:
    """Returns what a program prints in a process of its own; one that fails, fails here too."""
    command = [sys.executable, "-W", "ignore", "-c", text]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def write_docs(arguments: argparse.Namespace) -> None:
    """Writes what lies between the markers of docs/referee.md from the newest results."""
    document = json.loads(max(RESULTS.glob("referee-[0-9]*.json")).read_text(encoding="utf-8"))
    page = PAGE.read_text(encoding="utf-8")
    parts = {"table": make_table(document), "broken": make_programs(document, BROKEN)}
    parts["noted"] = make_programs(document, NOTED)
    for name, text in parts.items():
        before, _, rest = page.partition(f"<!-- {name} -->\n")
        _, _, after = rest.partition(f"<!-- end {name} -->\n")
        page = f"{before}<!-- {name} -->\n{text}<!-- end {name} -->\n{after}"
    PAGE.write_text(page, encoding="utf-8")


def make_table(document: dict[str, Any]) -> str:
    """Returns the table of implementations: which laws held, broke, were noted, and were not asked."""
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    lines = [
        f"Measured {document['date']} on a CPU with Python {document['python']}: {versions}.",
        "",
        "| implementation | holds | broken | noted | not asked |",
        "|---|---|---|---|---|",
    ]
    for entry in document["asked"]:
        cells = [f"{entry['package']}: `{entry['kind']}`"]
        for statuses in (("holds",), ("broken",), ("noted",), ("does not apply", "could not be asked")):
            cells.append(", ".join(law["law"] for law in entry["laws"] if law["status"] in statuses))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def make_programs(document: dict[str, Any], entries: dict[str, tuple[str, str, str, str]]) -> str:
    """Returns the programs with what they printed."""
    parts = []
    for name, (of, law, claim, program) in entries.items():
        output = document["programs"][name]
        parts.append(f"**{of}, `{law}`.** {claim}\n\n```py\n{program}```\n\nprints\n\n```text\n{output}\n```\n\n")
    return "".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run")
    running.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    running.add_argument("--seconds", type=float, default=300, help="after which what is still asked is left out")
    running.add_argument("--only", action="append", help="on a GPU: this implementation; may be repeated")
    running.set_defaults(do=run)
    one = commands.add_parser("one", help="ask one implementation that needs a GPU, and print JSON")
    one.add_argument("name")
    one.add_argument("--device", default="cuda")
    one.set_defaults(do=ask_one)
    commands.add_parser("docs").set_defaults(do=write_docs)
    arguments = parser.parse_args()
    arguments.do(arguments)


if __name__ == "__main__":
    main()
