"""What a network looks like, whatever family it came from: small frozen parts, composed once by a family's parser.

Knows nothing of config.json (that is `families/`), of weights on disk (`checkpoint.py`) or of devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kernels.routing import RoutingRule


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one model: base, scaling, layout.

    `attention_factor` multiplies cos and sin; None takes the scaling's own rule. `interleaved` rotates the pairs
    (x0,x1),(x2,x3)... as DeepSeek stores them; otherwise the two halves are paired as Llama does.
    """

    theta: float
    dim: int
    scaling: Literal["default", "linear", "yarn"] = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    interleaved: bool = False


@dataclass(frozen=True)
class GQAConfig:
    """Grouped-query attention: H query heads share G key/value heads of width C."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention: keys and values are one latent of width L plus one rotary key of width P."""

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    qkv_bias: bool = False  # of q_a and kv_a; q, q_b and kv_b never have one
    o_bias: bool = False

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True)
class MoEConfig:
    """The expert part of a sparse layer: E routed experts of width F, the rule that picks K of them, shared experts."""

    num_experts: int
    expert_dim: int
    rule: RoutingRule
    correction_bias: bool = False
    shared_dim: int = 0  # width of all shared experts together; 0: none


@dataclass(frozen=True)
class ModelConfig:
    """A whole decoder: what every layer is made of. `sparse_layers[i]` says whether layer i holds experts.

    `sliding_windows[i]` is the number of positions a query of layer i sees, itself included; 0 means all.
    `softmax_scale` multiplies q.k (YaRN's squared mscale is already in it).
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    dense_dim: int
    attention: GQAConfig | MLAConfig
    moe: MoEConfig
    sparse_layers: tuple[bool, ...]
    sliding_windows: tuple[int, ...]
    rope: RopeConfig
    norm_eps: float
    max_positions: int
    softmax_scale: float
    tie_embeddings: bool
    dtype: str  # the checkpoint's own: bfloat16, float16 or float32
    num_mtp_layers: int = 0  # multi-token-prediction layers on disk behind the last one; skipped
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    fp8_block: tuple[int, int] | None = None  # (rows, columns) of one weight scale, where weights are stored in fp8
    fp8_experts: bool = False  # whether routed experts are held, and multiplied, in fp8 (kernels/quantize.py)

    @property
    def layers_with_experts(self) -> tuple[int, ...]:
        """Their indices."""
        return tuple(index for index, is_sparse in enumerate(self.sparse_layers) if is_sparse)
