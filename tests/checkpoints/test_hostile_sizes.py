"""Checkpoints that ask for more memory, time or files than they have bytes: refused, before anything large is read."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from superoffload import AdamW, checkpoints
from superoffload.checkpoints import archive, folder
from superoffload.checkpoints.manifest import check_content
from superoffload.checkpoints.safetensors import TensorReader
from superoffload.errors import ArgumentError
from superoffload.host.untrusted import parse_json
from tests.support.forged_checkpoints import Content, forged, with_state
from tests.support.saved_runs import TENSORS, Run, assert_same


def refused(folder: Path, run: Run, words: str) -> None:
    before = run.everything()
    with pytest.raises(ArgumentError, match=words) as caught:
        checkpoints.load(folder, run.model, run.optimizer)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1200
    assert_same(run.everything(), before)


def test_only_files_that_are_ours_are_read(saved: Path, run: Run, tmp_path: Path) -> None:
    size = 16 << 20
    files = {"big.bin": {"bytes": size, "sha256": hashlib.sha256(bytes(size)).hexdigest()}}
    bad = forged(saved, tmp_path / "step-2", lambda content: content["files"].update(files))
    (bad / "big.bin").touch()
    os.truncate(bad / "big.bin", size)
    refused(bad, run, "only files state.pt and rank-NUMBER.safetensors")


# ---- links ------------------------------------------------------------------------------------------------------


def test_files_that_are_links_are_not_followed_and_folders_are(saved: Path, run: Run, tmp_path: Path) -> None:
    for name in ("manifest.json", "state.pt", TENSORS):
        bad = forged(saved, tmp_path / name / "step-2", lambda _: None)
        (bad / name).rename(tmp_path / name / "x")
        (bad / name).symlink_to(tmp_path / name / "x")
        refused(bad, run, "a link, which could lead anywhere")
        assert checkpoints.latest(tmp_path / name) is None
    (tmp_path / "all").symlink_to(saved.parent)
    (tmp_path / "newest").symlink_to(tmp_path / "all" / saved.name)
    checkpoints.load(tmp_path / "newest", run.model, run.optimizer)
    assert checkpoints.latest(tmp_path) == tmp_path / "newest"


# ---- state.pt ---------------------------------------------------------------------------------------------------


def test_states_that_are_larger_than_their_files_are_refused(saved: Path, run: Run, tmp_path: Path) -> None:
    """Compressed ones torch.load would inflate, to a thousand times their size; the parts of others overlap."""
    data = io.BytesIO()
    with zipfile.ZipFile(saved / "state.pt") as ours, zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as other:
        for entry in ours.infolist():
            other.writestr(entry.filename, ours.read(entry))
    refused(with_state(saved, tmp_path / "a", data.getvalue()), run, "compressed")
    changed = bytearray((saved / "state.pt").read_bytes())
    first = changed.index(b"PK\x01\x02")
    for field in (20, 24):  # how many bytes there are, compressed or not
        changed[first + field : first + field + 4] = (1 << 30).to_bytes(4, "little")
    refused(with_state(saved, tmp_path / "b", bytes(changed)), run, "parts overlap")


def pickled_deeply(levels: int, value: str) -> bytes:
    """A pickle of a state whose only group has a value in so many lists."""
    state = b"\x80\x02}(X\x06\0\0\0groups](}(X\x06\0\0\0params]"
    state += b"X" + len(value).to_bytes(4, "little") + value.encode() + b"]" * levels + b"a" * (levels - 1) + b"ue"
    for name in (b"steps", b"other", b"aliases", b"extra"):
        state += b"X" + len(name).to_bytes(4, "little") + name + b"}"
    return state + b"u."


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["betas", "lr", "tag"])
def test_values_nested_deeply_are_refused(name: str, saved: Path, run: Run, tmp_path: Path) -> None:
    """In so many lists; and in lists that hold each other: written out, the value has 2 ** 80 elements."""
    data = io.BytesIO()
    with zipfile.ZipFile(saved / "state.pt") as ours, zipfile.ZipFile(data, "w") as other:
        for entry in ours.infolist():
            new = pickled_deeply(20_000, name) if entry.filename.endswith("data.pkl") else ours.read(entry)
            other.writestr(entry.filename, new)
    refused(with_state(saved, tmp_path / "deep", data.getvalue()), run, "deeply nested|numbers for lr|two betas")
    value: list[Any] = []
    for _ in range(80):
        value = [value, value]
    words = "deeply nested" if name == "tag" else "expected numbers for lr, betas"
    refused(with_group(saved, tmp_path / "many", name, value), run, words)
    refused(with_group(saved, tmp_path / "long", "betas", ["\x1b" * 100] * 1000), run, "expected two betas")


def with_group(saved: Path, folder: Path, name: str, value: Any) -> Path:
    content, data = torch.load(saved / "state.pt", weights_only=True), io.BytesIO()
    content["groups"][0][name] = value
    torch.save(content, data)
    return with_state(saved, folder, data.getvalue())


def test_what_could_not_be_loaded_is_not_saved(
    run: Run, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "_LARGEST_PICKLE", 5000)
    with pytest.raises(ArgumentError, match="bytes beside tensors"):
        checkpoints.save(tmp_path / "a", run.model, run.optimizer, extra={"x": list(range(10_000))})
    checkpoints.save(tmp_path / "b", run.model, run.optimizer, extra={"x": torch.arange(10_000)})
    monkeypatch.setattr(archive, "LARGEST_STATE", 1000)
    with pytest.raises(ArgumentError, match="bytes, expected at most 1000"):
        checkpoints.save(tmp_path / "c", run.model, run.optimizer)
    run.optimizer.param_groups[0]["tag"] = json.loads("[" * 80 + "]" * 80)
    with pytest.raises(ArgumentError, match="param group 0 has values nested too deeply"):
        checkpoints.save(tmp_path / "e", run.model, run.optimizer)
    del run.optimizer.param_groups[0]["tag"]
    model = nn.Module()
    model.register_parameter("x" * 5000, nn.Parameter(torch.ones(1)))
    with AdamW(model.parameters(), threads=1) as optimizer, pytest.raises(ArgumentError, match="a name of 5000"):
        checkpoints.save(tmp_path / "d", model, optimizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b"]


# ---- extra state that is a tensor -------------------------------------------------------------------------------


def with_tensor(saved: Path, folder: Path, key: str, shape: list[int], nbytes: int) -> Path:
    """A checkpoint with one tensor more, of bytes that are all zero and take no room on the disk."""
    old = (saved / TENSORS).read_bytes()
    start = 8 + int.from_bytes(old[:8], "little")
    header = json.loads(old[8:start])
    end = len(old) - start
    header[key] = {"dtype": "U8", "shape": shape, "data_offsets": [end, end + nbytes]}
    text = json.dumps(header).encode()
    text = len(text).to_bytes(8, "little") + text

    def change(content: Content) -> None:
        content["files"][TENSORS] = {"bytes": len(text) + end + nbytes, "header": hashlib.sha256(text).hexdigest()}
        box = {"offsets": [0] * len(shape), "lengths": shape}
        one = {"shape": shape, **box, "flat": False, "file": TENSORS}
        content["tensors"][key] = [{**one, "sha256": hashlib.sha256(b"").hexdigest()}]

    forged(saved, folder, change)
    (folder / TENSORS).unlink()
    (folder / TENSORS).write_bytes(text + old[start:])
    os.truncate(folder / TENSORS, len(text) + end + nbytes)
    return folder


@pytest.mark.parametrize(
    "key, shape, nbytes, words",
    [
        ("model.none._extra_state", [1 << 20], 1 << 20, "the model lacks the extra state none._extra_state"),
        ("model._extra_state", [(1 << 30) + 1], (1 << 30) + 1, "extra state, expected at most"),
        ("model._extra_state", [0, 1 << 61, 1 << 61], 0, "expected a shape"),
    ],
)
def test_extra_state_is_not_read_before_it_is_compared(
    key: str, shape: list[int], nbytes: int, words: str,
    saved: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def blocks(*_: Any) -> Iterator[Any]:
        raise AssertionError("read")

    monkeypatch.setattr(TensorReader, "blocks", blocks)
    refused(with_tensor(saved, tmp_path / "step-2", key, shape, nbytes), run, words)


# ---- manifests and headers --------------------------------------------------------------------------------------


def test_shapes_in_headers(tmp_path: Path) -> None:
    shapes: list[Any] = [[1] * 65, [0, 1 << 61, 1 << 61], [0, 1 << 63], [1.0], "1", {"1": 1}, [True]]
    for shape in shapes:
        nbytes = 0 if isinstance(shape, list) and shape[0] == 0 else 4
        header = {"a\x1b" + "b" * 1000: {"dtype": "F32", "shape": shape, "data_offsets": [0, nbytes]}}
        text = json.dumps(header).encode()
        (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + bytes(nbytes))
        with pytest.raises(ArgumentError, match="numbers of a") as caught:
            TensorReader(tmp_path / "x")
        assert str(caught.value).isprintable() and len(str(caught.value)) < 600


def test_memory_of_json_is_a_small_multiple_of_its_size() -> None:
    for unit, most in ((b'"",', 8), (b'"\\"\\"\\"\\"",', 10), (b"12,", 12)):
        data = b"[" + unit * ((1 << 20) // len(unit)) + b"0]"
        tracemalloc.start()
        try:
            parse_json(data)
            assert tracemalloc.get_traced_memory()[1] < most * len(data)
        finally:
            tracemalloc.stop()
    for unit in (b"[],", b'{"":0},', b"[[[[[[[[]]]]]]]],"):
        with pytest.raises(ValueError, match="lists and objects or more"):
            parse_json(b"[" + unit * ((4 << 20) // len(unit)) + b"0]")


def test_the_largest_of_ours_are_far_from_the_limits(saved: Path) -> None:
    """As many tensors as a thousand ranks of a large model have; the smallest that each can be."""
    one = {"shape": [], "offsets": [], "lengths": [], "flat": False, "file": TENSORS, "sha256": "0" * 64}
    files = json.loads((saved / "manifest.json").read_bytes())["files"]
    text = folder.manifest_text({"files": files, "tensors": {f"model.{i}": [one] for i in range(20_000)}})
    check_content("x", parse_json(text))
    compact = {str(i): {"dtype": "F32", "shape": [1], "data_offsets": [i, i + 4]} for i in range(50_000)}
    assert parse_json(json.dumps(compact, separators=(",", ":")).encode()) == compact


# ---- what torch's optimizer would miss --------------------------------------------------------------------------


@pytest.mark.parametrize("whose", ["the optimizer's", "the checkpoint's"])
def test_amsgrad_is_refused_before_anything_changes(
    whose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    one = torch.optim.AdamW(first.parameters())
    other = torch.optim.AdamW(second.parameters(), amsgrad=whose == "the optimizer's")
    with pytest.raises(ArgumentError, match="amsgrad=True, whose max_exp_avg_sq is not saved"):
        checkpoints.save(tmp_path / "a", first, torch.optim.AdamW(first.parameters(), amsgrad=True))
    assert not list(tmp_path.iterdir())
    for model, optimizer in ((first, one), (second, other)):
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
    if whose == "the checkpoint's":
        one.param_groups[0]["amsgrad"] = True  # as other writers of this format may
        monkeypatch.setattr("superoffload.checkpoints.saving._check_loadable", lambda *_: None)
    checkpoints.save(tmp_path / "a", first, one)
    was = str((list(second.parameters()), other.state_dict()))
    with pytest.raises(ArgumentError, match=f"{whose} param group 0 has amsgrad=True"):
        checkpoints.load(tmp_path / "a", second, other)
    assert str((list(second.parameters()), other.state_dict())) == was
    checkpoints.load(tmp_path / "a", second)
    assert all(map(torch.equal, second.parameters(), first.parameters()))
