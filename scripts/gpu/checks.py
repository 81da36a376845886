"""What `gpu_bench` checks before it times anything: kernels against their twins, the loop against single steps.

Everything is compared on the same device, so that a difference is the kernel's. Rows say what was compared, the
difference, and whether it is within the tolerance that stands beside its reason.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qspec.nn.cuda.cache import CudaCache
from qspec.nn.cuda.decoder import CudaDecoder, Pool
from qspec.nn.cuda.loop import CudaLoop, DraftRule, Greedy, Sampled
from qspec.nn.cuda.model import CudaModel
from qspec.nn.cuda.passes import Inputs, Passes
from qspec.numerics.quantization.affine import quantize_weight
from qspec.numerics.quantization.blocks import PerChannel, PerGroup
from qspec.numerics.quantization.formats import FP8_E4M3, INT4, INT8, NumFormat
from qspec.numerics.speculation.probs import target_probs
from qspec.ops import cuda as ops, reference_cuda as twins
from scripts.gpu import models as gpu_models

Row = dict[str, Any]
CODES = 2e-3
"""Share of codes that may differ: values at a tie of rounding go one step the other way where sums differ in order."""
CLOSE = 1e-2
"""Relative error of values in bfloat16, which has 8 bits: one rounding more or less changes the last of them."""
LOGITS = 5e-2
"""Relative error of logits behind two layers in codes: a code that goes the other way moves what follows."""


def row(name: str, error: float, tolerance: float, **facts: Any) -> Row:
    return {"part": "checks", "name": name, "error": error, "tolerance": tolerance, "ok": error <= tolerance, **facts}


def checks(device: torch.device) -> Iterator[Row]:
    """One row for each comparison; an operation that raises is a row too, and the last one if the device is lost."""
    cases: list[tuple[str, Callable[[torch.device], Row]]] = [
        *((f"quantize_rows {fmt.name}", _quantizing(fmt)) for fmt in (FP8_E4M3, INT8)),
        *((f"add_rms_norm {fmt.name if fmt else 'bf16'}", _norming(fmt)) for fmt in (None, FP8_E4M3, INT8)),
        *((f"silu_mul {fmt.name if fmt else 'bf16'}", _activating(fmt)) for fmt in (None, FP8_E4M3, INT8)),
        *(
            (f"linear {scheme}, {rows} rows", _multiplying(scheme, rows))
            for scheme in WEIGHTS
            for rows in (1, 5, 64, 300)
        ),
        *((f"rope_write and attend, cache {name}", _attending(kv, stored)) for name, kv, stored in CACHES),
        ("verify_greedy", _verifying(None)),
        ("verify_sampling", _verifying(Sampled(lambda x: target_probs(x, 0.7)))),
        *((f"logits {scheme}, kernels on the device and twins on the CPU", _logits(scheme)) for scheme in WEIGHTS),
        *((f"loop {scheme}: graphs and single calls", _graphs(scheme)) for scheme in ("BF16", "FP8")),
        ("loop float32: the engine's tokens", _engine),
    ]
    for name, case in cases:
        try:
            yield {**case(device), "name": name}
        except Exception as error:
            yield {**row(name, float("inf"), 0.0), "raised": f"{type(error).__name__}: {error}"}
            if lost_device(error):
                raise


def lost_device(error: Exception) -> bool:
    """Whether nothing can run on the GPU in this process any more, in torch's words or Triton's."""
    return any(text in str(error) for text in ("CUDA error", "Triton Error [CUDA]"))


WEIGHTS = ("BF16", "FP8", "W8A8", "W4A16")
CACHES = ("bf16", None, False), ("fp8, one scale", FP8_E4M3, True), ("int8 per token and head", INT8, False)


@dataclass(frozen=True)
class _Draw:
    """Random numbers on a device."""

    device: torch.device
    generator: torch.Generator

    @classmethod
    def on(cls, device: torch.device) -> "_Draw":
        return cls(device, torch.Generator(device).manual_seed(1))

    def __call__(self, *size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(size, device=self.device, generator=self.generator, dtype=torch.float32).to(dtype)


def relative(got: Tensor, want: Tensor) -> float:
    """Of the Frobenius norm."""
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


def differing(got: Tensor, want: Tensor) -> float:
    return float((got.view(torch.uint8) != want.view(torch.uint8)).double().mean())


def _rounded(got: twins.Rows, want: twins.Rows) -> Row:
    """Codes by how many differ, scales and plain values by their size."""
    if got[1] is None or want[1] is None:
        return row("", relative(got[0], want[0]), CLOSE)
    return row("", differing(got[0], want[0]), CODES, scale_error=relative(got[1], want[1]))


def _quantizing(fmt: NumFormat) -> Callable[[torch.device], Row]:
    def case(device: torch.device) -> Row:
        x_NH = _Draw.on(device)(33, 512)
        return _rounded(ops.quantize_rows(x_NH, fmt), twins.quantize_rows(x_NH, fmt))

    return case


def _norming(fmt: NumFormat | None) -> Callable[[torch.device], Row]:
    def case(device: torch.device) -> Row:
        draw = _Draw.on(device)
        given = draw(33, 512), draw(33, 512), draw(512, dtype=torch.float32), 1e-5, fmt, None
        got, scale_N, sum_NH = ops.add_rms_norm(*given)
        want, want_scale_N, want_sum_NH = twins.add_rms_norm(*given)
        rounded = _rounded((got, scale_N), (want, want_scale_N))
        return rounded | {"ok": rounded["ok"] and torch.equal(sum_NH, want_sum_NH)}

    return case


def _activating(fmt: NumFormat | None) -> Callable[[torch.device], Row]:
    def case(device: torch.device) -> Row:
        x_N2I = _Draw.on(device)(33, 1024)
        return _rounded(ops.silu_mul(x_N2I, fmt, None), twins.silu_mul(x_N2I, fmt, None))

    return case


def _multiplying(scheme: str, rows: int) -> Callable[[torch.device], Row]:
    def case(device: torch.device) -> Row:
        draw = _Draw.on(device)
        x_NK, w_OK = draw(rows, 512), draw(768, 512)
        weight, inputs = ops.CudaWeight(w_OK, None, None, None), None
        if scheme != "BF16":
            fmt = {"FP8": FP8_E4M3, "W8A8": INT8, "W4A16": INT4}[scheme]
            weight = ops.pack(quantize_weight(w_OK, fmt, PerGroup(128) if fmt == INT4 else PerChannel()))
            inputs = None if fmt == INT4 else fmt
        x: twins.Rows = (x_NK, None) if inputs is None else twins.quantize_rows(x_NK, inputs)
        return row("", relative(ops.linear(x, weight), twins.linear(x, weight)), CLOSE)

    return case


def _attending(kv: NumFormat | None, stored: bool) -> Callable[[torch.device], Row]:
    """Sequences of other lengths, one that holds nothing, and rows of a chain: written, then read."""

    def case(device: torch.device) -> Row:
        draw, (b, r, q, g, d, length) = _Draw.on(device), (4, 5, 8, 2, 64, 300)
        lengths_B = torch.tensor([0, 1, 77, 290], device=device)
        given = Inputs.chain(torch.zeros(b, r, dtype=torch.long, device=device), lengths_B)
        q_BRQD, k_BRGD, v_BRGD = draw(b, r, q, d), draw(b, r, g, d), draw(b, r, g, d)
        angles_LD = torch.outer(
            torch.arange(length, device=device).float(), torch.linspace(0.01, 1, d // 2, device=device)
        )
        tables = [torch.cat((x, x), -1).bfloat16() for x in (angles_LD.cos(), angles_LD.sin())]
        old_BGLD = draw(b, g, length, d)
        results: list[tuple[Tensor, ...]] = []
        for side in (ops, twins):
            layer = _layer(old_BGLD, kv, stored)
            out = side.rope_write(
                q_BRQD, k_BRGD, v_BRGD, *tables, given.positions_BR, given.slots_BR.contiguous(), layer
            )
            y_BRQD = side.attend(out, layer, lengths_B, given.ancestors_BR.contiguous(), d**-0.5)
            results.append((out, y_BRQD, layer.k_BGLD, layer.v_BGLD))
        (q_got, y_got, *codes), (q_want, y_want, *expected) = results
        changed = max(differing(x, y) for x, y in zip(codes, expected, strict=True))
        error = max(relative(q_got, q_want), relative(y_got, y_want))
        made = row("", error, CLOSE, codes_differing=changed)
        return made | {"ok": made["ok"] and changed <= CODES}

    return case


def _layer(old_BGLD: Tensor, kv: NumFormat | None, stored: bool) -> ops.KVLayer:
    """A cache that holds something already."""
    if kv is None:
        return ops.KVLayer(old_BGLD.clone(), old_BGLD.clone())
    b, g, length, d = old_BGLD.shape
    codes, scale_N = twins.quantize_rows(
        old_BGLD.reshape(-1, d), kv, torch.tensor([0.05], device=old_BGLD.device) if stored else None
    )
    scales = [0.05 if stored else scale_N.reshape(b, g, length).clone() for _ in range(2)]
    return ops.KVLayer(*(codes.view(old_BGLD.shape).clone() for _ in range(2)), *scales)


def _verifying(rule: Sampled | None) -> Callable[[torch.device], Row]:
    def case(device: torch.device) -> Row:
        draw = _Draw.on(device)
        logits_BRV, drafts_BK = (
            draw(8, 4, 1000, dtype=torch.float32) * 4,
            torch.zeros(8, 3, dtype=torch.long, device=device),
        )
        if rule is None:
            drafts_BK = logits_BRV[:, :3].argmax(-1)
            drafts_BK[::2, 1] = 7
            got, want = ops.verify_greedy(logits_BRV, drafts_BK), twins.verify_greedy(logits_BRV, drafts_BK)
        else:
            draft_probs_BKV = target_probs(logits_BRV + draw(8, 4, 1000, dtype=torch.float32), 0.7)[:, :3].contiguous()
            drafts_BK = draft_probs_BKV.argmax(-1)
            uniforms_BR = torch.rand(8, 4, device=device, generator=draw.generator, dtype=torch.float64)
            probs_BRV = target_probs(logits_BRV, 0.7)
            given = probs_BRV, drafts_BK, draft_probs_BKV, uniforms_BR
            got, want = ops.verify_sampling(*given), twins.verify_sampling(*given)
        other = sum(int((x != y).sum()) for x, y in zip(got, want, strict=True))
        return row("", float(other), 0.0)

    return case


def _model(
    scheme: str, device: torch.device, dtype: torch.dtype = torch.bfloat16, seed: int = 0, layers: int = 2
) -> CudaModel:
    """A small one, of weights that are the same on every device."""
    source = gpu_models.random_source(torch.device("cpu"), dtype, seed)
    model = gpu_models.build(gpu_models.small(layers), scheme, source, torch.device("cpu"), dtype=dtype)
    moved: CudaModel = _moved(model, device)
    return moved


def _moved(part: Any, device: torch.device) -> Any:
    """A dataclass whose tensors, however deep, lie on another device."""
    if isinstance(part, Tensor):
        return part.to(device)
    if isinstance(part, tuple):
        return tuple(_moved(x, device) for x in part)
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{f.name: _moved(getattr(part, f.name), device) for f in fields(part)})
    return part


def _logits(scheme: str) -> Callable[[torch.device], Row]:
    """A prompt and a pass behind it."""

    def case(device: torch.device) -> Row:
        out = list[Tensor]()
        for place in (device, torch.device("cpu")):
            decoder = CudaDecoder(Pool(_model(scheme, place), 128, 1))
            tokens_T = torch.randint(0, 512, (85,), generator=torch.Generator().manual_seed(2))
            out.append(torch.cat([decoder.forward(part).cpu() for part in tokens_T.split([80, 5])]))
        return row("", relative(*out), LOGITS)

    return case


def _loop(scheme: str, device: torch.device, rule: DraftRule, dtype: torch.dtype) -> CudaLoop:
    """Three sequences, a draft that is the first layer of its target."""
    target, draft = (_model(scheme, device, dtype, layers=n) for n in (2, 1))
    loop = CudaLoop(_passes(target), _passes(draft), rule, 3, steps=8)
    for slot, prompt_T in enumerate(_prompts()):
        loop.begin(slot, prompt_T, 100, torch.zeros(1, dtype=torch.float64))
    return loop


def _passes(model: CudaModel) -> Passes:
    return Passes(model, CudaCache(model, 3, 256))


def _prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 512, (n,), generator=generator) for n in (40, 1, 90)]


def _graphs(scheme: str) -> Callable[[torch.device], Row]:
    """The same steps replayed and called one by one: the same kernels, so not one token may differ."""

    def case(device: torch.device) -> Row:
        records = list[Tensor]()
        for replayed in (True, False):
            loop = _loop(scheme, device, Sampled(lambda x: target_probs(x, 0.7)), torch.bfloat16)
            uniforms = torch.rand(8, 3, 7, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
            loop.feed(uniforms)
            with torch.inference_mode():
                if replayed:
                    loop.run(3, 3, 8)
                else:
                    for _ in range(8):
                        loop.step(3, 3)
            records.append(torch.cat([loop.state.tokens_SBR, loop.state.counts_SB[..., None]], -1).cpu())
        return row("", float((records[0] != records[1]).sum()), 0.0, tokens=records[0][..., -1].sum().item())

    return case


def _engine(device: torch.device) -> Row:
    """Greedy tokens of the loop and of passes one by one, up to a near tie (the first two logits closer than 1e-4)."""
    loop, compared = _loop("BF16", device, Greedy(), torch.float32), 0
    target = _model("BF16", device, torch.float32)
    firsts = loop.state.newest_B.tolist()
    loop.run(3, 3, 8)
    steps_of, _ = loop.read(3, 8)
    for slot, prompt_T in enumerate(_prompts()):
        mine = [firsts[slot], *(token for step in steps_of[slot] for token in step)]
        decoder = CudaDecoder(Pool(target, 256, 1))
        theirs = list[int]()
        while len(theirs) < len(mine):
            logits_V = decoder.forward(torch.tensor(theirs[-1:]) if theirs else prompt_T, last=1)[0]
            theirs.append(int(logits_V.argmax()))
        at = next((i for i, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1]), len(mine))
        compared += at
        if at < len(mine):
            decoder.truncate(0)
            best = decoder.forward(torch.tensor([*prompt_T.tolist(), *theirs[:at]]), last=1)[0].topk(2).values
            if float(best[0] - best[1]) > 1e-4:
                return row("", 1.0, 0.0, differs_at=at, margin=float(best[0] - best[1]))
    return row("", 0.0, 0.0, tokens=compared)
