"""TensorBoard's event files: TFRecords of protocol buffers, read as far as scalars need it."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from llds.diagnosis.formats.rows import Bad, Row

_LARGEST_RECORD = 1 << 26


def read_events(data: bytes) -> Iterator[Row | Bad]:
    """Yield a row per step of the scalars in an event file; a torn end is told."""
    step: int | None = None
    values: dict[str, float] = {}
    for record in _records(data):
        if isinstance(record, Bad):
            yield record
            break
        try:
            at, scalars = _event(record)
        except (IndexError, struct.error, UnicodeDecodeError, ValueError):
            yield Bad(1, "a record can't be read")
            continue
        if not scalars:
            continue
        if step is not None and at != step:
            yield Row(step, values)
            values = {}
        step = at
        values |= scalars
    if step is not None and values:
        yield Row(step, values)


def _records(data: bytes) -> Iterator[bytes | Bad]:
    position = 0
    while position < len(data):
        head = data[position : position + 12]
        if len(head) < 12:
            yield Bad(1, "the file ends inside a record")
            return
        length, check = struct.unpack("<QI", head)
        if masked_crc(head[:8]) != check or length > _LARGEST_RECORD:
            yield Bad(1, f"the record at byte {position} is damaged")
            return
        record = data[position + 12 : position + 12 + length]
        if len(record) < length:
            yield Bad(1, "the file ends inside a record")
            return
        yield record
        position += 16 + length


def _event(record: bytes) -> tuple[int, dict[str, float]]:
    step, scalars = 0, {}
    for number, value in _fields(record):
        if number == 2 and isinstance(value, int):
            step = value
        elif number == 5 and isinstance(value, bytes):
            for inner, content in _fields(value):
                if inner == 1 and isinstance(content, bytes):
                    tag, figure = _scalar(content)
                    if tag and figure is not None:
                        scalars[tag] = figure
    return step, scalars


def _scalar(content: bytes) -> tuple[str, float | None]:
    tag, figure = "", None
    for number, value in _fields(content):
        if number == 1 and isinstance(value, bytes):
            tag = value.decode("utf-8")
        elif number == 2 and isinstance(value, float):
            figure = value
        elif number == 8 and isinstance(value, bytes):
            figure = _tensor(value)
    return tag, figure


def _tensor(content: bytes) -> float | None:
    """Return the one number of a tensor: float32 or float64, packed or as raw bytes."""
    kind, raw = 1, b""
    for number, value in _fields(content):
        if number == 1 and isinstance(value, int):
            kind = value
        elif number in {4, 5, 6} and isinstance(value, bytes):
            raw = value
        elif number == 5 and isinstance(value, float):
            return value
    size, form = (8, "<d") if kind == 2 else (4, "<f")
    if kind not in {1, 2} or len(raw) != size:
        return None
    figure: float = struct.unpack(form, raw)[0]
    return figure


def _fields(data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Yield the fields of a protocol buffer message: number and value."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, position = _varint(data, position)
            yield number, value - (1 << 64) if value >= 1 << 63 else value
        elif kind == 1:
            yield number, struct.unpack_from("<d", data, position)[0]
            position += 8
        elif kind == 5:
            yield number, struct.unpack_from("<f", data, position)[0]
            position += 4
        elif kind == 2:
            length, position = _varint(data, position)
            if position + length > len(data):
                raise ValueError("a field reaches beyond its message")
            yield number, data[position : position + length]
            position += length
        else:
            raise ValueError(f"wire type {kind}")


def _varint(data: bytes, position: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, position
        shift += 7
        if shift > 63:
            raise ValueError("a number is too long")


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_CRC = _crc_table()


def masked_crc(data: bytes) -> int:
    """Return the checksum of TFRecords: CRC-32C, rotated and shifted."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
