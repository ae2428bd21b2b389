"""How many experts of a rank live where: on the GPU for good, in buffers that they pass through, in host memory.

Knows counts and bytes; knows nothing of models, tensors or devices. What a bundle weighs, and how much room the rest
of an engine leaves, is told by the caller.

    slots of a layer   |  held G  |           the other S - G            |
    on the GPU            always     C at a time, in two buffers of all layers
    in host memory     |                    S                            |

H bundles are held of all layers together, so that what is left over is less than one bundle. Layers hold equal numbers
of them; where H does not divide, those with one more lie evenly among the others: while one layer's products run the
next ones' bundles come, and the link is to be ahead by as much all the time.
"""

from __future__ import annotations

from dataclasses import dataclass

# A copy of so many bytes takes 1.2 ms over a link of 55 GB/s: the launches around it (some 50 us) disappear behind it,
# and two such buffers are small beside what is held.
STAGING_BYTES = 64 << 20
# Of the bytes that experts and cache share: with more left for the cache than that, all experts on the GPU are faster
# than any streamed plan. Streaming gives at most P / K tokens a second (K: a sequence's cache, P: the link's 55 GB/s);
# with everything on the GPU a step reads at most all of it, at the memory's 4,420 GB/s (both measured on an H200), for
# the L / K sequences that the bytes L left for the cache hold: more, if L is over 1 / 80 of what is shared.
RESIDENT_CACHE = 55.4 / 4420

# Rows a slot from which `auto` streams. Even routing asks with n rows a slot for 1 - exp(-n) of the slots, 63 % at 1;
# skewed routing asks for fewer, of which more are held. Against it stands that kernels read pinned memory more slowly
# than the copy engine (51 and 55 GB/s on an H200), and nothing before it is known who asks. Measured there, 8 layers of
# Qwen3-30B-A3B, 32 of 128 held, on demand, ms in which a step of the cache way copies; products add 3. Streamed, a step
# takes 132 whatever the routing:
#
#     rows a slot    1     1.5    2      3      4      6      8
#     even           91    111    123    135    139    141    141
#     Zipf 1         58    74     88     106    114    128    134
#     Zipf 2         15    19     28     43     54     66     73
#
# Whole steps with 8, 4, 2 and 1 rows a slot, over a streamed one: even 1.09, 1.08, 0.95, Zipf 1 1.05, 0.88, 0.66 (8
# layers); of all 48 even 1.11, 1.06, 0.93, 0.70, Zipf 1 1.04, 0.90, 0.63, 0.46. Zipf 2 with 8, 8 layers: 0.57. So even
# routing breaks even near 3 rows a slot, Zipf's law between 6 and 7, its square far beyond 8. With even routing the
# cache way loses a tenth at most from 3 on; streaming from there would lose a third with Zipf's law. At 6 neither loses
# more.
STREAM_FROM = 6.0
# Where the host decides what is copied, each missing expert costs it launches of its own, which exceed the copy's time
# (99 ms a step of one sequence where kernels that decide take 27). The break-even was not measured.
STREAM_FROM_BY_HOST = 1.0


@dataclass(frozen=True)
class OffloadPlan:
    """Of one rank. All layers pass the experts that they do not hold through the same two buffers."""

    regime: str  # auto, cache or stream
    num_slots: int  # S, of this rank in each layer
    num_held: int  # H, of the slots of all layers, on the GPU
    staging_slots: int  # C, of each of the two buffers
    num_layers: int  # that have experts
    bundle_bytes: int  # of one slot of one layer: weights and scales
    tier: str  # host or disk
    host_bytes: int  # of pinned memory, of this rank

    def __post_init__(self) -> None:
        assert self.regime in ("auto", "cache", "stream"), f"{self.regime!r} is no regime"
        every_slot = self.num_slots * self.num_layers
        assert 0 <= self.num_held < every_slot, f"{self.num_held} of {every_slot} slots are held"
        assert 1 <= self.staging_slots <= self.num_slots, f"buffers of {self.staging_slots} of {self.num_slots} slots"

    @property
    def gpu_bytes(self) -> int:
        """Held slots of all layers, and the two buffers."""
        return self.held_bytes + 2 * self.staging_slots * self.bundle_bytes

    @property
    def held_bytes(self) -> int:
        """Held slots of all layers."""
        return self.num_held * self.bundle_bytes

    @property
    def streamed_bytes(self) -> int:
        """What crosses the link in a step that uses every slot."""
        return self.num_slots * self.num_layers * self.bundle_bytes - self.held_bytes

    @property
    def held_share(self) -> float:
        """Of all slots."""
        return self.num_held / (self.num_slots * self.num_layers)

    def held_in(self, at: int) -> int:
        """G of the layer that is the `at`-th of those with experts.

        >>> plan = OffloadPlan("auto", 8, 45, 1, num_layers=32, bundle_bytes=1, tier="host", host_bytes=256)
        >>> [plan.held_in(at) for at in range(8)], sum(plan.held_in(at) for at in range(32))
        ([1, 1, 2, 1, 2, 1, 1, 2], 45)
        """
        return (at + 1) * self.num_held // self.num_layers - at * self.num_held // self.num_layers

    def streams(self, num_rows: int) -> bool:
        """Whether a call of a layer with so many rows streams all its slots."""
        # A GPU's kernels read pinned memory into held places, of which every layer needs one.
        by_device = self.tier == "host" and self.num_held >= self.num_layers
        rows_a_slot = STREAM_FROM if by_device else STREAM_FROM_BY_HOST
        return self.regime == "stream" or (self.regime == "auto" and num_rows >= rows_a_slot * self.num_slots)

    def words(self) -> str:
        """For people."""
        where = "in host memory" if self.tier == "host" else "on disk, behind host memory"
        return (
            f"experts {where} ({self.regime}): the GPU holds {self.held_words()}, "
            f"the others pass through two buffers of {self.staging_slots}; "
            f"{self.gpu_bytes / 2**30:.3f} GiB there, {self.host_bytes / 2**30:.3f} GiB of the host"
        )

    def held_words(self) -> str:
        """For people: how many of each layer, and of all where they differ."""
        each, over = divmod(self.num_held, self.num_layers)
        of_layer = f"{each} or {each + 1}" if over else f"{each}"
        in_all = f", {self.num_held} in all" if over else ""
        return f"{of_layer} of {self.num_slots} in each of {self.num_layers} layers{in_all}"


def staging_slots(num_passing: int, bundle_bytes: int) -> int:
    """Slots of one buffer, where `num_passing` of a layer pass through: about STAGING_BYTES, chunks of equal size.

    >>> staging_slots(96, 9 << 20)  # 14 chunks of 7, 7, ... 5
    7
    """
    assert num_passing >= 1, "nothing passes through buffers"
    most = max(1, round(STAGING_BYTES / bundle_bytes))
    num_chunks = -(-num_passing // most)
    return -(-num_passing // num_chunks)


@dataclass(frozen=True)
class Room:
    """Bytes of a GPU that experts and cache share (`resident`: where all experts are there, and steps are captured as
    graphs), and what the cache makes of them: `wanted` by as many sequences as may run, or by one as long as may be,
    `least` by one of the usual length."""

    shared: int
    resident: int
    wanted: int
    least: int


def choose_held(num_slots: int, num_layers: int, bundle_bytes: int, room: Room) -> int | None:
    """Slots of all layers to hold on the GPU: every one where that answers faster, None where nothing fits.

    Streamed, a step brings W - held bytes over a link of P bytes/s, for as many rows as the cache has sequences:
    tokens/s = sequences * P / (W - held). While experts and cache do not fit together, a byte given to the cache adds
    more above than below the line, so the cache gets all that it wants. Beyond that it adds no sequence, and experts
    hold what is left.
    """
    everything = num_slots * num_layers * bundle_bytes
    # And one sequence more: part of one is none.
    if room.resident - everything >= min(room.wanted, room.least + int(room.resident * RESIDENT_CACHE)):
        return num_slots * num_layers
    held = _most_held(num_slots, num_layers, bundle_bytes, room.shared - room.wanted)
    if held is not None:
        return held
    return 0 if held_bytes(num_slots, 0, num_layers, bundle_bytes) + room.least <= room.shared else None


def held_within(num_slots: int, num_layers: int, bundle_bytes: int, num_bytes: int) -> int | None:
    """The most slots of all layers that go into so many bytes with the two buffers; None: not even the buffers do."""
    if num_slots * num_layers * bundle_bytes <= num_bytes:
        return num_slots * num_layers
    return _most_held(num_slots, num_layers, bundle_bytes, num_bytes)


def held_bytes(num_slots: int, num_held: int, num_layers: int, bundle_bytes: int) -> int:
    """On the GPU, of held slots of all layers and of the two buffers that the others pass through."""
    passing = num_slots - num_held // num_layers  # of the layer that holds fewest
    buffers = 2 * staging_slots(passing, bundle_bytes) if passing else 0
    return (num_held + buffers) * bundle_bytes


def _most_held(num_slots: int, num_layers: int, bundle_bytes: int, num_bytes: int) -> int | None:
    """As `held_within`, where some pass."""
    most = min(num_bytes // bundle_bytes, num_slots * num_layers - 1)
    fitting = (
        held for held in range(most, -1, -1) if held_bytes(num_slots, held, num_layers, bundle_bytes) <= num_bytes
    )
    return next(fitting, None)
