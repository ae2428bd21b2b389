"""All slots of every layer that are not held, passed through two buffers in a cycle, copies always ahead of products.

Knows layers, slots and buffers; knows nothing of what is computed. Steps run through the layers in one order again and
again, so it is known what comes next, across layers and steps, and the copies never pause:

    copies     | a: layer 0, chunk 1 | b: layer 1, chunk 0 | a: layer 1, chunk 1 | b: ...
    products         (b: layer 0, chunk 0) | (a: ...)            | (b: ...)            |

Where another chunk is wanted than what was copied ahead, that is given up and the right one copied: only time is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from expert_parallel.slot_buffer import SlotBuffer


class Chunk(NamedTuple):
    """Some slots of a layer; `number` counts the layer's chunks."""

    layer: int
    number: int
    slots: tuple[int, ...]


class ChunkStream:
    """`passing(layer)`: the slots of a layer that are not held, in order, now."""

    def __init__(
        self, layers: Sequence[int], buffers: tuple[SlotBuffer, SlotBuffer], passing: Callable[[int], Sequence[int]]
    ) -> None:
        self.layers = list(layers)
        self.buffers = buffers
        self.passing = passing
        self.most = len(buffers[0].tags)  # slots of a chunk
        self._ahead: deque[tuple[Chunk, SlotBuffer]] = deque()

    def chunks(self, layer: int) -> Iterator[tuple[SlotBuffer, tuple[int, ...]]]:
        """A buffer and the slots in its first places, for each chunk of a layer. Products that read it are launched
        before the next is asked for."""
        for chunk in self._of_layer(layer):
            buffer = self._take(chunk)
            places = range(len(chunk.slots))
            self._look_ahead(chunk)
            buffer.ready(layer, chunk.slots, places)
            yield buffer, chunk.slots
            buffer.read(places)
            self._ahead.popleft()
            self._look_ahead(chunk)

    def give_up(self) -> None:
        """What was copied ahead is not wanted: the buffers are somebody else's, or a layer's slots changed."""
        self._ahead.clear()

    def _of_layer(self, layer: int) -> list[Chunk]:
        slots = self.passing(layer)
        starts = range(0, len(slots), self.most)
        return [Chunk(layer, number, tuple(slots[at : at + self.most])) for number, at in enumerate(starts)]

    def _take(self, chunk: Chunk) -> SlotBuffer:
        while self._ahead and self._ahead[0][0] != chunk:
            self._ahead.popleft()
        if not self._ahead:
            self._copy(chunk)
        return self._ahead[0][1]

    def _look_ahead(self, current: Chunk) -> None:
        """Both buffers have work."""
        while len(self._ahead) < len(self.buffers):
            following = self._after(self._ahead[-1][0] if self._ahead else current)
            self._copy(following)

    def _after(self, chunk: Chunk) -> Chunk:
        """The cycle comes back to this chunk itself at the latest."""
        chunks = self._of_layer(chunk.layer)
        if chunk.number + 1 < len(chunks):
            return chunks[chunk.number + 1]
        at = self.layers.index(chunk.layer) + 1
        order = self.layers[at:] + self.layers[:at]
        return next(chunks[0] for chunks in map(self._of_layer, order) if chunks)

    def _copy(self, chunk: Chunk) -> None:
        in_use = [buffer for _, buffer in self._ahead]
        buffer = next(each for each in self.buffers if each not in in_use)
        buffer.fill(chunk.layer, chunk.slots, range(len(chunk.slots)))
        self._ahead.append((chunk, buffer))
