"""One line of a family's weight table: a tensor on disk and the place in our parameters that it fills.

Knows names and rows; knows nothing of files. Every family here stores linear weights as [out, in], which is our own
orientation, gate before up. A stacked expert tensor has all experts as its first dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from moe.model.config import GQAConfig, MLAConfig, ModelConfig

ExpertLayout = Literal["per_expert", "stacked"]


@dataclass(frozen=True, slots=True)
class WeightRule:
    """The tensor `source` of `shape` fills rows [row, row + rows) of `target`.

    `expert` is the logical expert the tensor belongs to: then `target` is one of the expert bundles and the rows are
    those of that expert's slot. `stacked`: `shape` has a leading dimension of all logical experts, one slot each.
    """

    source: str
    target: str
    shape: tuple[int, ...]
    row: int = 0
    expert: int | None = None
    stacked: bool = False

    @property
    def rows(self) -> int:
        return self.shape[1] if self.stacked else self.shape[0]

    @property
    def scale_source(self) -> str:
        """The block scales of an fp8 weight: `x.weight` has `x.weight_scale_inv`, stacked `x` has `x_scale_inv`."""
        return f"{self.source}_scale_inv"


@dataclass(frozen=True)
class ExpertNames:
    """How a family names the parts of its sparse layers on disk, in each layout."""

    block: str  # of one tensor per expert: "mlp" or "block_sparse_moe"
    gate: str
    up: str
    down: str
    stacked_block: str = "mlp"


def decoder_table(config: ModelConfig, layout: ExpertLayout, names: ExpertNames) -> tuple[WeightRule, ...]:
    """Every tensor a checkpoint of this config must hold. A tied head is not among them."""
    V, D = config.vocab_size, config.hidden_size
    rules = [WeightRule("model.embed_tokens.weight", "embed.weight", (V, D))]
    for i in range(config.num_layers):
        disk, ours = f"model.layers.{i}.", f"layers.{i}."
        rules.append(WeightRule(f"{disk}input_layernorm.weight", f"{ours}attn_norm.weight", (D,)))
        rules.append(WeightRule(f"{disk}post_attention_layernorm.weight", f"{ours}mlp_norm.weight", (D,)))
        attention = config.attention
        disk_attn, ours_attn = f"{disk}self_attn.", f"{ours}attn."
        if isinstance(attention, GQAConfig):
            rules.extend(_gqa_rules(attention, D, disk_attn, ours_attn))
        else:
            rules.extend(_mla_rules(attention, D, disk_attn, ours_attn))
        if config.sparse_layers[i]:
            rules.extend(_moe_rules(config, layout, names, disk, f"{ours}moe."))
        else:
            rules.extend(_mlp_rules(config.dense_dim, D, f"{disk}mlp.", f"{ours}mlp."))
    rules.append(WeightRule("model.norm.weight", "norm.weight", (D,)))
    if not config.tie_embeddings:
        rules.append(WeightRule("lm_head.weight", "lm_head.weight", (V, D)))
    return tuple(rules)


def _gqa_rules(attention: GQAConfig, D: int, disk: str, ours: str) -> Iterator[WeightRule]:
    H, G, C = attention.num_heads, attention.num_kv_heads, attention.head_dim
    merged = (("q", H * C, 0), ("k", G * C, H * C), ("v", G * C, (H + G) * C))
    for part, rows, row in merged:
        yield WeightRule(f"{disk}{part}_proj.weight", f"{ours}qkv.weight", (rows, D), row)
        if attention.qkv_bias:
            yield WeightRule(f"{disk}{part}_proj.bias", f"{ours}qkv.bias", (rows,), row)
    yield WeightRule(f"{disk}o_proj.weight", f"{ours}o.weight", (D, H * C))
    if attention.o_bias:
        yield WeightRule(f"{disk}o_proj.bias", f"{ours}o.bias", (D,))
    if attention.qk_norm:
        yield WeightRule(f"{disk}q_norm.weight", f"{ours}q_norm.weight", (C,))
        yield WeightRule(f"{disk}k_norm.weight", f"{ours}k_norm.weight", (C,))


def _mla_rules(attention: MLAConfig, D: int, disk: str, ours: str) -> Iterator[WeightRule]:
    H, L, rank = attention.num_heads, attention.kv_lora_rank, attention.q_lora_rank
    q_rows, kv_a_rows = H * attention.qk_head_dim, L + attention.qk_rope_head_dim
    if rank is None:
        yield WeightRule(f"{disk}q_proj.weight", f"{ours}q.weight", (q_rows, D))
    else:
        yield WeightRule(f"{disk}q_a_proj.weight", f"{ours}q_a.weight", (rank, D))
        if attention.qkv_bias:
            yield WeightRule(f"{disk}q_a_proj.bias", f"{ours}q_a.bias", (rank,))
        yield WeightRule(f"{disk}q_a_layernorm.weight", f"{ours}q_a_norm.weight", (rank,))
        yield WeightRule(f"{disk}q_b_proj.weight", f"{ours}q_b.weight", (q_rows, rank))
    yield WeightRule(f"{disk}kv_a_proj_with_mqa.weight", f"{ours}kv_a.weight", (kv_a_rows, D))
    if attention.qkv_bias:
        yield WeightRule(f"{disk}kv_a_proj_with_mqa.bias", f"{ours}kv_a.bias", (kv_a_rows,))
    yield WeightRule(f"{disk}kv_a_layernorm.weight", f"{ours}kv_a_norm.weight", (L,))
    kv_b_rows = H * (attention.qk_nope_head_dim + attention.v_head_dim)
    yield WeightRule(f"{disk}kv_b_proj.weight", f"{ours}kv_b.weight", (kv_b_rows, L))
    yield WeightRule(f"{disk}o_proj.weight", f"{ours}o.weight", (D, H * attention.v_head_dim))
    if attention.o_bias:
        yield WeightRule(f"{disk}o_proj.bias", f"{ours}o.bias", (D,))


def _mlp_rules(width: int, D: int, disk: str, ours: str) -> Iterator[WeightRule]:
    yield WeightRule(f"{disk}gate_proj.weight", f"{ours}gate_up.weight", (width, D), 0)
    yield WeightRule(f"{disk}up_proj.weight", f"{ours}gate_up.weight", (width, D), width)
    yield WeightRule(f"{disk}down_proj.weight", f"{ours}down.weight", (D, width))


def _moe_rules(
    config: ModelConfig, layout: ExpertLayout, names: ExpertNames, disk_layer: str, ours: str
) -> Iterator[WeightRule]:
    moe, D = config.moe, config.hidden_size
    E, F = moe.num_experts, moe.expert_dim
    disk = f"{disk_layer}{names.stacked_block if layout == 'stacked' else names.block}."
    yield WeightRule(f"{disk}gate.weight", f"{ours}gate.weight", (E, D))
    if moe.correction_bias:
        yield WeightRule(f"{disk}gate.e_score_correction_bias", f"{ours}gate.bias", (E,))
    if layout == "stacked":
        yield WeightRule(f"{disk}experts.gate_up_proj", f"{ours}experts.w13", (E, 2 * F, D), stacked=True)
        yield WeightRule(f"{disk}experts.down_proj", f"{ours}experts.w2", (E, D, F), stacked=True)
    else:
        for e in range(E):
            expert = f"{disk}experts.{e}."
            yield WeightRule(f"{expert}{names.gate}.weight", f"{ours}experts.w13", (F, D), 0, e)
            yield WeightRule(f"{expert}{names.up}.weight", f"{ours}experts.w13", (F, D), F, e)
            yield WeightRule(f"{expert}{names.down}.weight", f"{ours}experts.w2", (D, F), 0, e)
    if moe.shared_dim:
        yield from _mlp_rules(moe.shared_dim, D, f"{disk}shared_experts.", f"{ours}shared.")
