"""As much of protobuf, and of CRIU's image files, as reading some of their fields takes.

An image file is 8 bytes of magic, then messages, each behind its length in 4 bytes (criu/protobuf.c).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping

from gpucr_hpc.errors import ImageError

MAGIC_BYTES = 8
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LENGTH = struct.Struct("<I")


def messages(data: bytes, path: str) -> Iterator[dict[int, list[int | bytes]]]:
    """The messages of an image file, each as its fields: values by number, numbers as int, the rest as bytes.

    path: for the error. Raises ImageError for anything that cannot be read.
    """
    try:
        for message in raw_messages(data):
            yield fields(message)
    except (IndexError, struct.error):
        raise ImageError(path=path, reason="cannot be read") from None


def raw_messages(data: bytes) -> Iterator[bytes]:
    """The messages of an image file as they are. Raises IndexError, struct.error."""
    at = MAGIC_BYTES
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        yield _cut(data, at, length)
        at += length


def fields(data: bytes) -> dict[int, list[int | bytes]]:
    """The fields of one message. Raises IndexError or struct.error where it is out of shape."""
    found: dict[int, list[int | bytes]] = {}
    for field, value, _ in _fields(data):
        found.setdefault(field, []).append(value)
    return found


def replaced(data: bytes, field: int, value: int | bytes) -> bytes:
    """One message with another value in each of its fields of a number, all else as it was, byte for byte. Raises
    IndexError where it is out of shape."""
    return b"".join(_encoded_field(field, value) if number == field else raw for number, _, raw in _fields(data))


def changed(data: bytes, field: int, change: Callable[[bytes], bytes]) -> bytes:
    """The same, where each value becomes what `change` makes of it; it must be no number."""
    return b"".join(
        _encoded_field(field, change(value)) if number == field and isinstance(value, bytes) else raw
        for number, value, raw in _fields(data)
    )


def with_number(data: bytes, field: int, value: int) -> bytes:
    """One message with one field of this number. Raises IndexError where it is out of shape."""
    return b"".join(raw for number, _, raw in _fields(data) if number != field) + _encoded_field(field, value)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes, bytes]]:
    """Number, value and bytes of each field."""
    at = 0
    while at < len(data):
        start = at
        tag, at = _varint(data, at)
        kind = tag & 7
        value: int | bytes
        if kind == _VARINT:
            value, at = _varint(data, at)
        elif kind == _BYTES:
            length, at = _varint(data, at)
            value = _cut(data, at, length)
            at += length
        elif kind in (_FIXED64, _FIXED32):
            length = 8 if kind == _FIXED64 else 4
            value = int.from_bytes(_cut(data, at, length), "little")
            at += length
        else:
            raise IndexError(f"wire type {kind}")
        yield tag >> 3, value, data[start:at]


def number(message: Mapping[int, list[int | bytes]], field: int) -> int | None:
    """The last value of a numeric field, or None when it is not there. Raises IndexError when it is no number."""
    values = message.get(field)
    if not values:
        return None
    if not isinstance(values[-1], int):
        raise IndexError(f"field {field} is no number")
    return values[-1]


def parts(message: Mapping[int, list[int | bytes]], field: int) -> Iterator[dict[int, list[int | bytes]]]:
    """The messages inside a field. Raises IndexError when there are none inside."""
    for value in message.get(field, ()):
        if not isinstance(value, bytes):
            raise IndexError(f"field {field} is a number")
        yield fields(value)


def encode(numbers: Mapping[int, int]) -> bytes:
    """A message of numeric fields, behind its length."""
    return encode_pairs(numbers.items())


def encode_pairs(pairs: Iterable[tuple[int, int | bytes]]) -> bytes:
    """A message of fields, which may be there more than once, behind its length."""
    return framed(b"".join(_encoded_field(field, value) for field, value in pairs))


def framed(message: bytes) -> bytes:
    """A message as it stands in an image file."""
    return _LENGTH.pack(len(message)) + message


def _encoded_field(field: int, value: int | bytes) -> bytes:
    if isinstance(value, bytes):
        return _encoded(field << 3 | _BYTES) + _encoded(len(value)) + value
    return _encoded(field << 3) + _encoded(value)


def _cut(data: bytes, at: int, length: int) -> bytes:
    if at + length > len(data):
        raise IndexError("cut short")
    return data[at : at + length]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _encoded(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
