"""qspec's seat in optimum, and optimum's normalized configs as a witness."""

from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
import sys
import tomllib

from optimum.commands import optimum_cli
from optimum.utils.normalized_config import NormalizedConfigManager
import pytest

from qspec.bridges import optimum as seat
from qspec.bridges.hf import arch_from_config, read_config
from tests.tiny import KINDS, tiny_model

ROOT = Path(__file__).resolve().parents[2]
REGISTER = "optimum/commands/register/register_qspec.py"


@pytest.mark.parametrize("kind", KINDS)
def test_normalized_config_agrees(tmp_path: Path, kind: str) -> None:
    """Would catch a field that is read from another name than the model type uses."""
    from transformers import AutoConfig

    folder = tiny_model(kind, tmp_path)
    view = NormalizedConfigManager.get_normalized_config_class(kind)(AutoConfig.from_pretrained(folder))
    arch = arch_from_config(read_config(folder))
    assert (view.num_layers, view.hidden_size) == (arch.n_layers, arch.hidden_size)
    assert (view.num_attention_heads, view.vocab_size) == (arch.n_heads, arch.vocab_size)
    assert view.eos_token_id == arch.eos_ids[0]
    if view.has_attribute("num_key_value_heads"):
        assert view.num_key_value_heads == arch.n_kv_heads


def install(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What installing the wheel does: the register file joins optimum's namespace, unless it is there already."""
    if any((Path(entry) / REGISTER).is_file() for entry in sys.path):
        return
    (site / REGISTER).parent.mkdir(parents=True)
    (site / REGISTER).write_bytes((ROOT / "qspec" / "bridges" / "register_qspec.py").read_bytes())
    monkeypatch.syspath_prepend(str(site))


@pytest.mark.parametrize("status", [0, 2])
def test_command_is_discovered_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """Would catch a sub-command that optimum does not find, that loses options, or that hides a failure."""
    seen: list[list[str]] = []

    def main(arguments: list[str]) -> int:
        seen.append(arguments)
        return status

    def load(_: EntryPoint) -> Callable[[list[str]], int]:
        return main

    install(tmp_path, monkeypatch)
    script = EntryPoint("qspec", "qspec.cli:main", "console_scripts")
    monkeypatch.setattr(EntryPoint, "load", load)
    monkeypatch.setattr(seat, "entry_points", lambda **_: (script,))
    monkeypatch.setattr(sys, "argv", ["optimum-cli", "qspec", "run", "x.yaml", "--set", "seed=1"])
    with pytest.raises(SystemExit) as ended:
        optimum_cli.main()
    assert ended.value.code == status
    assert seen == [["run", "x.yaml", "--set", "seed=1"]]


def test_wheel_places_the_register_file() -> None:
    """Would catch a release whose `optimum-cli` does not know qspec, and a console script under another name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    forced = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert forced["qspec/bridges/register_qspec.py"] == REGISTER
    assert project["project"]["scripts"]["qspec"] == "qspec.cli:main"
