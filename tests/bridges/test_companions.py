"""What lies beside weights comes along byte for byte, and what does not is named; nothing leads out of the folder."""

import json
import os
from pathlib import Path
import pickle
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from qspec.bridges import compressed
from qspec.bridges.companions import MOST_BYTES, MOST_FILES, companions, copy, left_out_notes, sort_out
from qspec.bridges.hf import load_folder
from qspec.errors import SourceError
from tests.tiny import tiny_model

SAMPLING = {
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "repetition_penalty": 1.05,
    "max_new_tokens": 512,
    "eos_token_id": [4, 2],
    "transformers_version": "4.37.0",
}
TRAVEL = {
    "generation_config.json": json.dumps(SAMPLING, indent=4),
    "README.md": "---\nlicense: mit\n---\n# Theirs\r\n",
    "LICENSE": "do as you like\n",
    "preprocessor_config.json": "{}",
    "processor_config.json": '{"b": 1,"a":2}',
    "additional_chat_templates/tools.jinja": "{{ tools }}",
    "original/params.json": "{}",
    "unknown.extra": "text",
}
STAY = {
    "modeling_own.py": "print()",
    "pytorch_model.bin": "w",
    "original/consolidated.00.pth": "w",
    "onnx/config.json": "{}",
    "onnx/model.onnx": "w",
    "a/b/deep.txt": "x",
    ".gitattributes": "x",
    "adapter_config.json": "{}",
}
REASONS = {
    "modeling_own.py": "code",
    "pytorch_model.bin": "weights",
    "original/consolidated.00.pth": "weights",
    "onnx/": "another model",
    "a/b": "a folder in a folder",
    ".gitattributes": "hidden",
    "adapter_config.json": "of other weights",
    "innocent.json": "pickled data",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with what the folders of real ones hold beside their weights."""
    folder = tiny_model("llama", tmp_path_factory.mktemp("made") / "source")
    for name, text in (TRAVEL | STAY).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode())
    (folder / "innocent.json").write_bytes(pickle.dumps(print))
    return folder


@pytest.fixture
def source(made: Path, tmp_path: Path) -> Path:
    """A copy to be changed."""
    return Path(shutil.copytree(made, tmp_path / "source"))


def test_what_is_no_weights_comes_along(made: Path, tmp_path: Path) -> None:
    """Would catch sampling defaults that are made up anew, and templates, processors and licences that vanish."""
    model = load_folder(made)
    assert model.left_out == REASONS
    compressed.write_float(model, tmp_path / "out", torch.float32)
    out = tmp_path / "out"
    tokenizer = ("tokenizer.json", "tokenizer_config.json")
    for name in (*TRAVEL, *tokenizer):
        copied = out / ("README.source.md" if name == "README.md" else name)
        assert copied.read_bytes() == (made / name).read_bytes(), name
    listed = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert listed & {*STAY, "README.md", "innocent.json"} == set()


def test_what_transformers_reloads_is_the_same(made: Path, tmp_path: Path) -> None:
    """Would catch a copy that samples, stops, or splits text in another way than its source."""
    compressed.write_float(load_folder(made), tmp_path / "out", torch.float32)
    first, second = (GenerationConfig.from_pretrained(folder).to_dict() for folder in (made, tmp_path / "out"))
    assert first == second
    assert (second["temperature"], second["repetition_penalty"], second["eos_token_id"]) == (0.6, 1.05, [4, 2])
    assert "_from_model_config" not in (tmp_path / "out/generation_config.json").read_text()
    messages = [{"role": "user", "content": "Größe 12"}]
    one, other = (AutoTokenizer.from_pretrained(folder) for folder in (made, tmp_path / "out"))
    assert one.apply_chat_template(messages) == other.apply_chat_template(messages)
    assert compressed.read(tmp_path / "out").arch.eos_ids == load_folder(made).arch.eos_ids == (2, 4)


def test_a_source_without_sampling_defaults_gets_none(source: Path, tmp_path: Path) -> None:
    """Would catch defaults that are written as if the authors had chosen them."""
    (source / "generation_config.json").unlink()
    compressed.write_float(load_folder(source), tmp_path / "out", torch.float32)
    assert not (tmp_path / "out/generation_config.json").exists()
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert GenerationConfig.from_model_config(config).eos_token_id == 2


def test_a_copy_of_a_copy_is_the_same(made: Path, tmp_path: Path) -> None:
    """Would catch files that are lost when a kept half is read back, and packaged from there."""
    compressed.write_float(load_folder(made), tmp_path / "one", torch.float32)
    again = compressed.read(tmp_path / "one")
    compressed.write(again, tmp_path / "two", torch.float32)
    one, two = ({p.name: p.read_bytes() for p in (tmp_path / n).rglob("*") if p.is_file()} for n in ("one", "two"))
    assert one == two


def test_a_tokenizer_that_is_no_plain_file_is_saved(source: Path, tmp_path: Path) -> None:
    """Would catch a checkpoint without a tokenizer, where the source's own cannot be copied."""
    outside = tmp_path / "tokenizer.json"
    (source / "tokenizer.json").rename(outside)
    (source / "tokenizer.json").symlink_to(outside)
    model = load_folder(source)
    assert model.left_out["tokenizer.json"] == "a link out of the folder"
    compressed.write_float(model, tmp_path / "out", torch.float32)
    assert not (tmp_path / "out/tokenizer.json").is_symlink()
    assert compressed.read(tmp_path / "out").tokenizer.fingerprint() == model.tokenizer.fingerprint()


def test_nothing_leads_out_of_the_folder(source: Path, tmp_path: Path) -> None:
    """Would catch a private file that is published under a harmless name, and a pipe that is waited for for ever."""
    (tmp_path / "secret").write_text("s")
    (tmp_path / "secrets").mkdir()
    (source / "notes.txt").symlink_to(tmp_path / "secret")
    (source / "folder").symlink_to(tmp_path / "secrets", target_is_directory=True)
    (source / "inside.txt").symlink_to(source / "LICENSE")
    (source / "ring").symlink_to(source / "ring")
    (source / "additional_chat_templates" / "up.txt").symlink_to("../../secret")
    os.mkfifo(source / "pipe.json")
    found = companions(source)
    links = {"notes.txt": "a link out of the folder", "ring": "a broken link", "pipe.json": "no plain file"}
    links |= {"folder": "a link out of the folder", "additional_chat_templates/up.txt": "a link out of the folder"}
    assert found.left_out == REASONS | links
    copy(found.files, tmp_path / "out")
    assert (tmp_path / "out" / "inside.txt").read_text() == TRAVEL["LICENSE"]
    assert not (tmp_path / "out" / "inside.txt").is_symlink()


def test_the_cache_of_the_hub_is_one_folder(made: Path, tmp_path: Path) -> None:
    """Would catch a fetched model of which nothing comes along, because a cache holds links to its files."""
    repository = tmp_path / "models--org--tiny"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for path in made.iterdir():
        if path.is_file():
            shutil.copy(path, repository / "blobs" / path.name)
            (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    (tmp_path / "other").write_text("s")
    (snapshot / "stolen.txt").symlink_to(tmp_path / "other")
    found = companions(snapshot)
    assert {"generation_config.json", "README.source.md", "tokenizer.json", "LICENSE"} <= found.files.keys()
    assert found.left_out["stolen.txt"] == "a link out of the folder"


def test_the_bounds_hold() -> None:
    """Would catch a source that fills the disk, or a manifest that lists a hundred thousand files."""
    many = {f"{i:04}.txt": 1 for i in range(1000)} | {"tokenizer.json": 2 << 20}
    kept, left_out = sort_out(many)
    assert len(kept) == MOST_FILES
    assert left_out["tokenizer.json"] == "beyond 200 files or 256 MiB"
    kept, left_out = sort_out({f"{i}.dat": MOST_BYTES for i in range(5)} | {"big.json": MOST_BYTES + 1, "a.json": 9})
    assert kept == ["a.json", "0.dat", "1.dat", "2.dat"]
    assert left_out["big.json"] == "larger than 64 MiB"


def test_what_stays_is_named_in_one_sentence() -> None:
    """Would catch a loss without a word, and a note of a thousand names."""
    assert left_out_notes({}) == []
    (note,) = left_out_notes({"b.py": "code", "a.py": "code", "x.bin": "weights", "e\nvil": "an unusual name"})
    assert note == (
        "Files of the source that do not come along: 'e\\nvil' (an unusual name); a.py, b.py (code); x.bin (weights)."
    )
    (note,) = left_out_notes({f"{i:03}.bin": "weights" for i in range(100)})
    assert note.endswith("019.bin and 80 more (weights).")


def test_a_readme_takes_no_other_file_s_name(source: Path) -> None:
    """Would catch one file written over another."""
    (source / "README.source.md").write_text("older")
    found = companions(source)
    assert found.files["README.source.md"].read_bytes() == TRAVEL["README.md"].encode()
    assert found.left_out["README.source.md"] == "its name is README.source.md already"


def test_a_folder_without_weights_is_refused_as_before(tmp_path: Path) -> None:
    """Would catch another error for a folder that is no checkpoint."""
    with pytest.raises(SourceError, match="no safetensors weights"):
        companions(tmp_path)
