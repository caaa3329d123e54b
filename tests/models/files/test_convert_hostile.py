"""Files from anywhere: whatever is in them, they are read as they are or refused with a ValueError."""

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save
from torch import Tensor

from tests.models.test_config import QWEN, V4
from tests.models.tiny import LONG, YARN, hf_model, save_hf
from usp.models import LlamaConfig, from_hf
from usp.models.files.safefile import DTYPES, Damaged, bytes_of, make_header, read_header, read_slice
from usp.models.files.stream import convert_checkpoint

few = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.function_scoped_fixture),
)
TENSORS = {
    "b": torch.arange(6, dtype=torch.float32).view(2, 3),
    "a": torch.arange(5).bfloat16(),
    "none": torch.empty(0, 4, dtype=torch.float16),
    "one": torch.tensor(2.0, dtype=torch.float64),
}
VALID = save(TENSORS, metadata={"format": "pt"})
LENGTH = struct.unpack("<Q", VALID[:8])[0]


@pytest.fixture(autouse=True)
def no_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickle that is loaded at all fails the test."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a pickle was loaded")

    for module, name in ((torch, "load"), (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(module, name, never)


def ours(root: Path, data: bytes) -> dict[str, Tensor] | None:
    """What we read from a file of these bytes; None when it is refused."""
    (root / "x.safetensors").write_bytes(data)
    try:
        found = read_header(root, "x.safetensors")
    except Damaged:
        return None
    return {
        name: read_slice(root / "x.safetensors", stored, [slice(0, size) for size in stored.shape])
        for name, stored in found.items()
        if stored.dtype in DTYPES
    }


def agrees_with_the_library(root: Path, data: bytes) -> bool:
    """We never take what the library refuses, nor read anything else; whether we took it."""
    got = ours(root, data)
    if got is None:
        return False
    want = load(data)
    assert {n: t for n, t in want.items() if t.dtype in DTYPES.values()}.keys() == got.keys()
    for name, value in got.items():
        assert value.dtype == want[name].dtype
        assert value.shape == want[name].shape
        assert bytes_of(value) == bytes_of(want[name]) or not value.numel()
    return True


def framed(header: object, body: bytes = VALID[8 + LENGTH :]) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


@few
@given(data=st.data())
def test_damaged_bytes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    root = tmp_path_factory.getbasetemp()
    assert agrees_with_the_library(root, VALID)
    kind = data.draw(st.sampled_from(["cut", "longer", "bytes", "length"]))
    raw = bytearray(VALID)
    if kind == "cut":
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    elif kind == "longer":
        raw += data.draw(st.binary(min_size=1, max_size=9))
    elif kind == "length":
        raw[:8] = struct.pack("<Q", data.draw(st.integers(0, 2**64 - 1)))
    else:
        for _ in range(data.draw(st.integers(1, 4))):
            raw[data.draw(st.integers(0, 8 + LENGTH - 1))] = data.draw(st.integers(0, 255))
    taken = agrees_with_the_library(root, bytes(raw))
    assert not taken or kind in ("bytes", "length")  # a name or a shape may have changed into another


sizes = st.one_of(st.integers(-2, 40), st.sampled_from([True, 2.0, "3", None, 2**64, 10**30, float("nan")]))
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "I8", "F8_E4M3", "F4", "X", 3, None]),
        "shape": st.one_of(st.lists(sizes, max_size=3), sizes),
        "data_offsets": st.one_of(st.lists(sizes, min_size=2, max_size=2), st.lists(sizes, max_size=3)),
    }
)


@few
@given(header=st.dictionaries(st.sampled_from(["a", "b", "c"]), entries, max_size=3), body=st.integers(0, 40))
def test_headers_that_lie(
    tmp_path_factory: pytest.TempPathFactory, header: dict[str, Any], body: int
) -> None:
    agrees_with_the_library(tmp_path_factory.getbasetemp(), framed(header, bytes(body)))


A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
LIES: dict[str, tuple[bytes, str]] = {
    "overlap": (framed({"a": A, "b": {**A, "data_offsets": [4, 12]}}, bytes(12)), "starts at byte"),
    "same bytes twice": (framed({"a": A, "b": A}, bytes(8)), "starts at byte"),
    "gap": (framed({"a": A, "b": {**A, "data_offsets": [12, 20]}}, bytes(20)), "starts at byte"),
    "beyond the end": (framed({"a": {**A, "data_offsets": [0, 8]}}, bytes(4)), "end at byte"),
    "bytes nobody owns": (framed({"a": A}, bytes(9)), "its tensors end at byte"),
    "size of another shape": (framed({"a": {**A, "shape": [3]}}, bytes(8)), "claims 8 bytes for shape [3]"),
    "negative": (framed({"a": {**A, "shape": [-1, -2]}}, bytes(8)), "which are no sizes"),
    "backwards": (framed({"a": {**A, "data_offsets": [8, 0]}}, bytes(8)), "which are no range"),
    "unknown dtype": (framed({"a": {**A, "dtype": "F128"}}, bytes(8)), "unknown dtype 'F128'"),
    "one name twice": (
        framed(b'{"a":%s,"a":%s}' % (json.dumps(A).encode(), json.dumps(A).encode()), bytes(8)),
        "names a twice",
    ),
    "more keys": (framed({"a": {**A, "code": "x"}}, bytes(8)), "must have dtype, shape and data_offsets"),
    "nested": (framed(b'{"a":' * 100_000, b""), "nested too deeply"),
    "no object": (framed([A], bytes(8)), "no JSON object"),
    "no text": (framed(b"{\xff}", bytes(8)), "no JSON"),
    "huge length": (struct.pack("<Q", 2**63) + b"{}", "does not fit"),
    "metadata": (framed({"__metadata__": {"format": 3}}, b""), "__metadata__"),
}


@pytest.mark.parametrize("case", LIES)
def test_lies_are_named(case: str, tmp_path: Path) -> None:
    data, named = LIES[case]
    source = save_hf(hf_model(), tmp_path / "hf")
    (source / "model.safetensors").write_bytes(data)
    for fn in (from_hf, lambda path: convert_checkpoint(path, tmp_path / "out", to="usp")):
        with pytest.raises(ValueError, match=r"file model\.safetensors is truncated or damaged") as error:
            fn(source)
        assert named in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    if case not in ("more keys", "one name twice"):  # there the library is content
        with pytest.raises((SafetensorError, ValueError)):
            load(data)


@few
@given(
    shape=st.lists(st.integers(0, 5), max_size=3),
    dtype=st.sampled_from(list(DTYPES.values())),
    data=st.data(),
)
def test_slices(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], dtype: torch.dtype, data: st.DataObject
) -> None:
    """What is written is what the library reads; any part of it is that part of the tensor."""
    file = tmp_path_factory.getbasetemp() / "slices.safetensors"
    tensors = {"first": torch.randn(3).bfloat16(), "x": torch.randn(shape, dtype=torch.float64).to(dtype)}
    header, starts = make_header([(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()])
    order = sorted(tensors, key=starts.__getitem__)
    file.write_bytes(header + b"".join(bytes(bytes_of(tensors[n])) for n in order if tensors[n].numel()))
    again = load_file(file)
    assert all(torch.equal(again[name], value) for name, value in tensors.items())
    bounds = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in shape]
    slices = tuple(slice(*pair) for pair in bounds)
    stored = read_header(file.parent, file.name)["x"]
    assert torch.equal(read_slice(file, stored, slices), tensors["x"][slices])


anything = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 200),
        st.sampled_from([10**400, 2**31, -1, 0.5, float("inf"), float("nan"), "silu", "x", "full_attention"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=4,
)
BASES = [
    V4,
    {**QWEN, "max_window_layers": 1},
    {**V4, "rope_scaling": YARN},
    {**V4, "model_type": "mistral", "head_dim": 10, "rope_scaling": LONG},
    {**V4, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
]


@settings(few, max_examples=250)
@given(base=st.sampled_from(BASES), data=st.data())
def test_any_configuration(base: dict[str, Any], data: st.DataObject) -> None:
    """Read or refused with a ValueError; what is read can be written, and is itself then."""
    config = dict(base)
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(
            st.sampled_from([*base, "layer_types", "sliding_window", "auto_map", "max_window_layers"])
        )
        if isinstance(config.get(key), dict) and data.draw(st.booleans()):
            inner = data.draw(st.sampled_from([*config[key], "factor", "beta_fast"]))
            config[key] = {**config[key], inner: data.draw(anything)}
        else:
            config[key] = data.draw(anything)
    try:
        cfg = LlamaConfig.from_hf_dict(config)
    except ValueError:
        return
    assert LlamaConfig.from_dict(json.loads(json.dumps(cfg.to_dict()))) == cfg
    try:
        written = cfg.to_hf_dict()
    except ValueError as error:
        written = str(error)
    if isinstance(written, str):
        assert "to be written" in written
        return
    assert LlamaConfig.from_hf_dict(json.loads(json.dumps(written))) == cfg


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hf(hf_model(), tmp_path_factory.mktemp("fuzz") / "hf", max_shard_size="60KB")


@settings(few, max_examples=60)
@given(data=st.data())
def test_any_index(sharded: Path, data: st.DataObject) -> None:
    """An index that is not the true one is refused, and nothing outside the directory is opened."""
    index = sharded / "model.safetensors.index.json"
    true = index.read_bytes()
    names = list(json.loads(true)["weight_map"])
    files = st.sampled_from([
        "model-00001-of-00004.safetensors", "../x.safetensors", "/etc/passwd", "a\0.safetensors", "", ".",
        "model.bin", "./model-00001-of-00004.safetensors", "\\x.safetensors", "config.json", "é.safetensors",
    ])  # fmt: skip
    changed = json.loads(true)
    changed["weight_map"] = data.draw(
        st.one_of(
            st.dictionaries(st.sampled_from([*names, "stray"]), st.one_of(files, anything), max_size=3).map(
                lambda some: {**changed["weight_map"], **some}
            ),
            anything,
        )
    )
    try:
        if changed == json.loads(true):
            return
        index.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=r"checkpoint .* must be whole"):
            from_hf(sharded)
    finally:
        index.write_bytes(true)
