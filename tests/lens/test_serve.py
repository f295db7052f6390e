"""The local page: who may ask, what is answered, and that what it shows is what the model computed."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import threading
import time
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch

from regard import GPT, Encoder, Seq2Seq, generate
from regard.data.tokenizers import Bytes
from regard.errors import ExtraMissingError, OptionError
from regard.generate import Settings
from regard.lens import decode, record
from regard.lens.models import RecordableModel
from regard.lens.pages import connections, server
from regard.lens.pages.live import generate_steps
from regard.lens.pages.questions import with_and_without
from regard.lens.pages.server import ServeError, SharedModel
from regard.lens.recording.hub_models import hub_card
from regard.lens.recording.regard_models import regard_card

pytest.importorskip("starlette")
uvicorn = pytest.importorskip("uvicorn")

TOKEN = "right-token"
TEXT = "The dog ran"


def subject(mechanism="softmax", **changes):
    torch.manual_seed(0)
    model = GPT.preset("nano", vocabulary=256, length=256, mechanism=mechanism, **changes)
    model.tokenizer = Bytes()
    return RecordableModel(model, model.tokenizer, regard_card(model, "</title><b>small"))


@contextmanager
def running(desk):
    """A server on a free port, in a thread of its own."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        made = server.build_server(desk, port, TOKEN)
        thread = threading.Thread(target=made.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        while not made.started:
            time.sleep(0.01)
        yield port
        made.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def desk():
    return SharedModel(subject())


@pytest.fixture(scope="module")
def port(desk):
    with running(desk) as found:
        yield found


def ask(port, path="/", body=None, token=TOKEN, host=None, **headers):
    """Status, headers and bytes of an answer; a body is sent as JSON with the token."""
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    method = "GET" if body is None else "POST"
    given = {"Host": host or f"127.0.0.1:{port}"}
    if body is not None:
        given |= {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
    line.request(method, path, body, given | headers)
    answer = line.getresponse()
    found = answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
    line.close()
    return found


def lines(port, **asked):
    status, _, raw = ask(port, "/generate", {"text": TEXT, **asked})
    assert status == 200, raw
    return [json.loads(line) for line in raw.splitlines()]


@pytest.mark.parametrize("mechanism", ["softmax", "elu", "performer", "synthesizer", "argmax"])
def test_steps_choose_and_look_as_the_model_does(mechanism):
    asked = Settings(max_tokens=6, temperature=0.9, top_k=50, seed=3)
    who = subject(mechanism)
    ids = who.ids(TEXT)
    found = list(generate_steps(who, ids, asked))
    assert [s.token for s in found] == generate(who.model, ids, asked).tokens
    trace = record(who.model, [*ids, *(s.token for s in found)])
    for n, step in enumerate(found):
        row = len(ids) - 1 + n
        for layer, heads in enumerate(step.weights):
            for head, weights in enumerate(heads):
                wanted = trace.weights(layer, head, [row])[0]
                assert torch.allclose(weights, wanted[: row + 1], atol=1e-5) and not wanted[row + 1 :].any()
    assert "extend" not in vars(who.model.stack.layers[0].attention.mechanism)  # nothing stays on the model


def test_steps_of_a_hugging_face_model_are_those_of_its_eager_attention():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, attn_implementation="eager", eos_token_id=98,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    from regard.lens.recording.hub_models import hub_card

    who = RecordableModel(model, None, hub_card(model, "tiny", False))
    found = list(generate_steps(who, [5, 6, 7], Settings(max_tokens=4)))
    whole = torch.tensor([[5, 6, 7, *(s.token for s in found)]])
    out = model(whole, output_attentions=True)
    assert [int(out.logits[0, 2 + n].argmax()) for n in range(4)] == [s.token for s in found]
    for n, step in enumerate(found):
        for mine, theirs in zip(step.weights, out.attentions, strict=True):
            assert torch.allclose(mine, theirs[0, :, 2 + n, : 3 + n], atol=1e-6)


def test_what_cannot_be_continued_is_an_error():
    encoder = Encoder(vocabulary=256, width=24, layers=1, length=64, attention={"heads": 3})
    encoder.tokenizer = Bytes()
    with pytest.raises(OptionError, match="does not continue a text"):
        generate_steps(RecordableModel(encoder, encoder.tokenizer, regard_card(encoder)), [1], Settings())
    with pytest.raises(OptionError, match="no tokens"):
        generate_steps(subject(), [], Settings())
    with pytest.raises(OptionError, match="leave out beams"):
        generate_steps(subject(), [1], Settings(beams=2))


def test_a_text_comes_back_as_the_trace_that_record_makes(port, desk):
    status, headers, raw = ask(port, "/record", {"text": TEXT})
    assert status == 200 and headers["content-type"] == "application/octet-stream"
    found, wanted = decode(raw), record(desk.recordable.model, TEXT)
    assert found.tokens == list(TEXT)
    assert torch.allclose(found.weights(2, 1), wanted.weights(2, 1), atol=2e-3)


def test_an_encoder_decoder_reads_both_sides_and_does_not_write_on():
    torch.manual_seed(0)
    model = Seq2Seq.preset("nano", vocabulary=256)
    model.tokenizer = Bytes()
    desk = SharedModel(RecordableModel(model, model.tokenizer, regard_card(model, "both")))
    assert not desk.about()["generates"]
    read = decode(desk.record({"text": TEXT, "target": "the cat"})).recordings[0]
    wanted = record(model, TEXT, target="the cat").recordings[0]
    assert {(a.side, a.kind) for a in read.attentions} == {
        ("encoder", "self"), ("decoder", "self"), ("decoder", "cross")
    }  # fmt: skip
    for a in wanted.attentions:
        got, exact = (r.weights(a.layer, 1, kind=a.kind, side=a.side) for r in (read, wanted))
        assert (got - exact).abs().max() < 2e-3
    with pytest.raises(OptionError, match="does not continue a text"):
        desk.generate({"text": TEXT})


def test_a_model_of_images_is_refused_at_once():
    class Looks:
        main_input_name = "pixel_values"

    with pytest.raises(OptionError, match=r"reads no text but pixel_values: record it with regard\.record"):
        SharedModel(RecordableModel(Looks(), None, subject().card))


def test_a_stream_has_each_token_and_what_it_looked_at(port, desk):
    start, *tokens, end = lines(port, max_tokens=5, temperature=0.7, seed=1)
    ids = desk.recordable.ids(TEXT)
    assert start == {"kind": "start", "ids": ids, "tokens": list(TEXT)}
    assert end == {"kind": "end", "why": "max", "ids": [*ids, *(t["id"] for t in tokens)]}
    assert [t["id"] for t in tokens] == generate(
        desk.recordable.model, TEXT, max_tokens=5, temperature=0.7, seed=1
    ).tokens
    trace = record(desk.recordable.model, end["ids"])
    for n, told in enumerate(tokens):
        rows = np.frombuffer(base64.b64decode(told["weights"]), np.int8).reshape(sum(told["heads"]), -1)
        row = len(ids) - 1 + n
        wanted = torch.stack([trace.weights(a, h, [row])[0, : row + 1] for a in range(3) for h in range(3)])
        assert np.abs(rows / 127 * told["scale"] - wanted.numpy()).max() <= told["scale"] / 254 + 2e-3
    again = decode(ask(port, "/record", {"ids": end["ids"], "prompt": len(ids)})[2]).recordings[0].sequences[0]
    assert again.prompt == len(ids) and again.steps == [len(ids), 1, 1, 1, 1, 1]


def test_a_stream_ends_where_the_model_or_the_time_does(port, desk, monkeypatch):
    text = "x" * 254
    assert lines(port, text=text, max_tokens=50)[-1]["why"] == "full"
    monkeypatch.setattr(server, "MAX_SECONDS", -1)
    assert lines(port, max_tokens=50)[-1]["why"] == "time"


def test_a_stream_that_nobody_reads_ends(port, desk, monkeypatch):
    passes = []
    extend = desk.recordable.model.extend
    monkeypatch.setattr(desk.recordable.model, "extend", lambda *a, **k: passes.append(1) or extend(*a, **k))
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    body = json.dumps({"text": "x", "max_tokens": 240})
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
    line.request("POST", "/generate", body, headers)
    answer = line.getresponse()
    answer.readline()
    answer.close()
    line.close()
    for _ in range(100):
        before = len(passes)
        time.sleep(0.2)
        if len(passes) == before:
            break
    assert 0 < len(passes) < 240
    assert ask(port, "/record", {"text": TEXT})[0] == 200  # and the model is free again


def test_two_tabs_are_served_in_turn(port, desk):
    """One asks for a trace in the middle of the other's stream; both get what they would have got alone."""
    alone = [x for x in lines(port, max_tokens=40, temperature=1.0, seed=5) if x["kind"] == "token"]
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
    line.request(
        "POST", "/generate", json.dumps({"text": TEXT, "max_tokens": 40, "temperature": 1.0, "seed": 5}), headers
    )
    answer = line.getresponse()
    told = [json.loads(answer.readline()) for _ in range(3)]
    other = lines(port, text="Another", max_tokens=4)
    assert ask(port, "/record", {"text": TEXT})[0] == 200
    told += [json.loads(x) for x in answer.read().splitlines()]
    line.close()
    assert [x for x in told if x["kind"] == "token"] == alone
    assert other[-1]["why"] == "max"


@pytest.mark.parametrize("path, body", [("/?token=" + TOKEN, None), ("/record", {"text": "x"}), ("/nowhere", None)])
@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example:80", ""])
def test_a_request_for_another_host_goes_no_further(port, path, body, host):
    assert ask(port, path, body, host=host or " ")[0] in (400, 421)


def test_the_names_of_this_machine_are_its_own(port):
    assert ask(port, f"/?token={TOKEN}", host=f"localhost:{port}")[0] == 200
    with socket.create_connection(("127.0.0.1", port)) as raw:  # two hosts: which one was checked?
        two = f"GET /?token={TOKEN} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nHost: evil.example\r\n\r\n"
        raw.sendall(two.encode())
        assert raw.recv(100).split()[1] in (b"400", b"421")


@pytest.mark.parametrize("path", ["/", "/?token=", "/?token=wrong", f"/?token={TOKEN}x", f"/?token={TOKEN}&token=a"])
def test_no_page_without_the_token(port, path):
    status, headers, raw = ask(port, path)
    assert status == 403 and b"<script" not in raw and b"small" not in raw
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", ["/record", "/generate", "/nowhere", "/static/lens.js"])
def test_no_answer_without_the_token(port, path):
    assert ask(port, path, {"text": "x"}, token="wrong")[0] == 403
    assert ask(port, f"{path}?token={TOKEN}", {"text": "x"}, token="")[0] == 403  # an address can be shared or logged


def test_other_pages_are_refused_and_get_no_leave(port):
    for origin in ("http://evil.example", "null", f"http://localhost:{port}"):
        assert ask(port, "/record", {"text": "x"}, Origin=origin)[0] == 403
    status, headers, _ = ask(port, "/record", {"text": "x"}, Origin=f"http://127.0.0.1:{port}")
    assert status == 200 and not any(name.startswith("access-control") for name in headers)


@pytest.mark.parametrize("path", ["/lens.js", "/../pyproject.toml", "/%2e%2e/etc/passwd", "//etc/passwd", "/record"])
def test_nothing_else_is_served(port, path):
    line = {"Authorization": f"Bearer {TOKEN}"}
    assert ask(port, path, **line)[0] in (404, 405)


def test_the_page_is_bound_to_its_own_script(port):
    _, headers, raw = ask(port, f"/?token={TOKEN}")
    rules = headers["content-security-policy"]
    for rule in ("default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'", "script-src 'sha256-"):
        assert rule in rules
    assert "unsafe" not in rules and headers["referrer-policy"] == "no-referrer"
    assert b"</title><b>small" not in raw and b"&lt;/title&gt;" in raw  # a model's name is text


@pytest.mark.parametrize(
    "path, body, status, words",
    [
        ("/record", {"text": "x" * (server.MAX_BODY_BYTES + 1)}, 413, "larger than"),
        ("/record", {"text": "x" * 300}, 400, "300 tokens; this model and server read at most 256"),
        ("/record", {"text": ""}, 400, "empty"),
        ("/record", {"text": 3}, 400, "expected"),
        ("/record", {"ids": [1, "a"]}, 400, "expected"),
        ("/record", {"ids": [1, 999]}, 400, ""),
        ("/record", {"ids": [1, 2], "prompt": 5}, 400, "expected"),
        ("/record", [1], 400, "JSON object"),
        ("/record", b"{", 400, "no JSON"),
        ("/generate", {"text": "x", "max_tokens": 10**9}, 400, "at most"),
        ("/generate", {"text": "x", "temperature": -1}, 400, "temperature = -1"),
        ("/generate", {"text": "x", "top_p": 2}, 400, "top_p"),
        ("/generate", {"text": "x", "top_k": "a"}, 400, "top_k"),
    ],
)
def test_what_is_wrong_is_said(port, path, body, status, words):
    found, _, raw = ask(port, path, body)
    assert found == status and words in raw.decode()


def test_a_form_of_another_page_is_no_request(port):
    assert ask(port, "/record", b"text=x", **{"Content-Type": "text/plain"})[0] == 415


def test_a_port_in_use_and_a_missing_extra_are_told(desk, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ServeError, match="in use; choose another with --port"):
            server.serve(desk, taken.getsockname()[1], lambda address: None)
    monkeypatch.setattr(server, "find_spec", lambda name: None)
    with pytest.raises(ExtraMissingError, match=r"regard\[serve\]"):
        server.require_server_packages()


@pytest.mark.browser
def test_a_browser_reads_writes_stops_and_shows(port, desk, monkeypatch, chromium):
    def slowly(*asked, found=server.generate_steps):
        for step in found(*asked):
            time.sleep(0.05)  # so that there is something to stop
            yield step

    monkeypatch.setattr(server, "generate_steps", slowly)
    said = []
    tabs = [chromium.new_context().new_page() for _ in range(2)]
    for page in tabs:
        page.on("console", lambda m: said.append(m.text))
        page.on("pageerror", lambda e: said.append(str(e)))
        page.on("request", lambda r: said.append(r.url) if f"//127.0.0.1:{port}/" not in r.url else None)
        page.goto(f"http://127.0.0.1:{port}/?token={TOKEN}")
        page.wait_for_selector(".heads[data-state=done]")
    page, other = tabs
    page.get_by_role("textbox", name="Text").fill(TEXT)
    page.get_by_label("tokens", exact=True).fill("12")
    page.get_by_role("button", name="Go on").click()
    other.get_by_label("tokens", exact=True).fill("200")
    other.get_by_role("button", name="Go on").click()
    other.wait_for_selector(".piece.new >> nth=3")
    other.get_by_role("button", name="Stop").click()
    for tab, words in ((page, "12 tokens: as many tokens as asked for. Point"), (other, ": stopped. Point")):
        tab.locator(".says", has_text=words).wait_for()
    written = generate(desk.recordable.model, TEXT, max_tokens=12, temperature=0.8, seed=0).tokens
    pieces = Bytes().pieces()
    wanted = [pieces.push(i) or "·" for i in [*Bytes().encode(TEXT), *written]]
    assert page.evaluate("[...document.querySelectorAll('.piece')].map(x => x.textContent)") == wanted
    page.locator(".piece.new").nth(4).hover()
    told = page.locator(".told > p").last.inner_text()
    assert "(15), probability" in told and "looked most at" in told
    assert page.locator("header select").first.locator("option").count() == 2  # the text, and what was written
    page.get_by_role("textbox", name="Text").fill("</script><img src=x onerror=alert(1)>")
    page.get_by_role("button", name="Read", exact=True).click()
    page.locator(".says", has_text="Read in").wait_for()
    assert page.locator("img").count() == 0
    for tab in tabs:
        tab.context.close()
    assert said == []


def connect(port, said=b""):
    """Returns a connection on which so much has been said."""
    line = socket.create_connection(("127.0.0.1", port), timeout=10)
    line.sendall(said)
    return line


def is_closed(line):
    """Reads what comes until the connection is closed; an error where that takes too long."""
    try:
        while line.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.1\r\nHost: 127", b"POST /record HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"]
)
def test_clients_that_say_nothing_keep_nobody_out(port, said):
    idle = [connect(port, said) for _ in range(200)]
    try:
        assert ask(port, f"/?token={TOKEN}")[0] == 200
        assert ask(port, "/record", {"text": TEXT})[0] == 200
        # There are more than may wait, so the oldest have been closed, and the newest have not yet.
        assert all(map(is_closed, idle[:100]))
    finally:
        for line in idle:
            line.close()


def test_a_connection_without_a_token_is_closed_in_time(port, monkeypatch):
    monkeypatch.setattr(connections, "SECONDS_WITHOUT_TOKEN", 0.3)
    with connect(port) as line:
        began = time.monotonic()
        assert is_closed(line)
        assert 0.2 < time.monotonic() - began < 5


def test_a_connection_with_the_token_stays_while_others_come(port, monkeypatch):
    monkeypatch.setattr(connections, "SECONDS_WITHOUT_TOKEN", 0.3)
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    line.request("GET", f"/?token={TOKEN}", headers={"Host": f"127.0.0.1:{port}"})
    assert len(line.getresponse().read()) > 1000
    own = line.sock
    others = [connect(port) for _ in range(100)]
    time.sleep(0.6)
    line.request("GET", f"/?token={TOKEN}", headers={"Host": f"127.0.0.1:{port}"})
    assert line.getresponse().status == 200 and line.sock is own
    for other in (*others, line):
        other.close()


def test_after_a_body_that_is_too_large_nothing_more_is_read(port):
    head = f"POST /record HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {TOKEN}\r\n"
    head += "Content-Type: application/json\r\nContent-Length: 1000000000\r\n\r\n"
    with connect(port, head.encode()) as line:
        line.settimeout(5)
        sent = 0
        with pytest.raises(OSError):  # reset, or a broken pipe
            while sent < 100 * server.MAX_BODY_BYTES:
                sent += line.send(bytes(1 << 16))


def test_a_request_that_is_nested_deeply_is_refused(port):
    deep = b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    status, _, raw = ask(port, "/record", deep)
    assert status == 400 and b"nested more than" in raw


def by_hand(model, ids, layer, head, count):
    """Greedy continuation of a model whose head's output is zero before the projection; loss and probabilities."""

    def without(module, inputs):
        x = inputs[0].clone()
        width = x.shape[-1] // model.config.attention.heads
        x[..., head * width : (head + 1) * width] = 0
        return (x,)

    hook = model.stack.layers[layer].attention.out.register_forward_pre_hook(without)
    try:
        written = list(ids)
        first = model(torch.tensor([written]))[0]
        for _ in range(count):
            written.append(int(model(torch.tensor([written]))[0, -1].argmax()))
    finally:
        hook.remove()
    loss = torch.nn.functional.cross_entropy(first[:-1], torch.tensor(ids[1:]))
    return written[len(ids) :], float(loss), first[-1].softmax(-1)


@torch.no_grad()
def test_a_text_without_a_head(desk, port):
    model = desk.recordable.model.eval()
    ids = list(TEXT.encode())
    name = record(model, TEXT).recordings[0].attention(1).name
    asked = {"text": TEXT, "heads": [[name, 2]], "max_tokens": 6}
    status, _, raw = ask(port, "/ablate", asked)
    assert status == 200, raw
    found = json.loads(raw)
    written, loss, p = by_hand(model, ids, 1, 2, 6)
    assert found["without"]["text"] == bytes(written).decode("utf-8", "replace")
    assert found["without"]["loss"] == pytest.approx(loss, abs=1e-5)
    for row in found["without"]["next"]:
        assert row["p"] == pytest.approx(float(p[row["id"]]), abs=1e-5)
    whole = generate(model, ids, Settings(max_tokens=6)).tokens
    assert found["with"]["text"] == bytes(whole).decode("utf-8", "replace")
    assert found["with"]["loss"] != found["without"]["loss"]


def test_heads_that_are_not_there(port):
    for heads in (None, [], [["nothing", 0]], [["stack.blocks.0.attention", 99]], "all"):
        status, _, raw = ask(port, "/ablate", {"text": TEXT, "heads": heads})
        assert status == 400 and b"head" in raw, (heads, raw)


@torch.no_grad()
def test_a_hub_model_without_a_head():
    """The same of transformers' own GPT-2, whose heads are removed by zeros in its output projection."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=32, vocab_size=64, n_positions=64)
    model = transformers.GPT2LMHeadModel(config).eval()
    for weight in model.parameters():
        weight.add_(0.2 * torch.randn_like(weight))
    recordable = RecordableModel(model, None, hub_card(model))
    ids = [5, 6, 7, 8, 9]
    settings = Settings(max_tokens=5)
    found = with_and_without(recordable, ids, {"transformer.h.1.attn": [3]}, settings, nullcontext, 60)
    whole = model.generate(torch.tensor([ids]), max_new_tokens=5, do_sample=False, pad_token_id=0)[0, 5:].tolist()
    assert [int(x) for x in found["with"]["tokens"]] == whole
    model.transformer.h[1].attn.c_proj.weight[24:] = 0
    again = model(torch.tensor([ids])).logits[0]
    assert found["without"]["loss"] == pytest.approx(
        float(torch.nn.functional.cross_entropy(again[:-1], torch.tensor(ids[1:]))), abs=1e-5
    )
    assert found["without"]["next"][0]["id"] == int(again[-1].argmax())
    whole = model.generate(torch.tensor([ids]), max_new_tokens=5, do_sample=False, pad_token_id=0)[0, 5:].tolist()
    assert [int(x) for x in found["without"]["tokens"]] == whole


@torch.no_grad()
def test_who_speaks_for_any_token(desk, port):
    model = desk.recordable.model.eval()
    ids = list(TEXT.encode())
    status, _, raw = ask(port, "/contributions", {"ids": ids, "position": 6, "token": "q"})
    found = json.loads(raw)
    assert status == 200 and found["id"] == ord("q") and found["token"] == "q"
    logit = float(model(torch.tensor([ids]))[0, 6, ord("q")])
    assert found["logit"] == pytest.approx(logit, abs=1e-4)
    assert sum(map(sum, found["heads"])) + sum(found["rest"]) == pytest.approx(logit, abs=1e-4)
    for wrong in ({"position": 99}, {"position": "0"}, {"token": ""}, {"token": 7}, {"ids": []}):
        assert ask(port, "/contributions", {"ids": ids, "position": 6, "token": "q", **wrong})[0] == 400


def test_memory_that_runs_out_is_told_by_every_answer(desk, port, monkeypatch):
    name = record(desk.recordable.model, TEXT).recordings[0].attention(1).name

    def fill_memory(*given):
        torch.zeros(1 << 58, dtype=torch.uint8)

    monkeypatch.setattr(desk.recordable.model.embedding, "forward", fill_memory)
    for path, asked in (
        ("/record", {"text": TEXT}),
        ("/ablate", {"text": TEXT, "heads": [[name, 1]]}),
        ("/contributions", {"ids": list(TEXT.encode()), "position": 1, "token": "q"}),
    ):
        status, _, raw = ask(port, path, asked)
        assert status == 400 and b"out of memory while" in raw and b"more were asked for" in raw, (path, status, raw)
    last = lines(port, max_tokens=2)[-1]
    assert last["kind"] == "error" and "out of memory while" in last["message"]
    monkeypatch.undo()
    assert lines(port, max_tokens=2)[-1]["kind"] == "end"  # and the model is free again


@pytest.mark.browser
@torch.no_grad()
def test_heads_are_removed_in_the_browser(port, desk, chromium):
    """A head is removed in its view, and what the page then says is what the model says without it."""
    model = desk.recordable.model.eval()
    said = []
    page = chromium.new_context().new_page()
    page.on("console", lambda m: said.append(m.text))
    page.on("pageerror", lambda e: said.append(str(e)))
    page.goto(f"http://127.0.0.1:{port}/?token={TOKEN}")
    page.wait_for_selector(".heads[data-state=done]")
    page.get_by_role("textbox", name="Text", exact=True).fill(TEXT)
    page.get_by_role("button", name="Read", exact=True).click()
    page.locator(".says", has_text="Read in").wait_for()
    page.get_by_label("tokens", exact=True).fill("5")
    page.get_by_label("temperature").fill("0")
    page.keyboard.press("Tab")
    page.evaluate("location.hash = 'view=head&a=1&h=2&r=1'")
    page.get_by_role("button", name="Remove this head").click()
    page.get_by_role("button", name="Put this head back").wait_for()
    page.get_by_role("button", name="Compare", exact=True).click()
    page.locator(".two-up").wait_for()
    written, loss, p = by_hand(model, list(TEXT.encode()), 1, 2, 5)
    column = page.get_by_label("Without 1 head")
    assert f"{loss:.3f}" in column.inner_text()
    best = float(p.max())
    assert column.locator(".best .n").first.inner_text() == f"{100 * best:.1f}%" or best < 0.1
    assert column.locator(".flow").text_content() == bytes(written).decode("utf-8", "replace")
    whole = generate(model, TEXT, Settings(max_tokens=5)).text
    assert page.get_by_label("All heads", exact=True).last.locator(".flow").text_content() == whole
    # Any other token is asked of the model.
    page.evaluate("location.hash = 'view=next&i=6&fixed=true&r=1'")
    page.get_by_label("Another token").fill("q")
    page.get_by_role("button", name="Ask").click()
    page.locator(".said .on", has_text="q").wait_for()
    logit = float(model(torch.tensor([list(TEXT.encode())]))[0, 6, ord("q")])
    assert f"logit {logit:.2f}".replace("-", "−") in page.locator(".grow > .note").inner_text()
    page.context.close()
    assert said == []
