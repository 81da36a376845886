"""The loop on a device, on the eager twins of its operations: the tokens of the engine, and a host that keeps out."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from qspec.bridges.hf import load_folder
from qspec.errors import RecipeError
from qspec.models.layers import truncate_layers
from qspec.nn.cuda.cache import CudaCache
from qspec.nn.cuda.decoder import CudaDecoder
from qspec.nn.cuda.loop import CudaLoop, DraftRule, Greedy, Sampled, Synthetic
from qspec.nn.cuda.model import load
from qspec.nn.cuda.passes import Passes
from qspec.nn.eager.decoder import Decoder
from qspec.quantization.calibrate import calibrate
from qspec.quantization.rtn import quantize
from qspec.records import LoadedModel, QuantizedModel
from qspec.schema.quantization import KVSpec, QuantSpec
from qspec.schemes.build import build_plan
from qspec.speculation import device
from qspec.speculation.batch import GenerationRequest, generate_batch
from qspec.speculation.device import generate_on_device, obstacle, rule_of
from qspec.speculation.drafters.model import ModelDrafter
from qspec.speculation.drafters.ngram import NgramDrafter
from qspec.speculation.engine import generate
from qspec.speculation.length.policies import BatchLimited, Fixed, Heuristic
from qspec.speculation.types import DraftLength, Generation, Repeatable, Sampling
from tests.tiny import VOCAB_SIZE, tiny_model

TOKENS = torch.randint(5, VOCAB_SIZE, (90,), generator=torch.Generator().manual_seed(1)).tolist()
PROMPTS = [TOKENS[:20], TOKENS[20:21], TOKENS[21:90]]
NEW = (30, 12, 24)
GREEDY, WARM = Sampling(), Sampling(temperature=0.7, top_k=40, top_p=0.95)
ALWAYS = 10**9


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_folder(tiny_model("llama", tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def draft(target: LoadedModel) -> LoadedModel:
    """The target's first layer: it is right now and then."""
    return truncate_layers(target, 1)


def passes(model: LoadedModel | QuantizedModel, sequences: int) -> Passes:
    packed = load(model, torch.device("cpu"), torch.float32)
    return Passes(packed, CudaCache(packed, sequences, 128))


def looped(
    target: LoadedModel | QuantizedModel,
    draft: LoadedModel | None,
    rule: DraftRule,
    drafts: int,
    sequences: int = 3,
    **options: Any,
) -> CudaLoop:
    return CudaLoop(
        passes(target, sequences), None if draft is None else passes(draft, sequences), rule, drafts, **options
    )


def asked(
    drafter: Callable[[], ModelDrafter] | None = None, drafts: int = 0, longer: int = 0
) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            tokens,
            new + longer,
            torch.Generator().manual_seed(i),
            None if drafter is None else drafter(),
            Fixed(drafts) if drafts else None,
        )
        for i, (tokens, new) in enumerate(zip(PROMPTS, NEW, strict=True))
    ]


def engine(
    target: LoadedModel,
    draft: LoadedModel | None,
    sampling: Sampling,
    drafts: int,
    eos: tuple[int, ...] = (),
    longer: int = 0,
) -> list[list[int]]:
    """What the engine that runs here answers."""
    drafter = None if draft is None else lambda: ModelDrafter(Decoder.from_float(draft, max_length=128))
    prompts = asked(drafter, drafts, longer)
    found = generate_batch(Decoder.from_float(target, max_length=128), prompts, sampling, eos)
    return [answer.tokens for answer in found]


@pytest.mark.parametrize("drafts", [0, 1, 4])
@pytest.mark.parametrize("sequences", [1, 2, 3])
def test_greedy_tokens_are_those_of_the_engine(
    drafts: int, sequences: int, target: LoadedModel, draft: LoadedModel
) -> None:
    """Catches a draft cache one position behind, a roll-back that forgets, rows of a slot that was another's before."""
    want = engine(target, None, GREEDY, 0)
    loop = looped(target, draft if drafts else None, Greedy(), drafts, sequences, steps=3)
    heard: list[list[int]] = [[], [], []]
    found = generate_on_device(loop, asked(), ((1, ALWAYS, drafts),), lambda i, tokens: heard[i].extend(tokens))
    assert [answer.tokens for answer in found] == heard == want
    assert all(sum(step.accepted + 1 for step in answer.steps) == len(answer.tokens) - 1 for answer in found)
    steps = [step for answer in found for step in answer.steps]
    assert any(0 < step.accepted < step.drafted for step in steps) == (drafts > 1)


@pytest.mark.parametrize("drafts", [0, 3])
def test_sampled_tokens_are_those_of_the_engine(drafts: int, target: LoadedModel, draft: LoadedModel) -> None:
    """Catches uniform numbers of another step, sequence or purpose, and other distributions of draft or target."""
    want = engine(target, draft if drafts else None, WARM, drafts, longer=drafts)
    loop = looped(target, draft if drafts else None, rule_of(WARM), drafts, steps=4)
    found = generate_on_device(loop, asked(), ((1, ALWAYS, drafts),))
    # near the end the engine drafts fewer, so it is asked for a few tokens more
    assert [answer.tokens for answer in found] == [tokens[:new] for tokens, new in zip(want, NEW, strict=True)]


def test_a_stop_token_ends_an_answer_inside_accepted_drafts(target: LoadedModel) -> None:
    """Catches tokens behind a stop token, and drafts counted that nobody tested. The draft is the target: all stand."""
    plain = engine(target, None, GREEDY, 0)
    stop = plain[0][7]
    want = engine(target, None, GREEDY, 0, (stop,))
    found = generate_on_device(looped(target, target, Greedy(), 4, eos_ids=[stop]), asked(), ((1, ALWAYS, 4),))
    assert [answer.tokens for answer in found] == want
    assert found[0].stopped == "eos"
    assert all(step.drafted == step.accepted for answer in found for step in answer.steps)


def test_drafts_follow_the_schedule(target: LoadedModel, draft: LoadedModel) -> None:
    """Catches a schedule that counts slots instead of requests that go on, or tokens that a change of length loses."""
    loop = looped(target, draft, Greedy(), 4, steps=2)
    found = generate_on_device(loop, asked(), ((1, 1, 4), (2, 2, 1), (3, 8, 0)))
    assert [answer.tokens for answer in found] == engine(target, None, GREEDY, 0)
    lengths = [step.nodes for step in found[0].steps]
    assert lengths == sorted(lengths)
    assert set(lengths) == {0, 1, 4}


@pytest.mark.parametrize("kv", [KVSpec(format="fp8_e4m3"), KVSpec(format="int8", granularity="token_head")])
def test_codes_roll_back_like_floats(kv: KVSpec, target: LoadedModel, draft: LoadedModel) -> None:
    """Catches rejected drafts whose codes or scales stay behind: drafts must not change what a quantized pair says."""
    whole = quantize(target, calibrate(target, [TOKENS]), build_plan(QuantSpec(scheme="W8A8", kv=kv)))
    plain = generate_on_device(looped(whole, None, Greedy(), 0), asked(), ((1, ALWAYS, 0),))
    drafted = generate_on_device(looped(whole, draft, Greedy(), 3), asked(), ((1, ALWAYS, 3),))
    assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain]


def test_synthetic_drafts_stand_as_often_as_asked(target: LoadedModel, draft: LoadedModel) -> None:
    """Catches a chance that is applied to every draft on its own, or the engine's drafts counted instead."""
    prompts = [GenerationRequest(TOKENS[:5], 100, torch.Generator().manual_seed(i)) for i in range(12)]
    found = generate_on_device(looped(target, draft, Synthetic(0.8), 3), prompts, ((1, ALWAYS, 3),))
    steps = [step for answer in found for step in answer.steps if step.drafted == 3]
    # 0.8 + 0.64 + 0.512 of 3 stand; about 400 steps, so three standard errors are 0.2
    assert abs(sum(step.accepted for step in steps) / len(steps) - 1.952) < 0.2


def test_what_has_no_room_is_refused(target: LoadedModel) -> None:
    """Catches a request that would write over the spare position, or stop in silence."""
    loop = looped(target, target, Greedy(), 4)
    with pytest.raises(RecipeError, match=r"20 \+ 105 tokens.*leave 124 beside 4 drafts"):
        generate_on_device(loop, [GenerationRequest(TOKENS[:20], 105, torch.Generator())], ((1, 1, 4),))
    with pytest.raises(RecipeError, match="empty prompt"):
        generate_on_device(loop, [GenerationRequest([], 5, torch.Generator())], ((1, 1, 4),))
    with pytest.raises(RecipeError, match="64 drafts"):
        looped(target, target, Greedy(), 64)


class NoHost(TorchFunctionMode):
    """Fails on whatever makes the host wait for a tensor, or gives the device one from the host."""

    READS = frozenset(
        {"item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "equal", "allclose", "unique", "is_nonzero"}
        | {"__bool__", "__int__", "__float__", "__index__", "tensor", "as_tensor", "argwhere"}
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert getattr(func, "__name__", "") not in self.READS, f"{func.__name__} waits for the device"
        return func(*args, **(kwargs or {}))


class NoScalar(TorchDispatchMode):
    """The same, below: what operators do by themselves, such as indexing by a mask."""

    READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "lift_fresh")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = (
            [x for x in args[1] if x is not None and x.dtype == torch.bool]
            if name in ("index", "index_put", "index_put_")
            else []
        )
        assert name not in self.READS, f"{func} waits for the device"
        assert not masks, f"{func} by a mask waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rule", [Greedy(), Sampled(WARM.probs), Synthetic(0.5)], ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("kv", [None, KVSpec(format="fp8_e4m3"), KVSpec(format="int8", granularity="token_head")])
def test_a_step_never_asks_the_host(
    rule: DraftRule, kv: KVSpec | None, target: LoadedModel, draft: LoadedModel
) -> None:
    """Catches a read that would stall the device at every step, and that a graph could not hold."""
    model: LoadedModel | QuantizedModel = target
    if kv is not None:
        model = quantize(target, calibrate(target, [TOKENS]), build_plan(QuantSpec(scheme="FP8", kv=kv)))
    loop = looped(model, draft, rule, 3, eos_ids=[VOCAB_SIZE])  # an id that never comes
    for slot, prompt in enumerate(PROMPTS):
        loop.begin(slot, torch.tensor(prompt), 10, torch.zeros(1, dtype=torch.float64))
    lengths_B = loop.state.lengths_B.clone()
    with torch.inference_mode(), NoHost(), NoScalar():
        loop.step(3, 3)
        loop.step(0, 3)
    assert bool((loop.state.lengths_B >= lengths_B + 2).all())


@pytest.mark.parametrize("read", [lambda x: x.item(), lambda x: x.cpu(), lambda x: bool(x > 0), lambda x: x[x > 0]])
def test_the_double_fails_on_reads(read: Callable[[Tensor], Any]) -> None:
    """Catches a double that proves nothing."""
    x = torch.ones(())
    with pytest.raises(AssertionError, match="waits"), NoHost(), NoScalar():
        read(x)


def on_cuda(model: LoadedModel | QuantizedModel, length: int = 128) -> CudaDecoder:
    """An engine for CUDA, on the twins."""
    return CudaDecoder.load(model, torch.float32, length, device="cpu")


def drafting(
    draft: LoadedModel, policy: DraftLength | None, number: int = 0, lm: CudaDecoder | None = None
) -> GenerationRequest:
    drafter = ModelDrafter(lm or on_cuda(draft))
    return GenerationRequest(PROMPTS[number], NEW[number], torch.Generator().manual_seed(number), drafter, policy)


def single(target: CudaDecoder, prompt: GenerationRequest, sampling: Sampling, **options: Any) -> Generation:
    """`engine.generate` of one prompt."""
    return generate(
        target,
        prompt.drafter,
        prompt.policy,
        prompt.tokens,
        prompt.max_new_tokens,
        sampling,
        options.pop("eos_ids", ()),
        prompt.generator,
        **options,
    )


@pytest.fixture
def no_steps_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass that the host would build and read."""

    def fail(*_: object) -> None:
        raise AssertionError("the host built a pass")

    monkeypatch.setattr(CudaDecoder, "forward_many", fail)


@pytest.mark.usefixtures("no_steps_on_the_host")
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafts", [0, 3])
def test_the_engine_hands_over_what_the_loop_runs(
    sampling: Sampling, drafts: int, target: LoadedModel, draft: LoadedModel
) -> None:
    """Catches a GPU that waits for the host at every step of `generate`, and other tokens than the engine's."""
    want = engine(target, draft if drafts else None, sampling, drafts, longer=drafts)
    decoder, lm = on_cuda(target), on_cuda(draft)
    for i in (0, 2, 0):  # the same loop again, behind what it has left
        prompt = drafting(draft, Fixed(drafts), i, lm)
        prompt = prompt if drafts else replace(prompt, drafter=None)
        heard = list[int]()
        found = single(decoder, prompt, sampling, on_tokens=heard.extend)
        assert found.tokens == heard == want[i][: NEW[i]]
        assert decoder.length == len(prompt.tokens) + NEW[i] - 1


@pytest.mark.usefixtures("no_steps_on_the_host")
def test_a_batch_is_handed_over_whole(target: LoadedModel, draft: LoadedModel) -> None:
    """Catches requests that share a slot, a cache that lacks some, and drafts of another number than the schedule's."""
    decoder, lm = on_cuda(target), on_cuda(draft)
    asked = [drafting(draft, Fixed(4), i, lm.fork()) for i in range(3)]
    for _ in range(2):
        found = generate_batch(decoder, asked, GREEDY, (), ((1, 1, 4), (2, 2, 1), (3, 8, 0)))
        assert [answer.tokens for answer in found] == engine(target, None, GREEDY, 0)
        assert {step.nodes for step in found[0].steps} == {0, 1, 4}


def test_after_the_loop_a_target_stands_where_the_engine_leaves_it(target: LoadedModel, draft: LoadedModel) -> None:
    """Catches positions that the host takes for others, once it goes on where the loop has stopped."""
    decoder, prompt = on_cuda(target), drafting(draft, Fixed(3))
    found = single(decoder, prompt, GREEDY)
    want = Decoder.from_float(target, max_length=128).forward(torch.tensor(prompt.tokens + found.tokens), last=1)
    torch.testing.assert_close(decoder.forward(torch.tensor(found.tokens[-1:])), want, rtol=1e-4, atol=1e-4)


def test_sequences_beside_the_loop_keep_what_they_hold(target: LoadedModel, draft: LoadedModel) -> None:
    """Catches rows at rest that are written into the slot of another, also by a request that an error has ended."""
    beside, lm = on_cuda(target), on_cuda(draft)
    decoder = beside.fork()
    beside.forward(torch.tensor(TOKENS[:9]))
    held = [x.clone() for x in beside.weights.passes.cache.stored(beside.slot)]

    def stop(tokens: list[int]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        single(decoder, drafting(draft, Fixed(3), 2, lm), GREEDY, on_tokens=stop)
    third = decoder.fork()
    third.forward(torch.tensor(TOKENS[9:20]))  # the cache grows
    single(decoder, drafting(draft, Fixed(3), 0, lm), GREEDY)
    for x, before in zip(beside.weights.passes.cache.stored(beside.slot), held, strict=True):
        assert torch.equal(x[:, :9], before[:, :9])
    assert not any(x[:, 9:128].any() for x in beside.weights.passes.cache.stored(beside.slot))
    want = Decoder.from_float(target, max_length=128).forward(torch.tensor(TOKENS[9:21]), last=1)
    torch.testing.assert_close(third.forward(torch.tensor(TOKENS[20:21])), want, rtol=1e-4, atol=1e-4)


def test_what_the_loop_does_not_run_is_named(
    target: LoadedModel, draft: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches requests that the loop gets wrong, ones that fall back in silence, and others than the host's tokens."""
    decoder, lm, plain = on_cuda(target), on_cuda(draft), drafting(draft, None)
    told = {
        "learns from every step": [drafting(draft, Heuristic(), lm=lm)],
        "drafts of NgramDrafter": [replace(plain, drafter=NgramDrafter(), policy=Fixed(3))],
        "drafts of ModelDrafter": [replace(plain, drafter=ModelDrafter(Decoder.from_float(draft)), policy=Fixed(3))],
        "draft differently": [drafting(draft, Fixed(2), 0, lm), replace(drafting(draft, None, 1), drafter=None)],
        "64 drafts, where a pass holds 64 rows": [drafting(draft, Fixed(64), lm=lm)],
        "end of the cache (128 positions, 3 drafts)": [replace(drafting(draft, Fixed(3), lm=lm), max_new_tokens=106)],
    }
    for reason, prompts in told.items():
        assert reason in (obstacle(decoder, prompts, GREEDY) or ""), reason
    assert obstacle(decoder, [drafting(draft, BatchLimited(Fixed(3), ((1, 8, 2),)), lm=lm)], WARM) is None
    again = [replace(plain, drafter=None, generator=Repeatable(3))]
    assert obstacle(decoder, again, GREEDY) is None
    assert "a seed repeats" in (obstacle(decoder, again, WARM) or "")
    device._warn_once.cache_clear()  # another test may have been told
    found = single(decoder, told["learns from every step"][0], GREEDY)
    assert found.tokens == engine(target, None, GREEDY, 0)[0]
    assert "the host runs every step, not the loop on the GPU: a draft length that learns" in caplog.text
