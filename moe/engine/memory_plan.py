"""Who gets the memory: weights, working space, and what is left for KV blocks. Printed before anything runs.

Knows bytes; knows nothing of tensors' contents, requests or models. The engine measures, this decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_cache.layout import KVLayout

GIB = 2**30


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one device. `total_bytes` is None on the CPU, where cache.cpu_gb alone decides."""

    device: str
    total_bytes: int | None
    weight_bytes: int
    workspace_bytes: int
    other_bytes: int  # held by others on the same device: contexts, libraries, other processes
    bytes_per_block: int
    block_size: int
    num_blocks: int
    max_model_len: int
    chosen_by: str  # the key that set num_blocks
    buffer_bytes: int = 0  # of rows that travel between ranks
    moving_bytes: int = 0  # of experts that move between ranks
    row_cap: int | None = None  # the most rows of a buffer between ranks in one round; None: no cap, or one rank
    host_bytes: int = 0  # of pinned host memory, for experts that live there

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    @property
    def capacity_tokens(self) -> int:
        """Positions that all blocks hold together."""
        return self.num_blocks * self.block_size

    def table(self) -> str:
        """The plan as lines of text, sizes in GiB."""
        rows = [("weights", _gib(self.weight_bytes)), ("workspace", _gib(self.workspace_bytes))]
        if self.buffer_bytes:
            rows.append(("rows between ranks", _gib(self.buffer_bytes)))
        if self.moving_bytes:
            rows.append(("experts between ranks", _gib(self.moving_bytes)))
        if self.total_bytes is not None:
            rows.append(("others on the device", _gib(self.other_bytes)))
        rows.append(("KV cache", _gib(self.kv_bytes)))
        if self.total_bytes is not None:
            used = self.weight_bytes + self.workspace_bytes + self.buffer_bytes + self.moving_bytes
            used += self.other_bytes + self.kv_bytes
            left = self.total_bytes - used
            rows += [("left free", _gib(left)), ("total", _gib(self.total_bytes))]
        if self.host_bytes:
            rows.append(("experts in host memory", _gib(self.host_bytes)))
        lines = [f"memory on {self.device}"]
        lines += [f"  {name:<22}{size:>12}" for name, size in rows]
        if self.row_cap is not None:
            lines.append(f"  at most {self.row_cap} rows in a buffer between ranks, more in rounds (parallel.row_cap)")
        lines.append(
            f"  {self.num_blocks} KV blocks of {self.block_size} tokens (by {self.chosen_by}): "
            f"{self.capacity_tokens} tokens, "
            f"{self.capacity_tokens / self.max_model_len:.1f} sequences of {self.max_model_len}"
        )
        if self.capacity_tokens < self.max_model_len:
            lines.append(
                f"  one sequence of engine.max_model_len={self.max_model_len} tokens does not fit; requests without "
                f"max_tokens end at {self.capacity_tokens + 1} tokens, and those that ask for more are rejected"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class DeviceMemory:
    """What was measured on the device before the KV pool is made, in bytes. `total` None: the CPU."""

    name: str
    total: int | None
    weights: int
    workspace: int
    other: int = 0
    buffers: int = 0
    moving: int = 0
    row_cap: int | None = None
    host: int = 0

    @property
    def taken(self) -> int:
        """All that is no KV cache."""
        return self.weights + self.workspace + self.other + self.buffers + self.moving


def plan_memory(
    layout: KVLayout,
    memory: DeviceMemory,
    *,
    num_blocks: int | None,
    memory_fraction: float,
    cpu_gb: float,
    max_model_len: int,
) -> MemoryPlan:
    """Decide the number of KV blocks: cache.num_blocks if given, else the rest of the device, else cache.cpu_gb.

    ValueError where not even one block, so not even the smallest request, finds room.
    """
    if num_blocks is not None:
        chosen, by = num_blocks, "cache.num_blocks"
        if chosen < 1:
            raise ValueError(f"cache.num_blocks={chosen} must be at least 1; leave it out to fill the memory given.")
    elif memory.total is not None:
        if not 0.0 < memory_fraction <= 1.0:
            raise ValueError(f"cache.memory_fraction={memory_fraction:g} must be above 0 and at most 1.")
        budget = int(memory.total * memory_fraction) - memory.taken
        chosen, by = budget // layout.bytes_per_block, f"cache.memory_fraction={memory_fraction:g}"
    else:
        if not cpu_gb > 0.0:
            raise ValueError(f"cache.cpu_gb={cpu_gb:g} must be above 0.")
        chosen, by = int(cpu_gb * GIB) // layout.bytes_per_block, f"cache.cpu_gb={cpu_gb:g}"
    if chosen < 1:
        raise ValueError(_no_room(layout, memory, by))
    if memory.total is not None:
        _check_room(layout, memory, chosen)
    return MemoryPlan(
        device=memory.name,
        total_bytes=memory.total,
        weight_bytes=memory.weights,
        workspace_bytes=memory.workspace,
        other_bytes=memory.other,
        bytes_per_block=layout.bytes_per_block,
        block_size=layout.block_size,
        num_blocks=chosen,
        max_model_len=max_model_len,
        chosen_by=by,
        buffer_bytes=memory.buffers,
        row_cap=memory.row_cap,
        moving_bytes=memory.moving,
        host_bytes=memory.host,
    )


def _no_room(layout: KVLayout, memory: DeviceMemory, by: str) -> str:
    if memory.total is None:
        return (
            f"{by} holds no KV block: one takes {layout.bytes_per_block} bytes "
            f"({layout.block_size} tokens, {layout.num_layers} layers); raise cache.cpu_gb or lower cache.block_size."
        )
    return (
        f"{by} leaves no room for a KV block on {memory.name}: of {_gib(memory.total)}, "
        f"weights take {_gib(memory.weights)}, workspace {_gib(memory.workspace)}, "
        f"others {_gib(memory.other)}{_buffers(memory)}{_moving(memory)}; raise cache.memory_fraction, lower "
        "engine.max_batched_tokens, keep experts in host memory (offload.regime=auto), or add GPU memory."
    )


def _check_room(layout: KVLayout, memory: DeviceMemory, num_blocks: int) -> None:
    assert memory.total is not None, "only a device with a known size is checked"
    left = memory.total - memory.taken
    if num_blocks * layout.bytes_per_block > left:
        raise ValueError(
            f"cache.num_blocks={num_blocks} takes {_gib(num_blocks * layout.bytes_per_block)}, but {memory.name} has "
            f"{_gib(left)} left beside weights and workspace; at most "
            f"{max(left, 0) // layout.bytes_per_block} blocks fit."
        )


def _buffers(memory: DeviceMemory) -> str:
    return f", rows between ranks {_gib(memory.buffers)} (parallel.row_cap bounds them)" if memory.buffers else ""


def _moving(memory: DeviceMemory) -> str:
    return f", experts between ranks {_gib(memory.moving)} (balance.buffer_mb bounds them)" if memory.moving else ""


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.3f} GiB"
