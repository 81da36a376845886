"""What of a KV scheme vLLM 0.33 can serve: its --kv-cache-dtype, or the reason why only qspec runs it."""

from qspec.plan import KVScheme

_SHORT = {"fp8_e4m3": "fp8", "int8": "int8"}


def refusal(kv: KVScheme) -> str | None:
    """Why vLLM cannot serve the scheme; None: it can."""
    key, value = kv.parts
    own = {
        "channel scales": "channel" in (key.granularity, value.granularity),
        "piecewise codes": key.piecewise or value.piecewise,
        "KV outliers": bool(key.outliers or value.outliers),
        "a residual window": kv.residual > 0,
        "INT4 KV": 4 in (key.fmt.bits, value.fmt.bits),
    }
    found = [what for what, asked in own.items() if asked]
    if found:
        return f"only qspec's cache has {' and '.join(found)}"
    if "fp8_e5m2" in (key.fmt.name, value.fmt.name):
        return "vLLM refuses E5M2 KV beside FP8 weights, and has corrupted output with it"
    return None if key == value else "vLLM stores keys and values in one format"


def kv_flag(kv: KVScheme | None) -> str:
    """The value of --kv-cache-dtype; `auto` for what vLLM cannot serve."""
    if kv is None or refusal(kv) is not None:
        return "auto"
    part = kv.parts[0]
    return f"{_SHORT[part.fmt.name]}_per_token_head" if part.granularity == "token_head" else _SHORT[part.fmt.name]


def skip_flag(kv: KVScheme | None) -> list[str]:
    """The arguments that keep layers in float; none where none are kept or known yet."""
    if kv is None or not kv.skip_layers or kv.skip_layers == "auto" or refusal(kv) is not None:
        return []
    return ["--kv-cache-dtype-skip-layers", *map(str, kv.skip_layers)]
