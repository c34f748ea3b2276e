"""`make slot`: what travels to a bare machine with a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import extension
from benchmarks.gpu_suite import slot
from benchmarks.gpu_suite.__main__ import SLOTS

WHEELS = [name for names in slot.FETCHED.values() for name in names]


def filled(folder: Path) -> Path:
    """As after an earlier call."""
    (folder / "wheels").mkdir()
    (folder / extension.prebuilt_name()).touch()
    for name in WHEELS:
        project, _, version = name.partition("==")
        (folder / "wheels" / f"{project.replace('-', '_')}-{version or '1.0'}-py3-none-any.whl").touch()
    return folder


@pytest.fixture(autouse=True)
def pip(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words of each call of pip, which has no network."""
    calls: list[str] = []

    def fetch(wheels: Path, words: tuple[str, ...], name: str, builder: str) -> str:
        calls.append(name)
        return "no network"

    monkeypatch.setattr(slot, "_fetch", fetch)
    return calls


def test_what_is_there_stays_and_the_commands_of_all_slots_are_printed(
    tmp_path: Path, pip: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert slot.main([str(filled(tmp_path))]) == 0
    shown = capsys.readouterr().out
    assert pip == [] and "nothing is missing" in shown
    assert [name for name in SLOTS if f"run.sh OUT --slot {name}\n" in shown] == list(SLOTS[1:])
    assert shown.count(f"cp OUT/* {tmp_path}/") == len(SLOTS)
    assert (tmp_path / "gpu_suite.json").stat().st_size > 10_000, "the published results"


def test_results_that_were_brought_back_are_kept(tmp_path: Path) -> None:
    (filled(tmp_path) / "gpu_suite.json").write_text("{}")
    assert slot.main([str(tmp_path)]) == 0
    assert (tmp_path / "gpu_suite.json").read_text() == "{}"


def test_another_version_of_a_wheel_is_not_the_one(
    tmp_path: Path, pip: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (wheel,) = (filled(tmp_path) / "wheels").glob("torchao-*")
    wheel.rename(wheel.with_name("torchao-0.1-py3-none-any.whl"))
    assert slot.main([str(tmp_path)]) == 1
    assert len(pip) == 1 and f"the wheel of {pip[0]}: no network" in capsys.readouterr().out


def test_too_much_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (filled(tmp_path) / "large").open("wb") as file:
        file.truncate(slot.LIMIT + 2_000_000)
    assert slot.main([str(tmp_path)]) == 1
    assert "2.1 MB too much" in capsys.readouterr().out


def test_an_extension_of_other_sources_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (filled(tmp_path) / extension.prebuilt_name()).rename(tmp_path / "_native-0123456789abcdef.so")
    monkeypatch.setattr(extension, "build", lambda log: None)
    monkeypatch.setattr(extension, "copy_stripped", lambda folder: (folder / extension.prebuilt_name()).touch())
    assert slot.main([str(tmp_path)]) == 0
    assert [file.name for file in tmp_path.glob("_native-*")] == [extension.prebuilt_name()]

    def fails(log: Path) -> None:
        raise extension.BuildError("no compiler")

    (tmp_path / extension.prebuilt_name()).unlink()
    monkeypatch.setattr(extension, "build", fails)
    assert slot.main([str(tmp_path)]) == 1
    assert "the extension: no compiler" in capsys.readouterr().out


def test_pip_itself_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    words = next(words for words in slot.FETCHED if words[0] == "download")
    assert "no-such-wheel" in slot._fetch(tmp_path, words, "no-such-wheel==1", sys.executable)
