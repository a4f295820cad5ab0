"""Low-rank additions to stacked weights: what autograd gives for their sums, in any layout, whatever trains."""

import pytest
import torch

from hf_longmoe.schedules.dispatch import AdaptedMLP, LocalDispatch, LowRank, Projection, with_factors

E, H, WIDTH, T, K = 5, 12, 10, 40, 2


def relu_squared(x):
    return x.relu().square()


def gated(x):
    gate, up = x[:, ::2], x[:, 1::2]
    return gate.clamp(max=1.0).tanh() * (up + 1)


def draw(*shape):
    return torch.randn(shape, dtype=torch.float64).mul_(0.3).requires_grad_()


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(("gate", "factor"), [(relu_squared, 1), (gated, 2)])
def test_exact(gate, factor, transposed, frozen):
    torch.manual_seed(0)
    shapes = {"up": (factor * WIDTH, H), "down": (H, WIDTH)}
    weights = {name: draw(E, *(shape[::-1] if transposed else shape)) for name, shape in shapes.items()}
    weights |= {f"{name}_bias": draw(E, shape[0]) for name, shape in shapes.items()}
    for weight in weights.values():
        weight.requires_grad_(not frozen)
    low_rank = {
        "up": [LowRank(draw(E, 3, H), draw(E, factor * WIDTH, 3), 2.0)],
        # Experts last, as PEFT has them; and two of different ranks.
        "down": [LowRank(draw(E, r, WIDTH), draw(H, r, E).permute(2, 0, 1), 0.5) for r in (1, 4)],
    }
    found, params = with_factors(tuple(weights), tuple(weights.values()), low_rank, transposed)
    projections = (
        Projection(place, transposed, place + 2, tuple(f for f in found if f.weight == place)) for place in (0, 1)
    )
    block = AdaptedMLP(gate, *projections, len(params))
    x, w, g = draw(T, H), draw(T, K), draw(T, H).detach()
    index = torch.rand(T, E - 1).topk(K)[1]  # the last expert has no rows

    schedule = LocalDispatch(12 * block.bytes_per_row(H, params))
    assert schedule.rows(x, block, params) < T
    leaves = [t for t in (x, w, *params) if t.requires_grad]
    y = schedule(x, index, w, block, params)
    got = torch.autograd.grad(y, leaves, g)

    def effective(name):
        deltas = [added.scale * added.b @ added.a for added in low_rank[name]]
        return weights[name] + sum(d.transpose(1, 2) if transposed else d for d in deltas)

    up, down = effective("up"), effective("down")
    want = torch.zeros_like(x)
    for slot in range(K):
        e = index[:, slot]
        product = "ti,tio->to" if transposed else "ti,toi->to"
        hidden = torch.einsum(product, x, up[e]) + weights["up_bias"][e]
        out = torch.einsum(product, gate(hidden), down[e]) + weights["down_bias"][e]
        want = want + out * w[:, slot, None]
    torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-13)
    for a, b in zip(got, torch.autograd.grad(want, leaves, g), strict=True):
        assert b.abs().max() > 0 and (a - b).abs().max() <= 1e-12 * b.abs().max()


def test_what_does_not_fit_is_refused():
    weight = torch.empty(E, H, WIDTH)
    with pytest.raises(ValueError, match="low_rank='gate' names no stacked weight .*'down'"):
        with_factors(["down"], [weight], {"gate": []})
    for a, b in (((E, 2, H), (E, WIDTH, 2)), ((E, 2, WIDTH), (E, H, 3)), ((E - 1, 2, WIDTH), (E, H, 2))):
        with pytest.raises(ValueError, match=r"low_rank\['down'\]: a .* and b .* do not fit a weight \(5, 12, 10\)"):
            with_factors(["down"], [weight], {"down": [LowRank(torch.empty(a), torch.empty(b))]})
    assert with_factors(["down"], [weight], {"down": [LowRank(torch.empty(E, 2, H), torch.empty(E, WIDTH, 2))]}, True)
