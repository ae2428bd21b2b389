"""How much memory the weights and the largest steps take on a device, found by running them. Knows no requests.

The steps read and write one block of a throw-away pool: their tables hold block 0 alone, and nothing is written.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import replace

import torch

from configs.schema import Config
from kv_cache.layout import KVLayout
from kv_cache.pool import KVPool
from moe.engine.memory_plan import GIB, DeviceMemory, MemoryPlan, plan_memory
from moe.engine.network import Network
from moe.engine.parts import Parts
from moe.engine.request import SamplingParams
from moe.engine.sampler import Sampler, SampleRow, SamplingBatch
from moe.engine.workspace import StepLimits, prompt_chunks
from moe.model.config import MLAConfig
from moe.model.parameter_shapes import is_expert_parameter
from moe.model.step_input import DecodeBatch, PrefillBatch, StepInput

logger = logging.getLogger(__name__)


def plan_cache(
    config: Config, parts: Parts, layout: KVLayout, sampler: Sampler, *, cuda_graphs: bool, moving_bytes: int = 0
) -> MemoryPlan:
    """Measure what weights and steps take, and decide how many blocks the cache gets. `moving_bytes` are held already,
    for experts that move between ranks."""
    memory = measure_memory(
        parts.network,
        sampler,
        layout,
        parts.device,
        limits=parts.limits(config),
        cuda_graphs=cuda_graphs,
        latent=isinstance(parts.model.attention, MLAConfig),
        held_experts=parts.held_expert_bytes,
    )
    plan = plan_memory(
        layout,
        replace(
            memory,
            workspace=max(memory.workspace - moving_bytes, 0),  # on a GPU they were found among the working space
            other=max(memory.other - parts.held_bytes, 0),  # no allocator's either, but among the buffers
            buffers=parts.buffer_bytes(config.engine.max_batched_tokens),
            row_cap=parts.row_cap,
            moving=moving_bytes,
            host=0 if parts.offload is None else parts.offload.host_bytes,
        ),
        num_blocks=config.cache.num_blocks,
        memory_fraction=config.cache.memory_fraction,
        cpu_gb=config.cache.cpu_gb,
        max_model_len=parts.max_model_len,
    )
    if parts.forecast is not None:
        level = logging.WARNING if parts.forecast.misses(plan) else logging.INFO
        logger.log(level, "%s", parts.forecast.against(plan))
    return plan


def make_pool(layout: KVLayout, plan: MemoryPlan, device: torch.device) -> KVPool:
    """The cache that was planned. ValueError where the device will not give so much: a host's memory is not measured
    before, and others may have taken of a GPU's since."""
    try:
        return KVPool(layout, plan.num_blocks, device)
    except (RuntimeError, MemoryError) as error:
        size, reason = f"{plan.kv_bytes / GIB:.3f} GiB (by {plan.chosen_by})", str(error).splitlines()[0]
        raise ValueError(
            f"the KV cache of {size} cannot be allocated on {plan.device}: {reason}; ask for less of it."
        ) from error


def measure_memory(
    network: Network,
    sampler: Sampler,
    layout: KVLayout,
    device: torch.device,
    *,
    limits: StepLimits,
    cuda_graphs: bool,
    latent: bool = False,
    held_experts: int | None = None,
) -> DeviceMemory:
    """Weights by their sizes; on a GPU also the peak of the largest prefill and the largest decode step.

    Captured graphs share memory among themselves but not with other steps: the largest decode step counts once more.
    `held_experts`: bytes on the device of experts, where their own tensors are in host memory; None: they are not.
    `latent`: attention is MLA.
    """
    targets = network.targets().items()
    own = [tensor for name, tensor in targets if held_experts is None or not is_expert_parameter(name)]
    weights = (held_experts or 0) + sum(tensor.nbytes for tensor in own)
    if device.type != "cuda":
        return DeviceMemory("cpu", None, weights, 0)
    gc.collect()  # what is held by nobody but itself (an engine that was thrown away) would count as working space
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    pool = KVPool(layout, 1, device)
    num_rows = limits.max_num_seqs
    steps = (
        prefill_step(limits, device, latent=latent),
        decode_step(num_rows, limits.max_model_len, layout.block_size, device),
    )
    before = torch.cuda.memory_allocated(device)
    peaks: list[int] = []
    # Every stage of the sampler that takes memory.
    params = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=1)
    with torch.inference_mode():
        for step in steps:
            torch.cuda.reset_peak_memory_stats(device)
            logits_BV = network.forward(step, pool.caches)[:num_rows]
            rows = [SampleRow(params, 0, 1, [0], [])] * logits_BV.shape[0]
            sampler.sample(logits_BV, SamplingBatch.build(rows, device))
            del logits_BV
            peaks.append(torch.cuda.max_memory_allocated(device))
    torch.cuda.synchronize(device)
    workspace = max(peaks) - weights - pool.num_bytes + (peaks[-1] - before if cuda_graphs else 0)
    del pool, steps
    if network.load is not None:
        network.load.reset()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    other = max(total - free - torch.cuda.memory_reserved(device), 0)
    return DeviceMemory(torch.cuda.get_device_name(device), total, weights, max(workspace, 0), other)


def prefill_step(limits: StepLimits, device: torch.device, *, latent: bool) -> StepInput:
    """As many prompt tokens as a step may hold, in `prompt_chunks`, with the most logits a step can want."""
    num_tokens = limits.max_batched_tokens
    lengths, kv_lens = zip(*prompt_chunks(limits, latent=latent))
    lengths_B, kv_lens_B = (torch.tensor(each, dtype=torch.int32) for each in (lengths, kv_lens))
    starts_B1 = torch.cat([torch.zeros(1, dtype=torch.int32), lengths_B.cumsum(0, dtype=torch.int32)])
    prefill = PrefillBatch(
        block_tables_BM=_tables(len(lengths), max(kv_lens), limits.block_size, device),
        query_starts_B1=starts_B1.to(device),
        query_offsets_B=(kv_lens_B - lengths_B).to(device),
        kv_lens_B=kv_lens_B.to(device),
        max_query_len=max(lengths),
        max_kv_len=max(kv_lens),
        query_lens_host=lengths,
        kv_lens_host=kv_lens,
    )
    positions = [torch.arange(kv_len - length, kv_len) for length, kv_len in zip(lengths, kv_lens)]
    return StepInput(
        token_ids_T=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions_T=torch.cat(positions).to(device),
        slot_mapping_T=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
        num_decode=0,
        decode=None,
        prefill=prefill,
        logits_rows_B=torch.arange(limits.logits_rows, device=device),
    )


def decode_step(num_seqs: int, kv_len: int, block_size: int, device: torch.device) -> StepInput:
    """`num_seqs` sequences of `kv_len` positions, one new token each."""
    decode = DecodeBatch(
        block_tables_BM=_tables(num_seqs, kv_len, block_size, device),
        kv_lens_B=torch.full((num_seqs,), kv_len, dtype=torch.int32, device=device),
        max_kv_len=kv_len,
    )
    return StepInput(
        token_ids_T=torch.zeros(num_seqs, dtype=torch.int64, device=device),
        positions_T=torch.full((num_seqs,), kv_len - 1, dtype=torch.int64, device=device),
        slot_mapping_T=torch.full((num_seqs,), -1, dtype=torch.int64, device=device),
        num_decode=num_seqs,
        decode=decode,
        prefill=None,
        logits_rows_B=torch.arange(num_seqs, device=device),
    )


def _tables(num_seqs: int, length: int, block_size: int, device: torch.device) -> torch.Tensor:
    return torch.zeros((num_seqs, -(-length // block_size)), dtype=torch.int32, device=device)
