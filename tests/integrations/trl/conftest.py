"""A tokenizer, data and trainers of TRL's, all made here."""

import random
import sys

import pytest

if sys.version_info < (3, 11):
    collect_ignore_glob = ["test_*.py"]  # TRL 1.16 asks for Python 3.11

WORDS = [f"w{i}" for i in range(95)]
_GIVEN = dict(
    max_steps=2,
    per_device_train_batch_size=2,
    optim="sgd",  # AdamW's first steps are signs of gradients: a rounding error of a small one is a step
    learning_rate=0.3,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    bf16=False,
    disable_tqdm=True,
)


@pytest.fixture
def given(tmp_path):
    """`given(**more)`: the arguments that all runs share, and more."""

    def given(**more):
        return {"output_dir": str(tmp_path), **_GIVEN, **more}

    return given


@pytest.fixture(scope="session")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{word: i + 3 for i, word in enumerate(WORDS)}}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


@pytest.fixture(scope="session")
def rows():
    """`rows(*columns)`: twelve prompts, and texts of other lengths in each of the other columns."""
    from datasets import Dataset

    def rows(*columns):
        draw = random.Random(0)

        def text(words):
            return " ".join(draw.choice(WORDS) for _ in range(words))

        def row(i):
            return {"prompt": text(3 + i % 4)} | {column: " " + text(4 + (i * 5) % 7) for column in columns}

        return Dataset.from_list([row(i) for i in range(12)])

    return rows


@pytest.fixture
def build_small(build):
    """`build_small(family="mixtral", **config)`: in float32, with the router's auxiliary loss."""
    import torch

    def small(family="mixtral", **config):
        given = dict(num_hidden_layers=2, output_router_logits=True, router_aux_loss_coef=0.1)
        return build(family, dtype=torch.float32, pad_token_id=0, eos_token_id=1, **given | config)

    return small


@pytest.fixture
def tiny():
    """A few rows a wave, a few tokens a tile."""
    from hf_longmoe import DispatchConfig, LongMoEConfig, VocabConfig

    return LongMoEConfig(dispatch=DispatchConfig(budget="16KiB"), vocab=VocabConfig(budget="16KiB"))


@pytest.fixture
def logged():
    """`logged(trainer)`: what each step of a run logged, but for times."""

    def logged(trainer):
        trainer.train()
        return without_times([log for log in trainer.state.log_history if "loss" in log])

    return logged


def without_times(logs):
    return [{k: v for k, v in log.items() if not k.endswith(("_time", "runtime", "per_second"))} for log in logs]


@pytest.fixture
def assert_same_logs():
    """`assert_same_logs(got, want)`: step by step, every number, to float32's rounding."""

    def assert_same_logs(got, want):
        assert len(got) == len(want) >= 2
        assert len({log["loss"] for log in want}) == len(want)
        for ours, stock in zip(got, want, strict=True):
            assert ours.keys() == stock.keys()
            for name, value in stock.items():
                tolerance = 1e-4 if name == "grad_norm" else 1e-5
                assert ours[name] == pytest.approx(value, rel=tolerance, abs=1e-6), name

    return assert_same_logs
