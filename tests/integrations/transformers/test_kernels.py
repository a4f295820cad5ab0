"""The kernel inside the schedule: the model's own, changed by `set_experts_implementation` as ever."""

import pytest
import torch
from transformers.integrations import moe

from hf_longmoe import DispatchConfig, LongMoEConfig, patch_model


def config(budget="1MiB", **kwargs):
    return LongMoEConfig(dispatch=DispatchConfig(budget=budget, **kwargs))


def test_batched_mm_needs_more_a_row_and_says_so(build, batch):
    """It copies an expert's weights for every row."""
    model = build("mixtral", experts="batched_mm")
    patch_model(model, config("24KiB"))  # the written-out kernel
    with pytest.raises(ValueError, match=r"dispatch\.budget=24576 "):
        patch_model(model, config("24KiB", kernel="model"))
    model.set_experts_implementation("eager")
    patch_model(model, config("24KiB", kernel="model"))
    model.set_experts_implementation("batched_mm")
    with pytest.raises(ValueError, match=r"dispatch\.budget=24576 "):  # before the first step is done
        model(**batch)


def test_set_experts_implementation_changes_the_kernel_and_keeps_the_schedule(build, batch, monkeypatch):
    calls = []
    for name in ("batched_mm", "grouped_mm"):
        stock = moe.ALL_EXPERTS_FUNCTIONS[name]

        def counted(*args, name=name, stock=stock):
            calls.append((name, args[1].shape[0]))
            return stock(*args)

        monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS._global_mapping, name, counted)
    model = build("mixtral", dtype=torch.float32, experts="grouped_mm")
    loss = model(**batch).loss
    assert {name for name, _ in calls} == {"grouped_mm"} and {tokens for _, tokens in calls} == {38}
    patch_model(model, config("64KiB", kernel="model"))
    for implementation in ("grouped_mm", "batched_mm"):
        model.set_experts_implementation(implementation)
        calls.clear()
        torch.testing.assert_close(model(**batch).loss, loss, rtol=1e-6, atol=0)
        assert {name for name, _ in calls} == {implementation}
        assert sum(rows for _, rows in calls) == 3 * 38 * 2  # layers, tokens, slots: rows now, in waves
        assert len(calls) > 3


def test_a_kernel_that_somebody_registered_is_used_inside_the_schedule(build, batch, monkeypatch):
    calls = []

    def mine(*args):
        calls.append(args[1].shape[0])
        return moe.batched_mm_experts_forward(*args)

    monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS._global_mapping, "mine", mine)
    model = build("mixtral")
    loss = model(**batch).loss
    model.set_experts_implementation("mine")
    patch_model(model, config())
    assert "the model's mine" in str(model.longmoe)
    torch.testing.assert_close(model(**batch).loss.float(), loss, rtol=1e-6, atol=0)
    assert sum(calls) == 3 * 38 * 2
