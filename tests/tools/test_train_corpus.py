"""The text that training reads: which files, in which order, how it is split, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from superoffload.errors import ArgumentError
from superoffload.tools.train.corpus import BatchSource, held_out_batches, load_corpus

POEM = b"Simple is better than complex.\n"


def test_default_corpus_is_the_standard_library_and_the_same_every_time() -> None:
    first, second = (load_corpus(None, sequence=64, limit=200_000) for _ in range(2))
    assert first.sha256 == second.sha256
    assert first.truncated
    assert first.train.numel() + first.held_out.numel() == 200_000
    assert first.train.dtype == torch.uint8
    assert b"import " in bytes(first.train.tolist())


def test_default_corpus_leaves_out_tests_and_installed_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("b.py", "a/c.py", "test/no.py", "a/tests/no.py", "site-packages/no.py", "a.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((b"#no" if "no" in name or "txt" in name else name[-4:-3].encode()) * 3000)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    corpus = load_corpus(None, sequence=8)
    assert corpus.files == 2
    assert bytes(corpus.train.tolist()).startswith(b"cccc"), "a/c.py comes before b.py"
    assert set(corpus.train.tolist()) == set(b"bc")


def test_missing_standard_library_names_the_way_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ArgumentError, match="--data"):
        load_corpus(None, sequence=8)


def test_folder_is_read_sorted_without_hidden_and_binary_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_bytes(b"b" * 4000)
    (tmp_path / "sub" / "a.txt").write_bytes(b"s" * 4000)
    (tmp_path / ".hidden").write_bytes(b"h" * 4000)
    (tmp_path / "image.bin").write_bytes(b"\0" * 4000)
    (tmp_path / "link.txt").symlink_to(tmp_path / "b.txt")
    corpus = load_corpus([str(tmp_path)], sequence=8)
    assert corpus.files == 2
    text = bytes(corpus.train.tolist())
    assert text.strip(b"b").strip(b"s") == b"" and text.startswith(b"b")


def test_named_files_keep_their_order(tmp_path: Path) -> None:
    (tmp_path / "1").write_bytes(b"1" * 2000)
    (tmp_path / "2").write_bytes(b"2" * 2000)
    corpus = load_corpus([str(tmp_path / "2"), str(tmp_path / "1")], sequence=8)
    assert bytes(corpus.train.tolist()).startswith(b"2")
    assert not corpus.truncated


def test_held_out_text_is_spread_and_never_trained_on(tmp_path: Path) -> None:
    # Piece number k of 100 consists of byte k only, so every byte tells where it came from.
    (tmp_path / "text").write_bytes(b"".join(bytes([k]) * 50 for k in range(100)))
    corpus = load_corpus([str(tmp_path / "text")], sequence=20)
    assert sorted(set(corpus.held_out.tolist())) == [10, 30, 50, 70, 90]
    assert set(corpus.train.tolist()) == set(range(100)) - {10, 30, 50, 70, 90}
    assert corpus.train.numel() + corpus.held_out.numel() == 5000


def test_limit_cuts_the_text_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(POEM * 1000)
    exact = load_corpus([str(tmp_path / "text")], sequence=8, limit=31_000)
    cut = load_corpus([str(tmp_path / "text")], sequence=8, limit=30_999)
    assert not exact.truncated
    assert cut.truncated
    assert cut.train.numel() + cut.held_out.numel() == 30_999


@pytest.mark.parametrize("length, enough", [(100 * 65 - 1, False), (100 * 65, True)])
def test_too_short_text_tells_how_much_is_needed(tmp_path: Path, length: int, enough: bool) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"x" * length)
    if enough:
        assert load_corpus([str(path)], sequence=64).held_out.numel() == 5 * 65
    else:
        with pytest.raises(ArgumentError, match=rf"{length} bytes .* at least 6500"):
            load_corpus([str(path)], sequence=64)


def test_missing_file_and_empty_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="nowhere: no such file"):
        load_corpus([str(tmp_path / "nowhere")], sequence=8)
    with pytest.raises(ArgumentError, match="no text files"):
        load_corpus([str(tmp_path)], sequence=8)


def test_what_is_neither_file_nor_folder_is_refused_without_reading_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # opening it would wait forever
    with pytest.raises(ArgumentError, match="neither"):
        load_corpus([str(pipe)], sequence=8)


def test_file_that_cannot_be_read_is_named() -> None:
    if not Path("/proc/self/mem").exists():
        pytest.skip("needs a file whose first byte cannot be read")
    with pytest.raises(ArgumentError, match="/proc/self/mem: cannot be read"):
        load_corpus(["/proc/self/mem"], sequence=8)


def test_batches_are_windows_of_the_text_decided_by_the_seed() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    batches = [BatchSource(text, batch=4, sequence=7, seed=seed).next() for seed in (3, 3, 4)]
    assert torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])
    assert batches[0].shape == (4, 8)
    assert torch.equal(batches[0], batches[0][:, :1] + torch.arange(8))


def test_batches_reach_the_first_and_the_last_window() -> None:
    text = torch.arange(10, dtype=torch.uint8)
    source = BatchSource(text, batch=64, sequence=7, seed=0)
    starts = set(source.next()[:, 0].tolist()) | set(source.next()[:, 0].tolist())
    assert starts == {0, 1, 2}


def test_held_out_batches_cover_the_text_evenly() -> None:
    text = torch.arange(100, dtype=torch.uint8)
    batches = held_out_batches(text, batch=2, sequence=9, count=2)
    assert [batch[:, 0].tolist() for batch in batches] == [[0, 30], [60, 90]]
    assert batches[1][1].tolist() == list(range(90, 100))
