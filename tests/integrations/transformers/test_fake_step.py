"""A fake step against a real one, byte for byte; two depths against the real depth; real sizes; bad input."""

import pytest
import torch
from transformers import AutoConfig, CLIPConfig

from hf_longmoe import DispatchConfig, LongMoEConfig, VocabConfig
from hf_longmoe.integrations.transformers.experts import is_experts
from hf_longmoe.integrations.transformers.fake_step import ATTENTION, fake_step, run_step, two_depths
from hf_longmoe.integrations.transformers.planning_shape import depths_of, shape_of
from hf_longmoe.planner import Layout
from hf_longmoe.schedules.rehearsal import rehearsing

SMALL = dict(
    vocab_size=1000,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=2,
    num_experts_per_tok=2,
    use_cache=False,
)
FAMILIES = {
    "mixtral": dict(intermediate_size=128, num_local_experts=4),
    "qwen3_moe": dict(
        moe_intermediate_size=64, num_experts=8, intermediate_size=128, mlp_only_layers=[0], head_dim=16
    ),
    "deepseek_v3": dict(
        moe_intermediate_size=64,
        intermediate_size=128,
        n_routed_experts=8,
        n_group=2,
        topk_group=2,
        first_k_dense_replace=1,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    ),
    "gpt_oss": dict(intermediate_size=64, num_local_experts=8, head_dim=16, sliding_window=32),
}
# Torch's own kernel on the CPU forms S x S for the first (values narrower than keys), and cannot run the second.
OWN_ATTENTION = ("deepseek_v3", "gpt_oss")
CAPS = LongMoEConfig(dispatch=DispatchConfig(budget="256KiB"), vocab=VocabConfig(budget="256KiB"))
TOKENS = 512
CHECKPOINTING = ("off", "non-reentrant", "reentrant")


def config_of(family, **options):
    return AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family], **options})


def route_evenly(model):
    """Token i's slot j goes to expert (i + j) mod E, whatever its router says."""

    def route(experts, args):
        args[1].data.copy_(tables[experts][: args[1].shape[0]])

    tables = {}  # made here, so that the step itself allocates nothing for it
    for module in model.modules():
        if is_experts(module):
            token, slot = torch.arange(TOKENS), torch.arange(SMALL["num_experts_per_tok"])
            tables[module] = (token[:, None] + slot) % module.num_experts
            module.register_forward_pre_hook(route, prepend=True)


@pytest.mark.parametrize("patched", [None, CAPS], ids=["stock", "patched"])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fake_step_equals_a_real_one_byte_for_byte(family, checkpointing, patched):
    config, layout = config_of(family), Layout(seq_len=TOKENS, checkpointing=checkpointing)
    torch.manual_seed(0)
    attention = ATTENTION if family in OWN_ATTENTION else "sdpa"
    real, _ = run_step(config, layout, patched, attention=attention, prepare=route_evenly)
    fake = fake_step(config, layout, patched=patched)
    assert fake.components == real.components
    assert fake == real


@pytest.mark.parametrize(
    ("family", "checkpointing", "patched"),
    [
        *((family, checkpointing, None) for family in FAMILIES for checkpointing in ("off", "non-reentrant")),
        ("mixtral", "non-reentrant", CAPS),
        ("qwen3_moe", "off", CAPS),
        ("deepseek_v3", "reentrant", CAPS),
    ],
)
def test_two_depths_give_the_real_depth(family, checkpointing, patched):
    config, layout = config_of(family, num_hidden_layers=6), Layout(seq_len=TOKENS, checkpointing=checkpointing)
    ran, report = two_depths(config, layout, patched=patched)
    assert ran == {"mixtral": (1, 2), "gpt_oss": (2, 4)}.get(family, (2, 3))
    real = fake_step(config, layout, patched=patched)
    # Of waves whose sizes differ, none may be high both times: then the two lines are of others.
    assert report.total == (real.total if patched is None else pytest.approx(real.total, rel=0.002))
    # A phase's highest total may fall between the moments at which a component is highest.
    assert report.phases == pytest.approx(real.phases, rel=0.005)
    for name, part in real.components.items():
        found = report.components[name]
        assert (found.peak, found.working) == (part.peak, part.working), name
        assert found.at_peak == part.at_peak or patched is not None, name
        # Unpatched, each phase too. With caps and no checkpointing, what earlier layers keep for backward grows past
        # the working set of one within that phase, after the depths that were run: too low, and below the peak.
        if patched is None or checkpointing != "off":
            assert found.phases == part.phases, name


def test_a_real_model_runs_without_weights_and_its_experts_are_divided():
    """DeepSeek-V3 at 64k tokens a rank, one of 64 ranks' experts: exact sizes of what grows by hand."""
    config, layout = AutoConfig.for_model("deepseek_v3"), Layout(seq_len=65536, world_size=64, ep_size=64)
    report = fake_step(config, layout, depth=4)
    shape = shape_of(config)
    held = shape.parameters - sum(layer.total for layer in shape.layers[4:]) - shape.layers[3].experts * 63 // 64
    parts = report.components
    assert parts["boundaries"].peak == 4 * layout.tokens * shape.hidden * layout.itemsize
    nbytes = held * layout.itemsize + 2 * sum(shape.wide[:4])
    assert parts["gradients"].peak == nbytes
    assert parts["parameters"].peak == pytest.approx(nbytes, rel=1e-5)  # and buffers
    assert parts["vocab"].peak == pytest.approx(3 * layout.tokens * shape.vocab * 4, rel=0.01)


def test_nothing_is_left_behind():
    config = config_of("mixtral")
    before = config.to_dict()
    fake_step(config, Layout(seq_len=32), patched=CAPS)
    assert config.to_dict() == before and rehearsing() is None
    assert not isinstance(torch.zeros(1), torch._subclasses.FakeTensor)


def test_the_last_label_of_each_sequence_is_ignored():
    """In bfloat16 gathered hidden states of the valid tokens exist beside the others only where some are ignored."""
    config, one = config_of("mixtral"), Layout(seq_len=256)
    two = Layout(seq_len=128, micro_batch=2)
    torch.manual_seed(0)
    real, _ = run_step(config, two, CAPS, attention="sdpa", prepare=route_evenly)
    assert fake_step(config, two, patched=CAPS) == real
    assert two.tokens == one.tokens


def test_errors_say_what_is_wrong():
    layout = Layout(seq_len=64)
    with pytest.raises(ValueError, match="dtype='float32': a fake step runs in \"bfloat16\" only"):
        fake_step(config_of("mixtral"), Layout(seq_len=64, dtype="float32"))
    with pytest.raises(ValueError, match="ep_size=3 does not divide the 4 experts of model.layers.0.mlp.experts"):
        fake_step(config_of("mixtral"), Layout(seq_len=64, world_size=3, ep_size=3))
    with pytest.raises(ValueError, match="there is no causal LM for it"):
        fake_step(CLIPConfig().vision_config, layout)
    with pytest.raises(ValueError, match="is below one wave of 4 rows"):
        fake_step(config_of("mixtral"), layout, patched=LongMoEConfig(dispatch=DispatchConfig(budget=1024)))
    switch = AutoConfig.for_model("switch_transformers")
    with pytest.raises(ValueError, match="switch_transformers"):
        fake_step(switch, layout)


SIZES = {  # parameters, as published or as the library's model has them
    "mixtral": 46_702_792_704,
    "deepseek_v3": 671_026_404_352,
    "gpt_oss": 116_829_156_672,
}


@pytest.mark.parametrize("family", SIZES)
def test_the_shape_of_a_real_config(family):
    config = AutoConfig.for_model(family)
    shape = shape_of(config)
    assert shape.parameters == SIZES[family]
    assert shape.depth == config.num_hidden_layers
    assert depths_of(config) == {"mixtral": (1, 2), "deepseek_v3": (4, 5), "gpt_oss": (2, 4)}[family]
    gated = 3 * shape.hidden * shape.expert_width
    bias = (2 * shape.expert_width + shape.hidden) * shape.expert_bias
    assert shape.layers[-1].experts == shape.experts * (gated + bias)
    assert all(layer.other == 0 for layer in shape.layers) and shape.other == 0
    assert shape.standard == (family != "gpt_oss")


def test_the_shape_of_layers_without_experts_and_of_shared_ones():
    shape = shape_of(AutoConfig.for_model("deepseek_v3"))
    assert shape.sparse == (False,) * 3 + (True,) * 58
    assert shape.layers[0].dense == 3 * 7168 * 18432 and shape.dense_width == 18432
    assert shape.layers[3].shared == 3 * 7168 * 2048 and shape.shared_width == 2048
    assert shape.layers[3].router == 7168 * 256
    assert (shape.head_dim, shape.value_dim, shape.q_rank, shape.kv_rank, shape.rope_dim) == (192, 128, 1536, 512, 64)
    dense = shape_of(config_of_dense())
    assert dense.experts == dense.expert_parameters == 0 and not any(dense.sparse) and dense.dense_width == 96
    tied = shape_of(config_of_dense(tie_word_embeddings=True))
    assert tied.tied and tied.head == 0 and tied.parameters == dense.parameters - dense.head


def config_of_dense(**options):
    sizes = dict(hidden_size=32, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, vocab_size=101)
    return AutoConfig.for_model("llama", **{**sizes, **options})


def test_a_dense_model_has_a_fake_step_too():
    report = fake_step(config_of_dense(num_key_value_heads=2), Layout(seq_len=64))
    assert report.components["dispatch"].peak == 0 and report.components["vocab"].peak > 0


def test_a_config_without_what_is_needed_is_named():
    config = config_of("mixtral")
    config.num_hidden_layers = 0
    with pytest.raises(ValueError, match="num_hidden_layers=0 must be a positive number"):
        shape_of(config)
