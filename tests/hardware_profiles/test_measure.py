"""Measuring: tables that survive an interruption, servers, torch kernels."""

import csv
import json
import socketserver
import threading
import time
from http.server import BaseHTTPRequestHandler

import pytest

from servegym.hardware_profiles import load
from servegym.hardware_profiles.calibrate import calibrate
from servegym.hardware_profiles.measure import command as measure
from servegym.hardware_profiles.measure import server as measure_server
from servegym.hardware_profiles.measure.table import ResumableTable


def rows_of(path):
    with open(path, newline="") as stream:
        return list(csv.DictReader(stream))


def test_a_table_goes_on_after_an_interruption(tmp_path):
    path = tmp_path / "t.csv"
    table = ResumableTable(path, ("name", "n", "time_us"), ("name", "n"))
    table.add({"name": "b", "n": 16, "time_us": 2.5})
    table.add({"name": "b", "n": 2, "time_us": 1.5})
    with path.open("a") as stream:
        stream.write("b,32,9")  # cut off in the middle of a number
    again = ResumableTable(path, ("name", "n", "time_us"), ("name", "n"))
    assert ("b", 16) in again and ("b", 2) in again and ("b", 32) not in again
    again.add({"name": "a", "n": 4, "time_us": 3})
    again.sort()
    assert [row["name"] + row["n"] for row in rows_of(path)] == ["a4", "b2", "b16"]
    assert [p.name for p in tmp_path.iterdir()] == ["t.csv"]


def test_a_table_of_something_else_is_refused(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("x,y\n1,2\n")
    with pytest.raises(ValueError, match="columns are x, y"):
        ResumableTable(path, ("x", "z"), ("x",))
    path.write_text("x,z\n1\n")
    with pytest.raises(ValueError, match="t.csv:2"):
        ResumableTable(path, ("x", "z"), ("x",))
    with pytest.raises(ValueError, match="folder"):
        ResumableTable(tmp_path / "no" / "t.csv", ("x",), ("x",))


FIRST_S, NEXT_S = 0.05, 0.01
WORD, DONE = b'data: {"choices": [{"text": "w"}]}\n\n', b"data: [DONE]\n\n"


class Handler(BaseHTTPRequestHandler):
    """Streams tokens at a known pace."""

    protocol_version = "HTTP/1.0"

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.seen.append((self.path, body, self.headers.get("Authorization")))
            server.inside += 1
            server.most = max(server.most, server.inside)
        try:
            if server.mode == "error":
                self.send_error(503, f"busy with {self.headers.get('Authorization')}")
                return
            self.send_response(200)
            self.end_headers()
            if isinstance(server.mode, bytes):
                self.wfile.write(server.mode)
                return
            chat = "messages" in body
            for i in range(body["max_tokens"]):
                time.sleep(NEXT_S if i else FIRST_S)
                choice = {"delta": {"content": "w "}} if chat else {"text": "w "}
                self.wfile.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
                self.wfile.flush()
            usage = {"prompt_tokens": 7, "completion_tokens": body["max_tokens"]}
            last = {"choices": [], "usage": usage}
            self.wfile.write(b": comment\n\ndata: " + json.dumps(last).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")
        finally:
            with server.lock:
                server.inside -= 1


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64


@pytest.fixture
def server():
    with Server(("127.0.0.1", 0), Handler) as found:
        found.lock, found.seen, found.mode = threading.Lock(), [], "good"
        found.inside = found.most = 0
        found.url = f"http://127.0.0.1:{found.server_address[1]}/v1"
        thread = threading.Thread(target=found.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_a_server_is_timed(server, tmp_path, api, capsys, monkeypatch):
    monkeypatch.setenv("MY_KEY", "not-a-secret")
    out = tmp_path / "server.csv"
    arguments = ["server", "--url", server.url, "--model", "m", "--api", api, "--out", str(out)]
    arguments += ["--loads", "1,3", "--requests", "3", "--output-tokens", "6"]
    arguments += ["--prompt-words", "5", "--api-key-env", "MY_KEY"]
    assert measure.main(arguments) == 0
    rows = rows_of(out)
    assert len(rows) == 6 and not any(row["error"] for row in rows)
    best = {name: min(float(row[name]) for row in rows) for name in ("ttft_s", "tpot_s", "e2e_s")}
    # The server's sleeps are floors; the least of six is near them even on a busy machine.
    assert FIRST_S <= best["ttft_s"] < FIRST_S + 0.1
    assert 0.9 * NEXT_S <= best["tpot_s"] < NEXT_S + 0.02
    assert best["e2e_s"] >= FIRST_S + 5 * NEXT_S
    assert {(row["prompt_tokens"], row["output_tokens"]) for row in rows} == {("7", "6")}
    assert server.most == 3
    paths, bodies, keys = zip(*server.seen, strict=True)
    assert set(paths) == {"/v1/chat/completions" if api == "chat" else "/v1/completions"}
    assert set(keys) == {"Bearer not-a-secret"}
    prompts = [b["messages"][0]["content"] if api == "chat" else b["prompt"] for b in bodies]
    assert len(set(prompts)) == 6 and all(len(p.split()) == 5 for p in prompts)
    assert all(b["stream"] and b["max_tokens"] == 6 for b in bodies)
    assert "tokens/s" in capsys.readouterr().out
    assert measure.main(arguments) == 0  # all there: nothing is sent
    assert len(server.seen) == 6


def test_a_query_of_the_address_is_sent(server):
    url = server.url + "/deployments/m/?api-version=1"
    measure_server.ask(measure_server.Endpoint(url, "m", output_tokens=2), "some words")
    assert server.seen[0][0] == "/v1/deployments/m/completions?api-version=1"


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("error", "status 503"),
        (b"data: {not json\n\n", "not JSON"),
        (WORD, "ended early"),
        (3 * WORD + b'data: {"object": "error", "message": "engine st"}\n\n' + DONE, "engine st"),
        (3 * WORD + b'data: {"choices": [], "usage": 5}\n\n' + DONE, "not JSON of OpenAI"),
        (b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n' + DONE, "with 'stop'"),
        (DONE, "does the server stream?"),
    ],
)
def test_a_failing_server_is_reported(server, tmp_path, mode, words):
    server.mode = mode
    endpoint = measure_server.Endpoint(server.url, "m", output_tokens=3, api_key="s3cret")
    with pytest.raises(ValueError, match=words) as caught:
        measure_server.measure(endpoint, tmp_path / "s.csv", loads=[2], requests=2)
    assert "s3cret" not in str(caught.value) + (tmp_path / "s.csv").read_text()
    assert [words in row["error"] for row in rows_of(tmp_path / "s.csv")] == [True, True]
    server.mode = "good"  # what failed is sent again
    measure_server.measure(endpoint, tmp_path / "s.csv", loads=[2], requests=3)
    assert [row["error"] for row in rows_of(tmp_path / "s.csv")] == ["", "", ""]


@pytest.mark.parametrize(
    ("counts", "tokens"),
    [((0, 0, 0, 0), 4), ((0, 0, 0, 9), 9), ((1, 2, 3, 0), 4), ((2, 4, 6, 8), 8), ((1, 1, 1, 1), 4)],
)
def test_a_count_below_the_tokens_seen_does_not_lower_it(server, tmp_path, counts, tokens):
    word = {"choices": [{"delta": {"content": "a"}}]}
    usages = [{"prompt_tokens": 5 * (k < 3), "completion_tokens": n} for k, n in enumerate(counts)]
    events = [f"data: {json.dumps({**word, 'usage': usage})}\n\n".encode() for usage in usages]
    server.mode = b"".join(events) + DONE
    endpoint = measure_server.Endpoint(server.url, "m", output_tokens=4)
    measure_server.measure(endpoint, tmp_path / "s.csv", loads=[1], requests=1)
    (row,) = rows_of(tmp_path / "s.csv")
    assert (row["error"], row["prompt_tokens"], row["output_tokens"]) == ("", "5", str(tokens))


def time_by_memory_traffic(monkeypatch):
    """Let an operation take 10 ns, and a microsecond for a million values read and written.

    How long it takes in truth depends on what else the machine does.
    """
    torch = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from servegym.hardware_profiles.measure import gpu as measure_gpu

    class Traffic(TorchDispatchMode):
        values = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            tensors = [x for x in tree_leaves((args, kwargs, found)) if torch.is_tensor(x)]
            self.values += sum(x.numel() for x in tensors)
            return found

    def time_s(clock, steps, *, graph=True):
        with Traffic() as traffic:
            steps[0]()
        return 1e-8 + 1e-12 * traffic.values

    monkeypatch.setattr(measure_gpu.Clock, "time_s", time_s)


def test_measure_then_calibrate_gives_a_profile(tmp_path, monkeypatch, capsys):
    time_by_memory_traffic(monkeypatch)
    folder = tmp_path / "tiny"
    arguments = ["gpu", "--model", "tiny", "--device", "cpu", "--out", str(folder)]
    assert measure.main(arguments) == 0
    assert {row["layer"] for row in rows_of(folder / "dense.csv")} >= {"qkv_proj", "embedding"}
    settings = json.loads((folder / "calibrate.json").read_text())
    out = tmp_path / "profile.json"
    assert calibrate.main([str(folder), "-o", str(out)]) == 0
    profile = load(out)
    assert profile.name == settings["--name"]
    assert profile.model["name"] == "tiny" and profile.kv_capacity_tokens > 0
    assert profile.prefill_s(256) > profile.prefill_s(16) > 0
    assert profile.decode_s(16, 16 * 1024) > profile.decode_s(1, 16) > 0
    assert "own measurement" in profile.provenance["source"]
    assert any("contiguous keys" in note for note in profile.provenance["notes"])

    # A whole layer moves the values that its parts move.
    layers = rows_of(folder / "layer.csv")
    assert [row["n_decode"] for row in layers] == ["1", "16", "0"]
    for row in layers:
        assert float(row["parts_us"]) == pytest.approx(float(row["layer_us"]), rel=0.05)
    assert "16 decodes of 128 tokens" in capsys.readouterr().out

    # On a GPU a table whose parts add up to something else is refused.
    meta, text = folder / "meta.yaml", (folder / "layer.csv").read_text()
    half = text.replace(layers[1]["layer_us"], str(0.5 * float(layers[1]["layer_us"])))
    (folder / "layer.csv").write_text(half)
    assert calibrate.main([str(folder), "-o", str(out)]) == 0
    card = meta.read_text()
    meta.write_text(card.replace("gpu: CPU", "gpu: H200"))
    with pytest.raises(ValueError, match="layer.csv:3: field 'parts_us'.*more than 10% off"):
        calibrate.main([str(folder), "-o", str(out)])
    (folder / "layer.csv").unlink()  # tables without whole layers stay readable
    assert calibrate.main([str(folder), "-o", str(out)]) == 0
    assert "no layer.csv" in load(out).provenance["notes"][3]
    meta.write_text(card)

    # Interrupted: only what is missing is measured again.
    lines = (folder / "dense.csv").read_text().splitlines(keepends=True)
    (folder / "dense.csv").write_text("".join(lines[:-2]) + lines[-2][:5])
    from servegym.hardware_profiles.measure import gpu as measure_gpu

    clock = measure_gpu.Clock("cpu")
    assert measure_gpu.measure_dense("tiny", folder, clock) == 2
    assert len(rows_of(folder / "dense.csv")) == len(lines) - 1
    (folder / "meta.yaml").write_text("gpu: another\n")
    with pytest.raises(ValueError, match="another device"):
        measure_gpu.measure_dense("tiny", folder, clock)


GPU = ["gpu", "--device", "cpu", "--model"]
SERVER = ["server", "--model", "m", "--url"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*GPU, "tinny"], "did you mean 'tiny'"),
        ([*SERVER, "127.0.0.1:8000"], "url"),
        ([*SERVER, "http://x/v1", "--requests", "1000000"], "requests"),
        ([*SERVER, "http://x/v1", "--api-key-env", "NOT_SET"], "NOT_SET"),
        ([*SERVER, "http://x/v1", "--api-key-env", "TWO_LINES"], "^api-key has a character"),
    ],
)
def test_bad_arguments_are_refused(tmp_path, monkeypatch, words, said):
    pytest.importorskip("torch")
    monkeypatch.delenv("NOT_SET", raising=False)
    monkeypatch.setenv("TWO_LINES", "s3cret\n")
    out = ["--out", str(tmp_path / "out.csv")]
    with pytest.raises(ValueError, match=said):
        measure.main([*words, *out])
    assert words[0] == "gpu" or not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_kernels_on_a_gpu(tmp_path):
    arguments = ["gpu", "--model", "tiny", "--out", str(tmp_path / "dense")]
    assert measure.main(arguments) == 0
    out = tmp_path / "p.json"
    assert calibrate.main([str(tmp_path / "dense"), "-o", str(out)]) == 0
    assert load(out).decode_s(1, 16) > 0


@pytest.mark.slow
def test_a_link_is_timed_by_processes_that_reduce_together(capsys):
    pytest.importorskip("torch")
    assert measure.main(["link", "--cards", "2", "--backend", "gloo"]) == 0
    shown = capsys.readouterr().out
    assert 1.0 < float(shown.rpartition("--link ")[2]) < 1e6
    with pytest.raises(ValueError, match="--cards: got 1; a link is between 2 or more"):
        measure.main(["link", "--cards", "1"])
