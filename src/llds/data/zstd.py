"""Reading zstd files as a stream, and noticing when one breaks off, which the package itself lets pass."""

from __future__ import annotations

import io
from pathlib import Path
from typing import IO, Any

from llds.errors import LLDSError

MAGIC = b"\x28\xb5\x2f\xfd"
_CHUNK = 1 << 12  # packed bytes read at a time; few, since each may unpack to 32 thousand times its size
_WINDOW = 1 << 31  # bytes; what `zstd --long=31` asks for


class Damaged(Exception):  # noqa: N818 - a state, told on by who knows the line
    """The stream breaks off or doesn't unpack."""


def open_zstd(path: Path) -> IO[bytes]:
    """Open ``path`` for reading, unpacked. Reading raises :class:`Damaged` when the stream is broken.

    Raises :class:`LLDSError` when the package zstandard is missing.
    """
    try:
        import zstandard
    except ImportError as error:
        raise LLDSError(
            f'{path} is packed with zstd, which needs zstandard: run pip install "llds[serve]", '
            "or unpack the file."
        ) from error
    return io.BufferedReader(_Unpacked(path.open("rb"), zstandard), 1 << 20)


class _Unpacked(io.RawIOBase):
    """The unpacked bytes of all frames of a file."""

    def __init__(self, file: IO[bytes], zstandard: Any) -> None:
        self._file = file
        self._error: type[Exception] = zstandard.ZstdError
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
        self._frame = self._decompressor.decompressobj()
        self._started = False
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            chunk = self._file.read(_CHUNK)
            if not chunk:
                if self._started:
                    raise Damaged
                return 0
            self._ready = memoryview(self._unpack(chunk))
        target = memoryview(buffer).cast("B")
        count = min(len(target), len(self._ready))
        target[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _unpack(self, chunk: bytes) -> bytes:
        parts = []
        try:
            while chunk:
                parts.append(self._frame.decompress(chunk))
                self._started = not self._frame.eof
                chunk = self._frame.unused_data if self._frame.eof else b""
                if self._frame.eof:
                    self._frame = self._decompressor.decompressobj()
        except self._error as error:
            raise Damaged from error
        return b"".join(parts)

    def close(self) -> None:
        self._file.close()
        super().close()
