"""A complete set of made-up results: every part of the report has something to show, some of it hostile."""

from qspec.measure.needle import summary
from qspec.schema.results import (
    Acceptance,
    Accuracy,
    Answer,
    Answers,
    ArmSpeed,
    BatchSpeed,
    DraftFidelity,
    Equality,
    Fidelity,
    Measurement,
    Mismatch,
    NeedleRow,
    Needles,
    Prediction,
    PromptFacts,
    Ratio,
    Results,
    Speed,
    Spread,
    SubTask,
    TaskResult,
    TaskRow,
    Window,
)

HOSTILE = "<script>alert('x')</script> & \"quotes\" | `code` *bold* [link](http://example.org) </pre>"


PROMPTS = tuple(
    PromptFacts(category=("chat", "coding", "summary")[i % 3], tokens=40 * 2 ** (i // 3)) for i in range(12)
)


KL = tuple(enumerate(0.0213 * (1 + 0.02 * (i - 7.5)) for i in range(16)))


def measurement(metric: str, value: float, ci: tuple[float, float] | None = None, n: int = 16) -> Measurement:
    return Measurement(metric=metric, value=value, unit="nats/token", n=n, ci=ci, condition={"data": "wikitext2"})


def task(quantized: float = 0.30, verdict: str = "no difference detected, McNemar p = 0.6; …") -> TaskResult:
    row = TaskRow(task="mmlu_pro_law", doc_id=0, doc_hash="d", prompt_hash="p", original=1.0, quantized=0.0)
    condition = {"rows_available": 12032, "max_gen_toks": 64, "fewshot": "5", "limit_per_task": 10}
    return TaskResult(
        task="mmlu_pro",
        backend="qspec",
        original=Measurement(
            metric="exact_match,custom-extract, original",
            value=0.32,
            unit="",
            n=140,
            ci=(0.25, 0.4),
            condition=condition,
        ),
        quantized=Measurement(
            metric="exact_match,custom-extract, quantized", value=quantized, unit="", n=140, ci=(0.23, 0.38)
        ),
        difference=Measurement(metric="quantized - original", value=quantized - 0.32, unit="", n=140, ci=(-0.06, 0.02)),
        recovery=quantized / 0.32,
        recovery_ci=(quantized / 0.32 - 0.15, quantized / 0.32 + 0.09),
        only_original=8,
        only_quantized=5,
        p_value=0.58,
        detectable=0.072,
        verdict=verdict,
        original_cut=0.1,
        quantized_cut=0.12,
        prompts_cut=3,
        sub_tasks=(
            sub_task("mmlu_pro_law", 0.3, 0.2),
            sub_task("mmlu_pro_math", 0.34, 0.4),
        ),
        rows=(row,),
    )


def sub_task(name: str, original: float, quantized: float) -> SubTask:
    difference = quantized - original
    ci = (difference - 0.09, difference + 0.09)
    measured = Measurement(metric="quantized - original", value=difference, unit="", n=70, ci=ci, detectable=0.14)
    return SubTask(task=name, n=70, original=original, quantized=quantized, difference=measured, p_value=0.4)


def arm(name: str, rate: float, speculative: bool) -> ArmSpeed:
    def spread(median: float, unit: str) -> Spread:
        return Spread(median=median, q1=0.9 * median, q3=1.1 * median, n=36, unit=unit)

    return ArmSpeed(
        arm=name,
        speculative=speculative,
        temperature=0.0,
        ttft=spread(85.3, "ms"),
        tpot=spread(1000 / rate, "ms/token"),
        decode_rate=spread(rate, "tokens/s"),
        total_rate=spread(0.8 * rate, "tokens/s"),
        weight_bytes=135_000_000,
        draft_bytes=28_000_000 if speculative else 0,
        kv_bytes_per_token=23_040,
        bytes_per_token=140e6,
        ceiling_tokens_s=250.0,
        time_share={"draft": 0.2, "verify": 0.7, "other": 0.1}
        if speculative
        else {"draft": 0, "verify": 1, "other": 0},
    )


def ratio(name: str, baseline: str, value: float, ci: tuple[float, float]) -> Ratio:
    speedup = Measurement(metric="time per token", value=value, unit="x", n=12, ci=ci, detectable=0.04)
    per_prompt = tuple(value * (1 + 0.01 * (i - 5.5)) for i in range(12))
    prompts = tuple(range(12))
    return Ratio(arm=name, baseline=baseline, temperature=0.0, speedup=speedup, per_prompt=per_prompt, prompts=prompts)


def acceptance(category: str, alpha: float) -> Acceptance:
    positions = tuple(alpha ** (i / 2 + 0.5) for i in range(5))
    return Acceptance(
        arm="quantized + draft",
        temperature=0.0,
        category=category,
        prompts=12 if category == "all" else 4,
        steps=300,
        drafted=1500,
        accepted=700,
        alpha=Measurement(metric="alpha", value=alpha, unit="", n=986, ci=(alpha - 0.03, alpha + 0.03)),
        tokens_per_step=3.33,
        tokens_per_step_ci=(3.1, 3.6),
        per_position=positions,
        per_position_ci=tuple((share - 0.05, min(1.0, share + 0.05)) for share in positions),
    )


def batch(name: str, size: int, rate: float, gain: float | None) -> BatchSpeed:
    ci = None if gain is None else (gain - 0.1, gain + 0.1)
    speedup = None if gain is None else Measurement(metric="tokens per second", value=gain, unit="x", n=6, ci=ci)
    spread = Spread(median=rate, q1=0.95 * rate, q3=1.05 * rate, n=6, unit="tokens/s")
    return BatchSpeed(
        arm=name,
        baseline="quantized",
        batch=size,
        temperature=0.0,
        rate=spread,
        speedup=speedup,
        draft_length=2.5,
        equal=12,
        answers=12,
    )


def speed(speculation: float = 1.42, mismatches: tuple[Mismatch, ...] = ()) -> Speed:
    low, high = speculation - 0.1, speculation + 0.1
    return Speed(
        prompts=PROMPTS,
        arms=(
            arm("original", 30.0, False),
            arm("quantized", 55.0, False),
            arm("quantized + draft", 55.0 * speculation, True),
        ),
        ratios=(
            ratio("quantized", "original", 1.83, (1.7, 1.95)),
            ratio("quantized + draft", "quantized", speculation, (low, high)),
            ratio("quantized + draft", "original", 1.83 * speculation, (1.83 * low, 1.83 * high)),
        ),
        acceptance=(acceptance("all", 0.71), acceptance("chat", 0.66), acceptance("coding", 0.8)),
        predictions=(
            Prediction(
                arm="quantized + draft",
                baseline="quantized",
                temperature=0.0,
                alpha=0.71,
                draft_length=5.0,
                draft_cost=0.2,
                verify_cost=1.3,
                predicted=1.31,
                measured=speculation,
            ),
        ),
        equality=(
            Equality(
                arm="quantized + draft", baseline="quantized", n=36, equal=36 - len(mismatches), mismatches=mismatches
            ),
        ),
        batches=(
            batch("quantized", 2, 90.0, None),
            batch("quantized + draft", 2, 117.0, 1.3),
            batch("quantized", 4, 160.0, None),
            batch("quantized + draft", 4, 136.0, 0.85),
        ),
        bandwidth=Measurement(metric="memory read", value=36e9, unit="B/s", n=5),
        condition={"prompts": 12, "data": "spec_bench", "repeats": 3},
    )


def needles() -> Needles:
    """The quantized target loses numbers as contexts grow, half of them to its KV cache."""
    rows = [
        NeedleRow(
            length=length,
            depth=0.5,
            hits={"original": 1.0, "quantized": float(i >= lost), "float_kv": float(i >= lost // 2)},
            nll={"original": 0.1, "quantized": 0.1 + 0.1 * lost + i / 100, "float_kv": 0.1 + 0.05 * lost},
        )
        for length, lost in ((512, 0), (1024, 1), (2048, 3))
        for i in range(12)
    ]
    return summary(rows, {"data": "gutenberg"})


def fidelity(kl: float = 0.0213, agreement: float = 0.942) -> Fidelity:
    return Fidelity(
        original_perplexity=measurement("perplexity, original", 29.63, (27.0, 32.1)),
        quantized_perplexity=measurement("perplexity, quantized", 30.51, (27.9, 33.0)),
        perplexity_ratio=measurement("perplexity, quantized / original", 1.0297, (1.02, 1.04)),
        kl=measurement("KL(original || quantized)", kl, (0.9 * kl, 1.1 * kl)),
        top1_agreement=measurement("top-1 agreement", agreement, (agreement - 0.01, agreement + 0.01)),
        windows=tuple(
            Window(original_nll=3.3 + i / 9, quantized_nll=3.33 + i / 9, kl=kl, agreement=0.94) for i, kl in KL
        ),
    )


def draft(kl: float = 0.05, agreement: float = 0.9, acceptance: float = 0.7) -> DraftFidelity:
    return DraftFidelity(
        kl=measurement("KL(draft as it came || draft)", kl),
        top1_agreement=measurement("top-1 agreement of the draft", agreement),
        acceptance=measurement("acceptance, draft", acceptance),
        unrounded_acceptance=measurement("acceptance, draft as it came", 0.75),
    )


def answer(text: str = "a cat sat", loop: float = 0.1, original_loop: float = 0.1) -> Answer:
    return Answer(original="a dog ran", quantized=text, original_loop=original_loop, quantized_loop=loop)


def sound() -> Accuracy:
    """What a pair that is ready was measured to be."""
    return Accuracy(fidelity=fidelity(), answers=Answers(rows=(answer(),) * 4), draft=draft())


def example() -> Results:
    return Results(
        name="smollm2-135m-w8a8",
        recipe={
            "name": "smollm2-135m-w8a8",
            "description": HOSTILE,
            "device": "cpu",
            "budget": {"max_kl": 0.05, "min_recovery": 0.99, "ttft_s": 2.0},
        },
        environment={
            "python": "3.11.9",
            "torch": "2.13.0",
            "cpu": HOSTILE,
            "threads": "2",
            "engine": "C++ core (avx2)",
        },
        digests={"target/model.safetensors": "ab" * 32},
        accuracy=sound().model_copy(
            update={"needles": needles(), "tasks": (task(),), "skipped": ("mmlu_pro with backend hf: no folder",)}
        ),
        speed=speed(),
        notes={"target": ("model.layers.0: smoothing strength 0.6 (error 0.012)", HOSTILE), "draft": ()},
        limits=("one machine, one run",),
    )
