"""Hooks on patched modules run once a forward, as before: not once a wave or a tile, and not again in backward."""

from hf_longmoe import DispatchConfig, LongMoEConfig, patch_model


def test_hooks_run_once_a_forward(build, batch):
    model = build("deepseek_v3")
    config = LongMoEConfig(dispatch=DispatchConfig(budget="32KiB", kernel="model"))
    patch_model(model, config)
    mlp = model.model.layers[1].mlp
    calls = []
    for module in (mlp.experts, mlp.shared_experts, model.model.layers[0].mlp):
        module.register_forward_pre_hook(lambda m, _: calls.append(("before", type(m).__name__)))
        module.register_forward_hook(lambda m, *_: calls.append(("after", type(m).__name__)))
    model(**batch).loss.backward()
    assert len(calls) == 6
