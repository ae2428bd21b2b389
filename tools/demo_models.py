"""The two demo networks: sizes, a fast way to train their experts, regularisation, and how they are saved.

Knows transformers' model classes; knows nothing of the text or the training schedule.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DeepseekV3Config, GenerationConfig, MixtralConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3ForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM

from tools.demo_tokenizer import BOS_ID, END_ID, EOS_ID, VOCAB_SIZE

FAMILIES = ("mixtral", "deepseek")
CONTEXT = 1024


@dataclass(frozen=True)
class Loads:
    """How many tokens each expert of each MoE layer got; `counts_LE` is filled by hooks and lives on the device."""

    counts_LE: Tensor
    layer_names: list[str]

    def take(self) -> Tensor:
        """The counts so far; starts again at zero."""
        taken_LE = self.counts_LE.clone()
        self.counts_LE.zero_()
        return taken_LE


def mixtral_config() -> MixtralConfig:
    """8 experts, top-2, 6 query heads on 2 KV heads, tied head: 2.75 M parameters, 1.4 M of them used per token."""
    return MixtralConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        num_local_experts=8,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=[EOS_ID, END_ID],
    )


def deepseek_config() -> DeepseekV3Config:
    """MLA, one dense layer, then 16 experts in 4 groups (2 taken), top-4, one shared expert, a head of its own."""
    return DeepseekV3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=384,
        moe_intermediate_size=32,
        num_hidden_layers=5,
        first_k_dense_replace=1,
        num_attention_heads=6,
        num_key_value_heads=6,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=32,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        num_mtp_layers=0,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=BOS_ID,
        eos_token_id=[EOS_ID, END_ID],
    )


def build_model(family: str) -> PreTrainedModel:
    """A freshly initialised model (torch's global seed) whose experts run densely."""
    register_dense_experts()
    model = MixtralForCausalLM(mixtral_config()) if family == "mixtral" else DeepseekV3ForCausalLM(deepseek_config())
    model.set_experts_implementation("dense")
    return model


def register_dense_experts() -> None:
    """Adds the experts implementation "dense" to transformers' table; adding it again changes nothing."""
    ALL_EXPERTS_FUNCTIONS.register("dense", dense_experts)


def dense_experts(module: nn.Module, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Every expert on every token, unused ones weighted by zero: the same values and gradients as the sparse form.

    For experts this small two plain matrix products beat sorting, gathering and one product per expert, and there
    is no host sync. transformers' own forms for fp32 weights (grouped_mm, eager) loop over the experts on the host.
    """
    gate_up_EGD, down_EDF = module.get_parameter("gate_up_proj"), module.get_parameter("down_proj")
    E, D, F = down_EDF.shape
    weights_TE = x_TD.new_zeros(x_TD.shape[0], E, dtype=torch.float32)
    weights_TE = weights_TE.scatter(1, expert_ids_TK, weights_TK.float())
    gate_TEF, up_TEF = functional.linear(x_TD, gate_up_EGD.reshape(-1, D)).view(-1, E, 2, F).unbind(2)
    hidden_TEF = functional.silu(gate_TEF) * up_TEF * weights_TE[..., None].to(up_TEF.dtype)
    out_TD = hidden_TEF.reshape(-1, E * F) @ down_EDF.transpose(1, 2).reshape(E * F, D)
    return out_TD.to(x_TD.dtype)


def add_dropout(model: PreTrainedModel, rate: float) -> None:
    """Dropout on the embedding and on what attention and feed-forward add to the residual; off in eval mode.

    The model classes have none but on attention weights, and 1.2 M tokens seen dozens of times need it.
    """

    def drop(module: nn.Module, _: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> object:
        if isinstance(output, tuple):
            return functional.dropout(output[0], rate, module.training), *output[1:]
        return functional.dropout(output, rate, module.training)

    model.get_input_embeddings().register_forward_hook(drop)
    for name, module in model.named_modules():
        if name.endswith((".self_attn", ".mlp")):
            module.register_forward_hook(drop)


def watch_loads(model: PreTrainedModel) -> Loads:
    """Counts tokens per expert in every MoE layer from now on."""
    layers = [(name, module) for name, module in model.named_modules() if name.endswith(".mlp.experts")]
    num_experts = layers[0][1].get_parameter("down_proj").shape[0]
    counts_LE = torch.zeros(len(layers), num_experts, device=model.device)

    def count(row_E: Tensor, expert_ids_TK: Tensor) -> None:
        ids = expert_ids_TK.detach().flatten()
        row_E.scatter_add_(0, ids, torch.ones_like(ids, dtype=row_E.dtype))  # no host sync, unlike bincount

    for row_E, (_, module) in zip(counts_LE, layers, strict=True):
        module.register_forward_pre_hook(lambda _, inputs, row_E=row_E: count(row_E, inputs[1]))
    return Loads(counts_LE, [name.removesuffix(".experts") for name, _ in layers])


def correction_biases(model: PreTrainedModel) -> list[Tensor]:
    """The selection biases of the sigmoid routers, one per MoE layer in order; none for Mixtral."""
    return [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]


def nudge_biases(biases: list[Tensor], loads_LE: Tensor, gamma: float) -> None:
    """DeepSeek-V3's balancing without a loss: an expert below the mean load gets gamma, one above loses it."""
    for bias_E, load_E in zip(biases, loads_LE, strict=True):
        bias_E.add_(torch.sign(load_E.mean() - load_E), alpha=gamma)


def save_model(model: PreTrainedModel, folder: Path, *, stacked: bool) -> None:
    """config.json, generation_config.json and model.safetensors in bf16; selection biases stay fp32.

    `stacked` keeps transformers 5's stacked experts; otherwise each expert is stored by itself under the names of
    the original checkpoints, so the two demo models show both layouts.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.generation_config = GenerationConfig(
        bos_token_id=BOS_ID, eos_token_id=[EOS_ID, END_ID], do_sample=True, temperature=0.8, top_p=0.95
    )
    model.save_pretrained(folder, save_original_format=not stacked)
