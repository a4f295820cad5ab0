"""Preferences and rewards: log-probabilities of DPO and GRPO through the head, the reference model's too."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from hf_longmoe import DispatchConfig, LongMoEConfig, VocabConfig, patch_model, unpatch_model
from hf_longmoe.integrations.transformers.token_values import TokenCall
from hf_longmoe.integrations.trl import LongMoEDPOTrainer, LongMoETRLMixin, head

LORA = dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


class LongMoEGRPOTrainer(LongMoETRLMixin, GRPOTrainer):
    pass


@pytest.mark.parametrize("peft", [False, True])
def test_dpo_logs_what_the_stock_trainer_logs(
    build_small, tiny, rows, tokenizer, given, logged, assert_same_logs, peft
):
    logs = []
    for patched in (False, True):
        model, reference = build_small(), None if peft else build_small(router_aux_loss_coef=0.0)
        if patched:
            patch_model(model, tiny)
        trainer = (LongMoEDPOTrainer if patched else DPOTrainer)(
            model=model,
            ref_model=reference,
            args=DPOConfig(**given(use_weighting=not peft)),
            train_dataset=rows("chosen", "rejected"),
            processing_class=tokenizer,
            peft_config=LoraConfig(**LORA) if peft else None,
        )
        logs.append(logged(trainer))
    assert {"rewards/margins", "logps/chosen", "logits/rejected", "mean_token_accuracy"} <= logs[0][0].keys()
    assert logs[0][1]["rewards/margins"] != 0.0
    assert_same_logs(logs[1], logs[0])
    assert all(entry.schedule is not None for entry in model.longmoe.entries)
    if reference is not None:
        assert reference.longmoe.config == tiny and reference.forward.longmoe_outputs == ()
        assert model.forward.longmoe_outputs[-1] == "log_sum_sq_probs"


@pytest.mark.parametrize("cast", [False, True])
def test_grpo_with_an_entropy_bonus(build_small, tiny, rows, tokenizer, given, logged, assert_same_logs, cast):
    """Whose gradient goes through the entropy; with a temperature, and a reference model; a head in float32 too."""
    arguments = dict(
        num_generations=2, max_completion_length=6, temperature=0.7, entropy_coef=0.1, beta=0.1, num_iterations=2
    )
    arguments["cast_lm_head_to_fp32"] = cast
    logs = []
    for patched in (False, True):
        model = build_small()
        model.name_or_path = "small"
        if patched:
            patch_model(model, tiny)
        trainer = (LongMoEGRPOTrainer if patched else GRPOTrainer)(
            model=model,
            reward_funcs=lambda completions, **_: [float(len(set(text.split()))) for text in completions],
            args=GRPOConfig(**given(per_device_train_batch_size=4, **arguments)),
            train_dataset=rows(),
            processing_class=tokenizer,
            peft_config=LoraConfig(**LORA),
        )
        logs.append(logged(trainer))
    assert logs[0][0]["entropy"] > 0 and logs[0][0]["grad_norm"] > 0
    assert_same_logs(logs[1], logs[0])
    assert all(entry.schedule is not None for entry in model.longmoe.entries)


def test_a_head_in_float32_of_a_model_and_its_reference(build, tiny, batch_of):
    """TRL's forward of it stays, for all other calls; in a model that is in bfloat16 otherwise."""

    class Trainer:
        accelerator = SimpleNamespace(parallelism_config=None)
        args = SimpleNamespace(cast_lm_head_to_fp32=True)

    def cast(model):
        lm_head = model.lm_head.float()

        def cast_forward_to_fp32(hidden_states):  # as TRL's
            return torch.nn.functional.linear(hidden_states.float(), lm_head.weight)

        lm_head.forward = cast_forward_to_fp32
        add_fused_lm_head(model, cast_lm_head_to_fp32=True, outputs=("log_probs", *head._NAMES))
        return model

    stock = cast(build("granitemoe", dtype=torch.bfloat16))
    trainer = Trainer()
    trainer.model = cast(patch_model(build("granitemoe", dtype=torch.bfloat16), tiny))
    trainer.ref_model = cast(build("granitemoe", dtype=torch.bfloat16))
    head.bound_head(trainer)
    want = stock(**batch_of, fused_lm_head=True)
    for model in (trainer.model, trainer.ref_model):
        got = model(**batch_of, fused_lm_head=True)
        assert all(entry.schedule is not None for entry in model.longmoe.entries)
        torch.testing.assert_close(got.log_probs, want.log_probs, rtol=2e-2, atol=2e-2)
        assert got.log_probs.dtype == torch.float32
        logits = model(batch_of["input_ids"]).logits
        unpatch_model(model)
        assert model(batch_of["input_ids"]).logits.dtype == logits.dtype == torch.float32


@pytest.mark.parametrize("family", ["granitemoe", "gemma2"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_answer_is_TRL_s_own(build, tiny, batch_of, family, temperature):
    """Every field, with the scales and soft caps of the model's own forward where TRL reads them from its config."""
    outputs = ("log_probs", *head._NAMES)
    answers = []
    for patched in (False, True):
        if family == "gemma2":
            torch.manual_seed(0)
            small = dict(vocab_size=101, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8)
            config = AutoConfig.for_model("gemma2", num_key_value_heads=2, intermediate_size=24, **small)
            config.final_logit_softcapping = 1.5
            model = AutoModelForCausalLM.from_config(config).train()
        else:
            model = build(family, dtype=torch.float32)
        if patched:
            patch_model(model, tiny)
        add_fused_lm_head(model, temperature=temperature, outputs=outputs)
        if patched:
            head._bind(model, tuple(head._NAMES), temperature, False)
        output = model(**batch_of, fused_lm_head=True)
        (output.log_probs * output.entropy).sum().backward()  # a gradient to both
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        answers.append((output, gradients))
    assert all(entry.schedule is not None for entry in model.longmoe.entries)  # and it was not TRL that answered
    (stock, stock_gradients), (ours, our_gradients) = answers
    assert ours.keys() == stock.keys()
    for name, value in stock.items():
        assert ours[name].shape == value.shape and ours[name].dtype == value.dtype, name
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-5, msg=name)
    for name, value in stock_gradients.items():
        torch.testing.assert_close(our_gradients[name], value, rtol=0, atol=2e-5 * value.abs().max().item(), msg=name)


@pytest.fixture
def batch_of():
    ids = torch.randint(3, 101, (2, 19), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(19) % 5 == 0, -100)}


def test_float32_projection_and_formed_logits():
    """Of a half-precision model outside of autocast's reach; and the same of logits that had to be formed."""
    from hf_longmoe.integrations.transformers.deferred import LossCall, defer

    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 5, 8).bfloat16(), torch.randn(33, 8).bfloat16()
    labels = torch.randint(0, 33, (2, 5))
    labels[0, 2] = -100
    fields, config = tuple(head._NAMES.values()), VocabConfig(budget="16KiB")
    calls = [TokenCall(fields, 0.8, True) for _ in range(2)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        deferred = calls[0].answer(config, defer(LossCall(True), hidden, weight, None), labels, None, -100)
    formed = calls[1].answer(config, hidden.float() @ weight.float().T, labels, torch.tensor(9), -100)
    torch.testing.assert_close(deferred, formed)
    for name in ("log_probs", *fields):
        torch.testing.assert_close(getattr(calls[0].values, name), getattr(calls[1].values, name), msg=name)


def test_a_divided_head_is_gathered():
    """Of a ring, whose `gathered` is a collective: on two ranks it is `ring_head.Ring`'s own."""
    from hf_longmoe.integrations.transformers.deferred import LossCall, defer

    class Halves:
        def gathered(self, part):
            return weight if part.dim() == 2 else bias

    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(2, 5, 8), torch.randn(32, 8), torch.randn(32)
    labels = torch.randint(0, 32, (2, 5))
    call, config = TokenCall(("entropy",)), VocabConfig(budget="16KiB")
    logits = defer(LossCall(True), hidden, weight[:16], bias[:16], ring=Halves(), vocab_size=32)
    loss = call.answer(config, logits, labels, None, -100)
    full = torch.nn.functional.linear(hidden, weight, bias).log_softmax(-1)
    want = full.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(call.values.log_probs, want)
    torch.testing.assert_close(loss, -want.mean())


def test_label_smoothing_of_the_config_is_refused(build, tiny, batch_of):
    config = LongMoEConfig(dispatch=DispatchConfig(), vocab=VocabConfig(label_smoothing=0.1))
    model = patch_model(build("llama", dtype=torch.float32), config)
    add_fused_lm_head(model)
    head._bind(model, (), 1.0, False)
    with pytest.raises(ValueError, match="vocab.label_smoothing=0.1 .*set both to 0"):
        model(**batch_of, fused_lm_head=True)
