"""The study of fine-tuning at a tiny size: tasks, scores, pairs of runs, and the report."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

Load = Callable[[str], ModuleType]
Run = Callable[..., str]

WORDS = "Sort these words: b, c, a.\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights that reads bytes, in Hugging Face's format."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("model")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {word: index for index, word in enumerate(["<eos>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(path)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 257}
    layers = {"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(**sizes, **layers, tie_word_embeddings=True)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


class _Knows(torch.nn.Module):
    """Puts all probability on what follows, but for some positions, where it is on token 0."""

    def __init__(self, following: torch.Tensor, misses: list[tuple[int, int]]) -> None:
        super().__init__()
        self.following = following.clone().clamp(min=0)
        for row, column in misses:
            self.following[row, column] = 0

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        logits = 50.0 * torch.nn.functional.one_hot(self.following, 300).float()
        return type("Output", (), {"logits": logits})


def test_an_answer_is_right_if_all_of_it_is(load: Load, folder: Path) -> None:
    data = load("fine_tuning_data")
    _, tokenizer = load("pretrained").load(folder)
    sort, total = ("sort", WORDS, " a, b, c.\n"), ("sum", "1 and 2?\n", " 3.\n")
    drawn = iter([sort, total, sort] * 2)  # the last does not fit any more
    blocks = data.task_blocks(tokenizer, 96, 2, drawn)
    assert blocks.kinds == ("sort", "sum", "sort", "sum")
    for number, answer in enumerate([" a, b, c.\n", " 3.\n"] * 2):
        assert tokenizer.decode(blocks.targets[blocks.example == number]) == answer
    counted = blocks.targets != data.IGNORED
    assert torch.equal(counted, blocks.example >= 0)

    exact = data.evaluate(_Knows(blocks.targets, []), blocks, 2)
    assert exact == {"loss": pytest.approx(0, abs=1e-6), "accuracy": 100, "sort": 100, "sum": 100}
    last = (blocks.example[0] == 0).nonzero()[-1].item()  # the end of the first answer
    missed = data.evaluate(_Knows(blocks.targets, [(0, last)]), blocks, 2)
    assert (missed["accuracy"], missed["sort"], missed["sum"]) == (75, 50, 100)
    assert missed["loss"] == pytest.approx(50 / counted[0].sum().item() / 2, rel=1e-3)


def test_examples_have_the_answers(load: Load) -> None:
    drawn: Iterator[tuple[str, str, str]] = load("fine_tuning_data").examples(seed=0)
    found = {
        kind: (question, answer) for kind, question, answer in (next(drawn) for _ in range(40))
    }
    assert sorted(found) == ["date", "length", "sort", "sum"]
    question, answer = found["sum"]
    had, more = (int(word) for word in question.split() if word.isdecimal())
    assert answer == f" {had + more}.\n"
    words = found["sort"][0].removeprefix("Sort these words: ").rstrip(".\n").split(", ")
    assert found["sort"][1] == f" {', '.join(sorted(words))}.\n"


def test_rows_train_and_are_compared_by_seed(
    run: Run, load: Load, folder: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    options = ("fine_tuning.py", "--model", str(folder), "--cpu", "--json", str(report))
    options += ("--steps", "4", "--batch", "4", "--seq", "96", "--val", "4", "--lr", "2e-2")
    options += ("--lora-lr", "2e-2")
    names = ["bf16", "all together", "AdaptiveBits 3", "aq_sgd, 4 stages", "LoRA, bf16"]
    run(*options, "--seeds", "1", "--rows", ";".join(names))
    results = json.loads(report.read_text())["results"]
    found = {each["row"]: each for each in results["runs"]}
    losses = {name: found[name]["alone"]["text_loss"] for name in names}
    assert len(set(losses.values())) == len(names), "every row trains in its own way"
    assert all(losses[name] < 5 for name in names[:-1]), "ln(257) is 5.55, where they begin"
    assert losses["LoRA, bf16"] < 5.5
    assert found["all together"]["bits"] == pytest.approx(5.6, abs=0.1)
    assert found["AdaptiveBits 3"]["bits"] == pytest.approx(3, abs=0.11)
    coded = found["AdaptiveBits 3"]["with_codes"]["text_loss"]
    assert coded != losses["AdaptiveBits 3"], "validation has the codes, too"
    assert found["aq_sgd, 4 stages"]["with_codes"] == found["aq_sgd, 4 stages"]["alone"]

    shown = run(*options, "--seeds", "2", "--rows", "bf16;agoq")  # goes on with the report
    assert "bf16:0 " not in shown
    assert "bf16:1 " in shown
    after = json.loads(report.read_text())["results"]["runs"]
    seeds = {(each["row"], each["seed"]): each for each in after}
    assert seeds["all together", 0] == found["all together"]
    nats = [
        seeds["agoq", seed]["alone"]["text_loss"] - seeds["bf16", seed]["alone"]["text_loss"]
        for seed in (0, 1)
    ]
    mean, error = sum(nats) / 2, abs(nats[0] - nats[1]) / 2
    rows = {row[0]: row for row in load("table").fine_tuning_rows(after)}
    assert rows["agoq"][3] == f"{mean:+.4f} ± {error:.4f}"
    assert rows["LoRA, bf16"][3] == "-", "compared with itself"


def test_a_process_reports_what_fails_and_goes_on(load: Load, folder: Path, tmp_path: Path) -> None:
    study, runs = load("fine_tuning"), load("fine_tuning_runs")
    model, tokenizer = load("pretrained").load(folder)
    data = load("fine_tuning_data").load_data(tokenizer, 96, 2, 2)
    torch.save((model, data), tmp_path / "prepared.pt")
    runs.ROWS["of an unknown recipe"] = runs.Row(recipe="no such recipe")
    tasks: queue.Queue[Any] = queue.Queue()
    results: queue.Queue[Any] = queue.Queue()
    for task in (("of an unknown recipe", 0), ("bf16", 0), None):
        tasks.put(task)
    study.work("cpu", tmp_path / "prepared.pt", runs.Settings(steps=1, batch=4), tasks, results)
    failed, ended = results.get_nowait(), results.get_nowait()
    assert "no such recipe" in failed["error"]
    assert "error" not in ended
    assert "failed: of an unknown recipe:0" in study.summary([failed, ended])


def test_low_rank_starts_at_zero_and_trains_alone(load: Load) -> None:
    block = torch.nn.ModuleList(
        [torch.nn.Linear(4, 6, bias=False), torch.nn.Linear(6, 4, bias=False)]
    )
    x = torch.randn(3, 4)
    before = block[0](x)
    block.requires_grad_(False)
    load("fine_tuning_runs").add_low_rank(block, rank=2)
    weights = [w for w in block.parameters() if w.requires_grad]
    assert [tuple(w.shape) for w in weights] == [(2, 4), (6, 2), (2, 6), (4, 2)]
    assert torch.equal(block[0](x), before)
    with torch.no_grad():
        weights[1].fill_(1.0)
    torch.testing.assert_close(block[0](x), before + 2 * (x @ weights[0].T).sum(1, keepdim=True))
