"""The optional package `deep_ep` (DeepEP): whether it can be used, and the one `Buffer` of it that a group has.

Knows ranks, slots, bytes and the limits of DeepEP 1.2.1; knows no rows. docs/expert_parallel.md says how to get it.
"""

from __future__ import annotations

from typing import Any

import torch

from expert_parallel.group import ExpertGroup

RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
"""Those that DeepEP 1.2.1 has settings for; up to 8 on one node."""

LOW_LATENCY_WIDTHS = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
LOW_LATENCY_TOP_K = 11
"""What its low-latency kernels are compiled for."""

_RANKS_OF_NODE = 8
_MOST_ROW_BYTES = 2 * (8192 - 8)  # half a row and a barrier lie in 8 KiB of shared memory


def deep_ep_problem(
    device: torch.device,
    *,
    num_ranks: int | None = None,
    width: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    fp8_rows: bool = False,
) -> str | None:
    """Why this dispatcher cannot be used there, as far as what is given tells; None: it can."""
    if device.type != "cuda":
        return f"DeepEP moves rows between GPUs, and these are on {device.type}"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return f"DeepEP needs compute capability 9.0, and {torch.cuda.get_device_name(device)} has less"
    problem = (
        _package_problem()
        or (None if num_ranks is None else _ranks_problem(device, num_ranks))
        or (None if width is None else _rows_problem(width, dtype, fp8_rows))
    )
    if problem is None and num_ranks is not None and num_ranks > _RANKS_OF_NODE and width is not None and width % 256:
        return f"DeepEP moves rows between nodes in pieces of 256 columns, and they have {width}"
    return problem


def low_latency_problem(width: int, top_k: int) -> str | None:
    """Why decode cannot use the low-latency kernels; None: it can."""
    if width not in LOW_LATENCY_WIDTHS:
        return f"DeepEP's low-latency kernels are compiled for rows of {LOW_LATENCY_WIDTHS} columns, not {width}"
    if top_k > LOW_LATENCY_TOP_K:
        return f"DeepEP's low-latency kernels take up to {LOW_LATENCY_TOP_K} experts per token, not {top_k}"
    return None


def _package_problem() -> str | None:
    try:
        _package()
    except (ImportError, OSError) as error:
        return f"the package deep_ep cannot be imported ({error}); the extra sortyard[deepep] installs it"
    return None


def _ranks_problem(device: torch.device, num_ranks: int) -> str | None:
    if num_ranks not in RANKS:
        return f"DeepEP has settings for {RANKS} ranks, not for {num_ranks}"
    here = torch.cuda.current_device() if device.index is None else device.index
    others = (other for other in range(torch.cuda.device_count()) if other != here)
    apart = [other for other in others if not torch.cuda.can_device_access_peer(here, other)]
    return f"GPU {here} cannot reach the memory of GPUs {apart}, which DeepEP needs within a node" if apart else None


def _rows_problem(width: int, dtype: torch.dtype, fp8_rows: bool) -> str | None:
    if dtype != torch.bfloat16:
        return f"DeepEP sums in bfloat16, and the model is in {str(dtype).removeprefix('torch.')}"
    row_bytes = width if fp8_rows else 2 * width
    if row_bytes % 32 or row_bytes > _MOST_ROW_BYTES:
        return f"DeepEP moves rows of a multiple of 32 bytes up to {_MOST_ROW_BYTES}, and these have {row_bytes}"
    return None


def _refuse(problem: str | None) -> None:
    if problem:
        raise ValueError(f"parallel.dispatcher=deep_ep: {problem}; choose another dispatcher.")


def _package() -> Any:
    import deep_ep  # pyright: ignore[reportMissingImports]

    return deep_ep


class SharedBuffer:
    """One `Buffer` for all that dispatch over a group, whatever the layer. `slots`: of each rank, as DeepEP counts.
    `low_latency_tokens`: of each rank, for which a round of decode has room; 0 unless decode uses it. `package` is
    `deep_ep`, or what stands for it."""

    def __init__(self, group: ExpertGroup, slots: int, package: Any = None) -> None:
        self.group = group
        self.slots = slots
        if package is None:
            _refuse(_package_problem())
        self.package = package or _package()
        self.low_latency_tokens = 0
        self._made: Any = None
        self._width = 0

    @property
    def num_experts(self) -> int:
        return self.group.size * self.slots

    @property
    def held_bytes(self) -> int:
        return 0 if self._made is None else self.num_bytes(self._width)

    def check_rows(self, width: int, dtype: torch.dtype, *, fp8_rows: bool) -> None:
        """ValueError where DeepEP cannot move such rows."""
        _refuse(_rows_problem(width, dtype, fp8_rows))

    def check_low_latency(self, width: int, top_k: int) -> None:
        """ValueError where its low-latency kernels cannot."""
        _refuse(low_latency_problem(width, top_k))

    def use_low_latency(self, tokens: int) -> None:
        """Decode will bring up to so many tokens of each rank in a round."""
        made = self._made is not None
        assert not made or tokens == self.low_latency_tokens, f"made for {self.low_latency_tokens} tokens, not {tokens}"
        self.low_latency_tokens = tokens

    def of(self, width: int) -> Any:
        """The Buffer for rows of `width` columns. The first time all ranks call it together."""
        if self._made is None:
            nvlink_bytes, rdma_bytes = self._sizes(width)
            decode, one_node = self.low_latency_tokens > 0, self.group.size <= _RANKS_OF_NODE
            queues = max(self.slots if decode else 1, 1 if one_node else 24)  # pairs for each rank; 24 is its default
            self._width = width
            self._made = self.package.Buffer(
                self.group.process_group,
                nvlink_bytes,
                rdma_bytes,
                low_latency_mode=decode,
                num_qps_per_rank=queues,
                # Otherwise its end is one that all ranks must reach, and waits for those that have failed.
                explicitly_destroy=True,
            )
        assert width == self._width, f"the buffer was made for rows of {self._width} columns, these have {width}"
        return self._made

    def num_bytes(self, width: int) -> int:
        return sum(self._sizes(width))

    def close(self) -> None:
        """Gives the memory back. All ranks together; nobody dispatches afterwards."""
        if self._made is not None:
            self._made.destroy()
            self._made = None

    def clean_after_normal(self) -> None:
        """Between nodes both kinds of kernels use one part of the buffer, which low latency wants clean."""
        if self.low_latency_tokens and self.group.size > _RANKS_OF_NODE:
            self._made.clean_low_latency_buffer(self.low_latency_tokens, self._width, self.num_experts)

    def _sizes(self, width: int) -> tuple[int, int]:
        """Bytes for NVLink and for RDMA. Rows in fp8 take less; results come back in bf16."""
        kind, num_ranks = self.package.Buffer, self.group.size
        configs = (kind.get_dispatch_config(num_ranks), kind.get_combine_config(num_ranks))
        nvlink = max(config.get_nvl_buffer_size_hint(2 * width, num_ranks) for config in configs)
        rdma = max(config.get_rdma_buffer_size_hint(2 * width, num_ranks) for config in configs)
        if self.low_latency_tokens:
            low_latency = kind.get_low_latency_rdma_size_hint(
                self.low_latency_tokens, width, num_ranks, self.num_experts
            )
            rdma = max(rdma, low_latency)
        return nvlink, rdma
