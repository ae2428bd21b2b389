"""The bytes of an input, unpacked: plain, gzip or zstd, told apart by their first bytes and never by the file's name.

Knows compressed streams; knows nothing of lines or records. Reading holds a few pieces of a stream, whatever its size.
A gzip file of several members and a zstd file of several frames are read to their end; one that is cut off or damaged
raises DamagedStream after all that could be unpacked was handed over.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO, Protocol

GZIP, ZSTD, PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"
# A zstd stream may begin with a frame that carries no data; its first byte has 16 values.
ZSTD_EMPTY, ZSTD_EMPTY_TAIL = range(0x50, 0x60), b"\x2a\x4d\x18"
REFUSED = {
    PARQUET: "is a Parquet file, which cannot be read from a pipe; give its name",
    b"PK\x03\x04": "is a zip archive; unpack it",
    b"BZh": "is a bzip2 file; unpack it, or pack it as gzip or zstd",
    b"\xfd7zXZ\x00": "is an xz file; unpack it, or pack it as gzip or zstd",
    b"ARROW1": "is an Arrow file; give the folder of the saved dataset that it belongs to, or write it as Parquet",
    b"version https://git-lfs": "is a Git LFS pointer, not the file itself; fetch that with git lfs pull",
}
HEAD_BYTES = max(map(len, REFUSED))
# Packed bytes unpacked at a time: a stream of one repeated byte may become some thousand times as long.
PIECE_BYTES = 4096
BUFFER_BYTES = 1 << 18


class DamagedStream(ValueError):
    """A packed stream that cannot be read on. The text says why."""


class Frame(Protocol):
    """What zlib and zstandard offer for one member or frame."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def is_zstd(head: bytes) -> bool:
    """Whether bytes begin a zstd stream."""
    return head.startswith(ZSTD) or (len(head) >= 4 and head[0] in ZSTD_EMPTY and head[1:4] == ZSTD_EMPTY_TAIL)


def unpacked(file: io.BufferedReader) -> BinaryIO:
    """The stream to read lines from. ValueError, without the file's name, for a kind that cannot be read here."""
    head = file.peek(HEAD_BYTES)
    for magic, words in REFUSED.items():
        if head.startswith(magic):
            raise ValueError(f"{words}.")
    if head.startswith(GZIP):
        return _reader(file, "gzip", lambda: zlib.decompressobj(wbits=31), zlib.error)
    if is_zstd(head):
        try:
            import zstandard
        except ImportError as error:
            raise ValueError(
                "is a zstd file, which needs the package zstandard; install sortyard[jobs], or unpack the file."
            ) from error
        return _reader(file, "zstd", lambda: zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError)
    return file


def _reader(file: BinaryIO, name: str, new_frame: Callable[[], Frame], fault: type[Exception]) -> BinaryIO:
    return io.BufferedReader(_Unpacked(file, name, new_frame, fault), BUFFER_BYTES)


class _Unpacked(io.RawIOBase):
    """All members or frames of a packed stream, one after another."""

    def __init__(self, file: BinaryIO, name: str, new_frame: Callable[[], Frame], fault: type[Exception]) -> None:
        self._file = file
        self._name = name
        self._new_frame = new_frame
        self._fault = fault
        self._frame: Frame | None = None  # of which some is unpacked
        self._packed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not self._unpack():
                return 0
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def _unpack(self) -> bool:
        """Unpack one more piece; False at the end of the last frame."""
        piece = self._packed or self._file.read(PIECE_BYTES)
        self._packed = b""
        if self._frame is None and self._name == "gzip":
            piece = piece.lstrip(b"\0") or (piece and self._skip_padding())
        if not piece:
            if self._frame is not None:
                raise DamagedStream(f"the {self._name} stream is cut off before its end")
            return False
        frame = self._frame = self._frame or self._new_frame()
        try:
            self._ready = memoryview(frame.decompress(piece))
        except self._fault as error:
            raise DamagedStream(f"the {self._name} stream is damaged: {error}") from error
        if frame.eof:
            self._packed, self._frame = frame.unused_data, None
        return True

    def _skip_padding(self) -> bytes:
        """What follows zero bytes behind a gzip member, with which tapes and disks fill up their blocks."""
        while piece := self._file.read(PIECE_BYTES):
            if piece := piece.lstrip(b"\0"):
                return piece
        return b""
