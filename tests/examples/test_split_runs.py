"""What a client's folder goes on with, and what programs say of options that cannot be used."""

from __future__ import annotations

import contextlib
import runpy
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from lq_testing.split_runs import certificates, client, load, serving
from split_learning import client as fine_tune
from split_learning import models
from split_learning import server as serve
from split_learning.callbacks import SplitLearning
from split_learning.settings import OptionError, SplitSettings
from split_learning.wire.common import AddressError, PeerLost, Retry

pytest.importorskip("peft")
pytestmark = pytest.mark.uninitialized_memory_ok  # transformers fills what it allocates later


@pytest.fixture
def words(text_folder: Path, tmp_path: Path) -> list[str]:
    given = {"batch-size": 2, "sequence": 16, "validation-batches": 0, "accelerator": "cpu"}
    given |= {"text": text_folder, "run": tmp_path / "run"}
    given["certificate"] = certificates() / "alice.pem"
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def test_a_run_goes_on_with_its_own_options_only(
    words: list[str],
    text_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fine_tune, "Retry", lambda: Retry(attempts=1))
    with serving(load(SplitSettings())) as server:
        at = ["--connect", f"127.0.0.1:{server.address[1]}"]
        fine_tune.main([*words, *at, "--steps", "2"])
        assert "goes on" not in capsys.readouterr().out
        fine_tune.main([*words, *at, "--steps", "3", "--save-every", "1"])
        assert f"run in {tmp_path / 'run'} goes on after 2 steps\n" in capsys.readouterr().out
    other = tmp_path / "other"
    shutil.copytree(text_folder, other)
    (other / "new.txt").write_text("another text " * 50)
    # Nobody listens any more, so what is refused now is refused before anything is sent.
    for given, difference in (
        ("--bits 3", "`--bits 4`, not `--bits 3`. It has done 3 steps"),
        ("--codec channel", "`--codec amaq`, not `--codec channel`"),
        ("--peft prefix", "`--peft lora`, not `--peft prefix`"),
        ("--targets q_proj", "`--targets q_proj,k_proj,v_proj,o_proj`, not `--targets q_proj`"),
        (f"--text {other}", f"`--text {text_folder}`, not `--text {other}`"),
        ("--learning-rate 0.1 --beta 1", "no `--beta`, not `--beta 1.0`"),
        ("--learning-rate 0.1 --beta 1", "`--learning-rate 0.001`, not `--learning-rate 0.1`; "),
        ("--deployment everything --train-ends", "no `--train-ends`, not `--train-ends`"),
    ):
        with pytest.raises(OptionError) as error:
            fine_tune.main([*words, *at, *given.split()])
        assert difference in str(error.value)
        assert "another `--run` to begin anew" in str(error.value)
    (text_folder / "new.txt").write_text("another text " * 50)
    with pytest.raises(
        OptionError, match="with text whose tokens have the digest .*, not text who"
    ):
        fine_tune.main([*words, *at])
    (text_folder / "new.txt").unlink()
    text_folder.rename(tmp_path / "moved")
    with pytest.raises(PeerLost):  # which is the first that it wants of anybody
        fine_tune.main([*words, *at, "--text", str(tmp_path / "moved"), "--steps", "9"])


def test_a_folder_of_something_else_is_left_alone(words: list[str], tmp_path: Path) -> None:
    import torch

    (tmp_path / "run").mkdir()
    torch.save({"state_dict": {}, "global_step": 7}, tmp_path / "run" / "last.ckpt")
    with pytest.raises(OptionError, match=r"last\.ckpt is not of this program. Give another"):
        fine_tune.main(words)
    for content in (b"", b"junk", (tmp_path / "run" / "last.ckpt").read_bytes()[:99]):
        (tmp_path / "run" / "last.ckpt").write_bytes(content)
        with pytest.raises(OptionError, match="is no checkpoint, or a part of one"):
            fine_tune.main(words)


def callback_of(**settings: Any) -> SplitLearning:
    callback = SplitLearning()
    callback._model = client(SplitSettings(**settings), None)  # type: ignore[arg-type]
    return callback


def test_a_checkpoint_of_another_program_names_the_setting_that_differs() -> None:
    saved = callback_of().state_dict()
    callback_of().load_state_dict(saved)
    for name, value in {"bits": 3, "gradients": "int8", "alpha": 8.0}.items():
        with pytest.raises(ValueError, match=f"`{name}=.*but this run has `{name}={value!r}`"):
            callback_of(**{name: value}).load_state_dict(saved)


def test_aq_sgd_says_what_does_not_go_on() -> None:
    for codec in ("channel", "aq_sgd"):
        callback = callback_of(codec=codec)
        warns = pytest.warns(UserWarning, match="travel in full precision once again")
        with warns if codec == "aq_sgd" else contextlib.nullcontext():
            callback.load_state_dict(callback.state_dict())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--text /nowhere", "`--text=/nowhere` is not a folder"),
        ("--sequence 90000", "Give more text"),
        ("--batch-size 9999", "`--batch-size=9999`. Lower the batch size or `--sequence`"),
        (
            "--targets foo",
            "`--targets foo` names nothing that LoRA can adapt. This model has down_",
        ),
        (
            "--targets q_proj,k_prj",
            "LoRA finds no 'k_prj'. This model has down_proj, gate_proj, k_",
        ),
        ("--targets lm_head", "which is not part of the trunk"),
        ("--model .", "`--model .` cannot be read"),
        ("--connect localhost", "'localhost' is no address: write host:port"),
    ],
)
def test_a_client_says_which_option_is_wrong(words: list[str], given: str, message: str) -> None:
    with pytest.raises((AddressError, OptionError)) as error:
        fine_tune.main([*words, *given.split()])
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert "--data" not in str(error.value).replace("--data.train_fraction", "")


@pytest.mark.parametrize("given", ["--steps 0", "--sequence 2", "--batch-size no"])
def test_numbers_have_a_least_value(
    words: list[str], given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        fine_tune.main([*words, *given.split()])
    assert " or more" in capsys.readouterr().err


def test_a_server_refuses_sizes_and_addresses_before_a_client_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OptionError, match=f"`--listen {address}` is not available"):
            serve.main(["--no-authentication", "--listen", address])
    monkeypatch.setitem(models._SMALL, "hidden_size", 72)
    monkeypatch.setitem(models._SMALL, "head_dim", 16)
    with pytest.raises(
        OptionError, match="rows of '.*' have 72 values, .* Use `--gradients bf16` at both"
    ):
        serve.main(["--no-authentication"])


@pytest.mark.parametrize("program", ["client", "server"])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--rank", "0", "--no-authentication"], "OptionError: `--rank 0` must be at least 1"),
        ([], "CertificateError: There is no certificate: name a file"),
    ],
)
def test_programs_end_with_one_line_that_says_what_to_do(
    program: str,
    given: list[str],
    message: str,
    examples: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", [program, *given])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit, match=f"^{message}"):
        runpy.run_path(str(examples / "split_learning" / f"{program}.py"), run_name="__main__")
