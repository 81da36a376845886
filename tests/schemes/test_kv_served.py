"""What of a KV scheme vLLM serves, by which flag, and why not."""

from typing import Any

import pytest

from qspec.schema.devices import read_device
from qspec.schema.quantization import KVSpec
from qspec.schemes.build import kv_scheme
from qspec.schemes.device_rules import device_findings, kv_flag, refusal, skip_flag

TOKEN = {"format": "int8", "granularity": "token_head"}
CHANNEL = {"format": "int8", "granularity": "channel"}


@pytest.mark.parametrize(
    ("kv", "reason"),
    [
        ({"format": "int4", "granularity": "token_head"}, "INT4 KV"),
        ({**TOKEN, "key": CHANNEL, "residual": 64}, "channel scales and a residual window"),
        ({**TOKEN, "value": {**TOKEN, "outliers": 1}}, "KV outliers"),
        ({"value": TOKEN}, "one format"),
    ],
)
def test_what_only_qspec_runs_is_refused_for_gpus(kv: dict[str, Any], reason: str) -> None:
    """Catches an export that a server loads as something else; on the CPU qspec runs it, and says so."""
    scheme = kv_scheme(KVSpec(**kv))
    assert scheme is not None
    assert reason in (refusal(scheme) or "")
    assert (kv_flag(scheme), skip_flag(scheme)) == ("auto", [])
    (found,) = device_findings(read_device("h100"), {}, scheme)
    assert (found.level, reason in found.rule) == ("refused", True)
    (found,) = device_findings(read_device("cpu"), {}, scheme)
    assert found.level == "note"


@pytest.mark.parametrize(
    ("kv", "flag"),
    [({}, "fp8"), ({"granularity": "head", "query": "head"}, "fp8"), (TOKEN, "int8_per_token_head")],
)
def test_what_is_served_has_a_flag(kv: dict[str, Any], flag: str) -> None:
    """Catches a wrong flag, and layers in float that the server is not told of."""
    assert kv_flag(kv_scheme(KVSpec(**kv))) == flag
    assert skip_flag(kv_scheme(KVSpec(**kv, skip_layers=(3, 0)))) == ["--kv-cache-dtype-skip-layers", "0", "3"]
    assert skip_flag(kv_scheme(KVSpec(**kv, skip_layers="auto"))) == []
