"""What a prediction starts from: a model's sizes and how it is laid out over the ranks. Plain integers, no tensors."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hf_longmoe.names import nearest_hint

__all__ = ["CHECKPOINTING", "DTYPES", "OPTIMIZERS", "LayerParameters", "Layout", "ModelShape"]

CHECKPOINTING = ("non-reentrant", "reentrant", "off")
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}
OPTIMIZERS = ("fused", "foreach", "for-loop")


@dataclass(frozen=True, kw_only=True)
class LayerParameters:
    """
    Parameters of one decoder layer by part, as numbers of elements.

    Arguments:
        attention: attention, or what stands in its place (a state-space mixer).
        norms: norms outside of attention and MLP.
        router, experts, shared: of a MoE layer; `shared` are the shared experts.
        dense: the MLP of a layer without experts, or beside them.
        other: everything else.
    """

    attention: int = 0
    norms: int = 0
    router: int = 0
    experts: int = 0
    shared: int = 0
    dense: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """
    The sizes of a causal LM.

    Arguments:
        model_type: as in its config.
        hidden: H, the width of a layer's input.
        vocab: V, rows of the LM head.
        layers: one entry a decoder layer.
        embedding, final_norm, head, other: parameters outside of the layers. `head` is 0 where it is tied to the
            embedding.
        wide: of each layer's parameters, how many are float32 also in a bfloat16 model.
        largest_parameter: elements of the largest single parameter.
        heads, kv_heads: attention heads; `kv_heads` of keys and values.
        head_dim: width of a head's query and key.
        value_dim: width of a head's value.
        q_rank, kv_rank, rope_dim: of multi-head latent attention; 0 where there is none (or no rank on the query).
        experts: E, experts of a MoE layer; 0 for a dense model.
        top_k: k, experts of a token.
        expert_width: I, inner width of an expert.
        shared_width: inner width of the shared experts together.
        dense_width: inner width of the MLP in layers without experts.
        tied: the head is the embedding.
        softcap: the logits have a soft cap.
        head_bias, expert_bias: whether there is one.
        gated: experts have a gate; `standard`: the usual gated MLP, whose backward can be written out.
        router_dtype: dtype of the routing weights that reach the experts, in a bfloat16 model.
        router_loss: the config asks for the router's auxiliary loss.
        period, prefix: layers repeat with this period after so many that do not.
    """

    model_type: str
    hidden: int
    vocab: int
    layers: tuple[LayerParameters, ...]
    embedding: int
    head: int
    final_norm: int
    other: int
    wide: tuple[int, ...]
    largest_parameter: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    experts: int = 0
    top_k: int = 0
    expert_width: int = 0
    shared_width: int = 0
    dense_width: int = 0
    tied: bool = False
    softcap: bool = False
    head_bias: bool = False
    expert_bias: bool = False
    gated: bool = True
    standard: bool = True
    router_dtype: str = "float32"
    router_loss: bool = False
    prefix: int = 0
    period: int = 1

    @property
    def depth(self) -> int:
        """The number of decoder layers."""
        return len(self.layers)

    @property
    def sparse(self) -> tuple[bool, ...]:
        """Which layers have experts."""
        return tuple(layer.experts > 0 for layer in self.layers)

    @property
    def parameters(self) -> int:
        """All parameters, each counted once."""
        inside = sum(layer.total for layer in self.layers)
        return inside + self.embedding + self.head + self.final_norm + self.other

    @property
    def expert_parameters(self) -> int:
        """Parameters that expert parallelism divides."""
        return sum(layer.experts for layer in self.layers)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """
    How a training step is spread over the ranks.

    Arguments:
        seq_len (`int`): tokens of a sequence, over all ranks that share it.
        micro_batch (`int`, defaults to 1): sequences of one forward, per rank (or per group of `cp_size` ranks).
        world_size (`int`, defaults to 1): ranks.
        ep_size (`int`, defaults to 1): ranks among which a layer's experts are divided.
        cp_size (`int`, defaults to 1): ranks that share a sequence.
        fsdp_size (`int`, *optional*): ranks among which parameters, gradients and optimizer state are divided; all of
            `world_size` if not given.
        dtype (`str`, defaults to `"bfloat16"`): of the computation: activations, gathered weights.
        parameter_dtype (`str`, *optional*): of the parameters as they are kept, of their gradients and both moments;
            `dtype` if not given. `"float32"` beside `"bfloat16"` is FSDP2's mixed precision.
        imbalance (`float`, defaults to 1.0): under `ep_size`, rows that the fullest rank receives over the mean.
        optimizer (`str`, defaults to `"fused"`): how `torch.optim.AdamW` steps: `"fused"` (what the Trainer uses),
            `"foreach"` or `"for-loop"`.
        checkpointing (`str`, defaults to `"non-reentrant"`): `"non-reentrant"`, `"reentrant"` or `"off"`.

    Raises:
        `ValueError`: a number that is not positive, sizes that do not divide the ranks, a sequence shorter than the
            ranks that share it, or an unknown name; the message says what would work.
    """

    seq_len: int
    micro_batch: int = 1
    world_size: int = 1
    ep_size: int = 1
    cp_size: int = 1
    fsdp_size: int | None = None
    dtype: str = "bfloat16"
    parameter_dtype: str | None = None
    imbalance: float = 1.0
    optimizer: str = "fused"
    checkpointing: str = "non-reentrant"

    def __post_init__(self) -> None:
        if self.fsdp_size is None:
            object.__setattr__(self, "fsdp_size", self.world_size)
        if self.parameter_dtype is None:
            object.__setattr__(self, "parameter_dtype", self.dtype)
        for name in ("seq_len", "micro_batch", "world_size", "ep_size", "cp_size", "fsdp_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1.")
        for name in ("ep_size", "cp_size", "fsdp_size"):
            value = getattr(self, name)
            if self.world_size % value:
                works = [n for n in range(1, self.world_size + 1) if not self.world_size % n]
                raise ValueError(f"{name}={value} does not divide world_size={self.world_size}; one of {works} would.")
        if not 1.0 <= self.imbalance <= self.ep_size:
            raise ValueError(
                f"imbalance={self.imbalance!r} must be from 1 (balanced) to ep_size={self.ep_size} (all to one rank)."
            )
        if self.seq_len < self.cp_size:
            raise ValueError(
                f"seq_len={self.seq_len} is shorter than cp_size={self.cp_size}: a rank would have no token. Give at"
                f" least {self.cp_size} tokens, or a cp_size of at most {self.seq_len}."
            )
        self._choice("dtype", tuple(DTYPES))
        self._choice("parameter_dtype", tuple(DTYPES))
        self._choice("optimizer", OPTIMIZERS)
        self._choice("checkpointing", CHECKPOINTING)

    def _choice(self, name: str, known: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in known:
            hint = nearest_hint(value, known)
            raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(known)}.{hint}")

    @property
    def local_seq_len(self) -> int:
        """Tokens of a sequence on one rank: the most that any has."""
        return -(-self.seq_len // self.cp_size)

    @property
    def tokens(self) -> int:
        """Tokens on one rank in one forward."""
        return self.micro_batch * self.local_seq_len

    @property
    def itemsize(self) -> int:
        """Bytes of an element of `dtype`."""
        return DTYPES[self.dtype]

    def check(self, shape: ModelShape) -> None:
        """
        Raises:
            `ValueError`: the model's experts cannot be divided among `ep_size` ranks.
        """
        if self.ep_size > 1 and not shape.experts:
            raise ValueError(
                f"ep_size={self.ep_size}, but {shape.model_type} as configured has no experts; give ep_size=1."
            )
        if shape.experts % self.ep_size:
            works = [n for n in range(1, self.world_size + 1) if not (self.world_size % n or shape.experts % n)]
            raise ValueError(
                f"ep_size={self.ep_size} does not divide the {shape.experts} experts of {shape.model_type}; one of"
                f" {works} would."
            )
