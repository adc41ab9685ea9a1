"""`mlx-mittens run`: mlx-lm's commands on our kernels, which print and return the same as alone."""

import contextlib
import http.server
import importlib.metadata
import json
import signal
import socket
import socketserver
import subprocess
import sys
import types

import mlx.core as mx
import pytest
from helpers import scripts, tiny

import mlx_mittens as mm
from mlx_mittens.cli.main import main

pytestmark = pytest.mark.usefixtures("lenient")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    mx.random.seed(7)
    return tiny.save(tmp_path_factory.mktemp("models") / "4bit", "llama-3.2-1b", mx.float32, 4)


def text(printed):
    """The generated text, without the times."""
    return printed.partition("Prompt:")[0]


def generating(folder):
    return ["--model", str(folder), "--prompt", "one two", "--max-tokens", "12"]


@pytest.mark.parametrize("words", [["mlx_lm.generate"], ["mlx_lm", "generate"]], ids=" ".join)
def test_generate(folder, capsys, monkeypatch, words):
    from mlx_lm.generate import main as alone

    monkeypatch.setattr(sys, "argv", ["mlx_lm.generate", *generating(folder)])
    alone()
    expected = capsys.readouterr().out
    assert "Generation: 12 tokens" in expected
    before = sys.argv
    assert main(["run", *words, *generating(folder)]) == 0
    printed = capsys.readouterr()
    assert text(printed.out) == text(expected) and printed.out.count("\n") == expected.count("\n")
    assert printed.err == "" and sys.argv is before
    ran = mm.stats(reset=True)
    assert sum(ran["rope_append"]["kernels"].values()) > 12 and not ran["rope_append"]["mx"]
    alone()
    assert not mm.stats()  # the patch is off again


def test_stats(folder, capsys):
    assert main(["run", "--stats", "mlx_lm.generate", *generating(folder)]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("op ") and "quantized_matmul" in printed.err and "rms_norm" not in printed.out


@pytest.mark.parametrize(
    "options, wanted",
    [([], (False, False)), (["--exact"], (True, False)), (["--activations", "int8"], (False, True))],
    ids=str,
)
def test_numerics(monkeypatch, options, wanted):
    during = []
    monkeypatch.setattr("mlx_lm.chat.main", lambda: during.append(asked[-1]))
    asked = []
    monkeypatch.setattr("mlx_mittens.patching.patches._ext.set_numerics", lambda *given: asked.append(given))
    assert main(["run", *options, "mlx_lm.chat"]) == 0
    assert during == [wanted] and asked[-1] == (False, False)


def test_arguments_are_the_commands_own(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr("mlx_lm.chat.main", lambda: seen.append(sys.argv))
    given = ["--stats", "--", "-x", "--version", "--help", "two words"]
    assert main(["run", "mlx_lm.chat", *given]) == 0
    assert main(["run", "mlx_lm.chat", "--", "x"]) == 0
    assert seen == [["mlx_lm.chat", *given], ["mlx_lm.chat", "--", "x"]] and capsys.readouterr().err == ""


def test_clients_that_come_at_one_moment(monkeypatch):
    """A server that is busy keeps them waiting, and answers all in the end."""
    bodies = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.path.encode())

        def log_message(self, *_):
            pass

    def serve():
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
            clients = [stack.enter_context(socket.create_connection(server.server_address, 20)) for _ in range(32)]
            for i, client in enumerate(clients):
                client.sendall(f"GET /{i} HTTP/1.0\r\n\r\n".encode())
            for _ in clients:
                server.handle_request()
            bodies.extend(client.makefile().read().rpartition("\n")[2] for client in clients)

    monkeypatch.setattr("mlx_lm.chat.main", serve)
    before = socketserver.TCPServer.request_queue_size
    assert main(["run", "mlx_lm.chat"]) == 0
    assert bodies == [f"/{i}" for i in range(32)] and socketserver.TCPServer.request_queue_size == before


def test_perplexity(folder, monkeypatch, capsys):
    class Lines(list):
        def __init__(self, *_, **__):
            super().__init__({"text": f"line {i} of this test " * 4} for i in range(8))

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=Lines))
    arguments = ["--model", str(folder), "--sequence-length", "32", "--num-samples", "4", "--data-path", "lines"]
    assert main(["run", "--stats", "mlx_lm.perplexity", *arguments]) == 0
    ours = capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["mlx_lm.perplexity", *arguments])
    from mlx_lm.perplexity import main as alone

    alone()
    line = lambda out: next(line for line in out.splitlines() if line.startswith("Perplexity:"))
    assert line(ours.out) == line(capsys.readouterr().out)
    assert "scaled_dot_product_attention" in ours.err


def test_a_command_in_a_process_of_its_own(folder, tmp_path):
    """LoRA's training on a data set in a folder, with mlx-lm imported after the patch."""
    for name in ("train", "valid", "test"):
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps({'text': 'a line of text'})}\n" * 4)
    arguments = ["--model", folder, "--data", tmp_path, "--train", "--iters", "2", "--batch-size", "2"]
    arguments += ["--num-layers", "2", "--adapter-path", tmp_path / "adapters", "--max-seq-length", "64"]
    command = scripts.command("run", "--stats", "mlx_lm", "lora", *arguments)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "adapters" / "adapters.safetensors").is_file() and "quantized_matmul" in done.stderr


@pytest.mark.parametrize("ended, status", [(None, 0), (0, 0), (3, 3), ("it failed", 1)])
def test_the_exit_status_is_the_commands(monkeypatch, capsys, ended, status):
    monkeypatch.setattr("mlx_lm.chat.main", lambda: ended)
    assert main(["run", "mlx_lm.chat"]) == status
    assert capsys.readouterr().err == ("it failed\n" if status == 1 else "")
    monkeypatch.setattr("mlx_lm.chat.main", lambda: sys.exit(ended))
    with pytest.raises(SystemExit) as error:
        main(["run", "--stats", "mlx_lm.chat"])
    assert error.value.code == ended
    assert capsys.readouterr().err == "no kernel ran, and no call went to mx\n"


def test_arguments_that_the_command_refuses(capsys):
    with pytest.raises(SystemExit) as error:
        main(["run", "mlx_lm.generate", "--no-such-option"])
    assert error.value.code == 2 and "mlx_lm.generate: error: unrecognized arguments" in capsys.readouterr().err


def test_an_error_of_the_command_is_its_own(monkeypatch):
    def fail():
        raise ZeroDivisionError

    monkeypatch.setattr("mlx_lm.chat.main", fail)
    before, handler = sys.argv, signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError):
        main(["run", "mlx_lm.chat"])
    assert sys.argv is before and signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.parametrize("words", [["mlx_lm.serve"], ["mlx_lm", "serve"], ["serve"], ["mlx_lm"]], ids=" ".join)
def test_a_name_that_is_not_there(capsys, words):
    assert main(["run", *words]) == 2
    name = words[-1] if words != ["mlx_lm", "serve"] else "mlx_lm.serve"
    said = capsys.readouterr().err
    assert f"has no command {name if name != 'mlx_lm' else 'mlx_lm.NAME'}; " in said and " are mlx_lm." in said
    points = importlib.metadata.distribution("mlx-lm").entry_points
    assert all(point.name in said for point in points if point.name.startswith("mlx_lm."))


def test_options_of_mlx_lm_itself(capsys):
    assert main(["run", "mlx_lm", "--version"]) == 0
    assert capsys.readouterr().out.strip() == importlib.metadata.version("mlx-lm")


def test_nothing_to_run(capsys):
    with pytest.raises(SystemExit) as error:
        main(["run", "--stats"])
    assert error.value.code == 2 and "mlx_lm.NAME" in capsys.readouterr().err


def test_a_function_that_moved(monkeypatch, capsys):
    from mlx_mittens.patching.target import PatchError

    class Moved(types.SimpleNamespace):
        def load(self):
            raise PatchError("[patch] mlx_lm.x is not there. mm.patch(cache=False) leaves it alone.")

    points = [Moved(name="mlx_lm.chat", group="console_scripts")]
    monkeypatch.setattr(
        importlib.metadata, "distribution", lambda _: types.SimpleNamespace(entry_points=points, version="1")
    )
    assert main(["run", "mlx_lm.chat"]) == 1
    assert capsys.readouterr().err.startswith("mlx-mittens run: [patch] mlx_lm.x is not there.")
