"""GGUF files that are damaged, or say what cannot be: refused by name, not computed with."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

from flexinfer.checkpoints.gguf.header import read_header
from flexinfer.errors import UnsupportedModelError
from flexinfer.models.loading import load_model
from helpers.gguf.files import Type, finish, write_gguf, writer_of, writing
from helpers.gguf.form import replace_key
from helpers.gguf.models import CONFIGS, same
from helpers.tiny_models import draw_model

QUERIES, OUTPUT, NORM = "blk.0.attn_q.weight", "blk.0.attn_output.weight", "blk.0.attn_norm.weight"


def write(path: Path, kind: Type = Type.Q8_0, name: str = "llama") -> str:
    write_gguf(path, draw_model(CONFIGS[name]()), same(kind))
    return str(path)


def refused(path: str) -> str:
    """Why a file is refused."""
    with pytest.raises(UnsupportedModelError) as refusal:
        load_model(path)
    return str(refusal.value)


def end_of_name(data: bytearray, name: str) -> int:
    text = struct.pack("<Q", len(name)) + name.encode()
    return data.index(text) + len(text)


def type_at(data: bytearray, name: str) -> int:
    """Where the type of a tensor stands; behind it its offset."""
    at = end_of_name(data, name)
    return at + 4 + 8 * int(struct.unpack_from("<I", data, at)[0])


def set_type(name: str, kind: Type) -> Callable[[bytearray], None]:
    return lambda data: struct.pack_into("<I", data, type_at(data, name), kind)


def set_offset(name: str, offset_of: Callable[[int, int], int]) -> Callable[[bytearray], None]:
    """offset_of: its own and that of OUTPUT -> another."""

    def edit(data: bytearray) -> None:
        at, other = (type_at(data, n) + 4 for n in (name, OUTPUT))
        offsets = (struct.unpack_from("<Q", data, place)[0] for place in (at, other))
        struct.pack_into("<Q", data, at, offset_of(*offsets))

    return edit


@pytest.mark.parametrize(
    ("kind", "edit", "message"),
    [
        (Type.Q8_0, set_offset(QUERIES, lambda own, other: other), "the one before it ends at"),
        (Type.Q8_0, set_offset(QUERIES, lambda own, other: own + 34), "attn_q.weight is at"),
        (Type.F32, set_offset(QUERIES, lambda own, other: own + 32), "attn_q.weight is at"),
        (Type.Q8_0, set_type(QUERIES, Type.Q4_0), "the one before it ends at"),
    ],
)
def test_tensors_that_do_not_lie_one_behind_the_other_are_refused(
    kind: Type, edit: Callable[[bytearray], None], message: str, tmp_path: Path
) -> None:
    """Their numbers were taken from elsewhere in the file, or for others."""
    path = write(tmp_path / "model.gguf", kind)
    data = bytearray(Path(path).read_bytes())
    edit(data)
    Path(path).write_bytes(data)
    assert message in refused(path)


@pytest.mark.parametrize(
    ("add", "value", "message"),
    [
        ("uint32", 48, "general.alignment = 48 is no power of two"),
        ("uint32", 0, "general.alignment = 0 is no power of two"),
        ("int32", -64, "general.alignment is a value of type 5, not 4"),
        ("float32", 32.0, "general.alignment is a value of type 6, not 4"),
    ],
)
def test_an_alignment_that_is_none_is_refused(
    add: str, value: Any, message: str, tmp_path: Path
) -> None:
    writer = writer_of(tmp_path / "model.gguf", draw_model(CONFIGS["llama"]()))
    getattr(writer, f"add_{add}")("general.alignment", value)
    finish(writer)
    assert message in refused(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("blk.1.attn_q.weight", "blk.0.attn_q.weight", "has two tensors blk.0.attn_q.weight"),
        ("llama.attention.key_length", "llama.attention.head_count", "head_count twice"),
    ],
)
def test_what_a_file_has_twice_is_refused(old: str, new: str, message: str, tmp_path: Path) -> None:
    """The last one was taken."""
    path = write(tmp_path / "model.gguf")
    data = Path(path).read_bytes()
    texts = [struct.pack("<Q", len(name)) + name.encode() for name in (old, new)]
    assert texts[0] in data
    Path(path).write_bytes(data.replace(*texts))
    assert message in refused(path)


@pytest.mark.parametrize("alignment", [8, 32, 64, 4096])
def test_files_of_any_alignment_may_have_more_behind_the_last_tensor(
    alignment: int, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    model = draw_model(CONFIGS["llama"]())
    with writing(path, model, same(Type.Q8_0)) as (writer, _):
        writer.add_custom_alignment(alignment)
    before = read_header(str(path)).tensors
    path.write_bytes(path.read_bytes() + bytes(1000))
    assert read_header(str(path)).tensors == before
    assert load_model(str(path)).vocab_size == 128


@pytest.mark.parametrize(
    ("name", "count", "of"),
    [("blk.0.attn_output", 1, "layers.0.self_attn.o_proj"), ("output", 4096, "lm_head")],
)
def test_a_bias_has_as_many_numbers_as_its_layer_has_outputs(
    name: str, count: int, of: str, tmp_path: Path
) -> None:
    """The kernel read on behind the end of a shorter one."""
    path, model = tmp_path / "model.gguf", draw_model(CONFIGS["llama"]())
    with writing(path, model, same(Type.Q8_0)) as (writer, _):
        writer.add_tensor(f"{name}.bias", torch.ones(count).numpy())
    assert f"{of}.bias is [{count}] in the checkpoint" in refused(str(path))


def set_value(path: Path, key: str, value: Any, name: str = "llama") -> str:
    """A file with another value of this key."""
    with writing(path, draw_model(CONFIGS[name]()), same(Type.Q8_0)) as (writer, _):
        replace_key(writer, key, value)
    return str(path)


@pytest.mark.parametrize("value", [0, -1, "x", True, 2.5])
@pytest.mark.parametrize(
    "key",
    [
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
    ],
)
def test_sizes_that_count_nothing_are_refused_by_name(key: str, value: Any, tmp_path: Path) -> None:
    message = refused(set_value(tmp_path / "model.gguf", key, value))
    assert message.endswith(f"has llama.{key} = {value!r}; known: whole numbers from 1 on")


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), "x", True])
@pytest.mark.parametrize("key", ["attention.layer_norm_rms_epsilon", "rope.freq_base"])
def test_factors_that_are_no_numbers_above_0_are_refused_by_name(
    key: str, value: Any, tmp_path: Path
) -> None:
    message = refused(set_value(tmp_path / "model.gguf", key, value))
    assert message.endswith(f"has llama.{key} = {value!r}; known: numbers above 0")


@pytest.mark.parametrize(
    ("name", "key", "value", "known"),
    [
        ("llama", "block_count", 1, "only the number of blocks that have tensors, 2"),
        ("llama", "block_count", 2**31, "only the number of blocks that have tensors, 2"),
        ("llama", "embedding_length", 2**40, "only the columns of the embedding, 256"),
        ("llama", "attention.head_count", 8, "only heads of 64 that make up 256 rows of queries"),
        ("llama", "attention.head_count_kv", 3, "only divisors of the head_count, 4"),
        ("mixtral", "expert_used_count", 0, "whole numbers from 1 on"),
        ("mixtral", "expert_used_count", 9, "at most the expert_count, 4"),
        ("mixtral", "expert_count", 2**31, "only the experts of blk.0.ffn_gate_exps.weight, 4"),
        (
            "deepseek2 as V2 Lite",
            "block_count",
            2**31,
            "only the number of blocks that have tensors, 3",
        ),
    ],
)
def test_sizes_that_the_tensors_have_not_are_refused_before_the_model_is_made(
    name: str, key: str, value: int, known: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 ** 31 layers were made until the system killed the process."""
    monkeypatch.setattr("flexinfer.models.stored._make_empty", pytest.fail)
    message = refused(set_value(tmp_path / "model.gguf", key, value, name))
    assert message.endswith(f".{key} = {value}; known: {known}")


def test_a_model_that_no_memory_has_room_for_is_refused(tmp_path: Path) -> None:
    message = refused(set_value(tmp_path / "model.gguf", "feed_forward_length", 2**50))
    assert "a model of type 'llama' of such sizes cannot be made" in message


@pytest.mark.parametrize("name", ["blk.1xattn_q.weight", "blk.x.attn_q.weight"])
def test_tensors_of_no_block_are_refused_by_name(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf")
    data = Path(path).read_bytes()
    Path(path).write_bytes(data.replace(b"blk.1.attn_q.weight", name.encode()))
    assert f"has the tensor {name!r}, which is not known" in refused(path)


def test_a_norm_is_not_quantised(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = draw_model(CONFIGS["llama"]())
    with writing(path, model, same(Type.Q8_0)) as (writer, _):
        info = writer.tensors[0][NORM]
        info.dtype, info.nbytes = Type.Q8_0, 256 // 32 * 34
        info.tensor = torch.zeros(info.nbytes, dtype=torch.uint8).numpy()
    assert f"has {NORM!r} as Q8_0 [256]; known are matrices" in refused(str(path))


@pytest.mark.parametrize("num_bytes", [6, 300, 1500])
def test_a_file_that_is_cut_is_said_to_be_so(num_bytes: int, tmp_path: Path) -> None:
    """It said what unpack_from requires."""
    path = write(tmp_path / "model.gguf")
    Path(path).write_bytes(Path(path).read_bytes()[:num_bytes])
    assert refused(path) == (
        f"{path!r} is a damaged GGUF file: it ends before its header does, as one that is cut "
        "off or still being downloaded; fetch it again"
    )


def test_a_tensor_of_no_numbers_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf")
    data = bytearray(Path(path).read_bytes())
    struct.pack_into("<Q", data, end_of_name(data, QUERIES) + 12, 0)
    Path(path).write_bytes(data)
    assert "attn_q.weight is [0, 256]: of no numbers" in refused(path)


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("llama", {"blk.0.attn_k.weight": (96, 256)}, "k_proj.weight of 96 rows; heads have 64"),
        ("llama", {"blk.1.attn_q.weight": (255, 256)}, "q_proj.weight of 255 rows; heads have 64"),
        ("phi3 for long contexts", {"rope_factors_long.weight": None}, "or neither"),
        ("phi3 for long contexts", {"rope_factors_short.weight": None}, "or neither"),
        ("nemotron", {"rope_freqs.weight": (32,)}, "[32], where the model has 16 frequencies"),
        ("deepseek2 as V3", {"blk.0.attn_kv_b.weight": (640, 128)}, "beside its halves"),
        ("qwen3next", {"blk.0.ssm_in.weight": (1280, 256)}, "beside its parts"),
    ],
)
def test_tensors_that_a_model_cannot_have_so_are_refused(
    name: str, edit: dict[str, tuple[int, ...] | None], message: str, tmp_path: Path
) -> None:
    """Rows of no whole heads raised torch's error; of factors for rotations one half alone was
    passed over, and so was a weight beside its parts; factors of all numbers of a head where half
    are rotated raised, too."""
    path, model = tmp_path / "model.gguf", draw_model(CONFIGS[name]())
    with writing(path, model, same(Type.F32)) as (writer, _):
        tensors = writer.tensors[0]
        for own, shape in edit.items():
            tensors.pop(own, None)
            if shape is not None:
                writer.add_tensor(own, torch.ones(shape).numpy())
    assert message in refused(str(path))


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("qwen3 by yarn", "rope.freq_base", 1.0),
        ("gemma3n", "attention.shared_kv_layers", 3),
        ("gemma4", "attention.shared_kv_layers", 1),
    ],
)
def test_values_of_which_transformers_makes_no_model_are_refused(
    name: str, key: str, value: Any, tmp_path: Path
) -> None:
    """ZeroDivisionError and ValueError of its own, without the file's name."""
    message = refused(set_value(tmp_path / "model.gguf", key, value, name))
    assert "cannot be made of its config" in message
