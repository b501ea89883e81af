"""Encoding of messages between processes: MessagePack structs with raw arrays inside."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

T = TypeVar("T")


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"cannot send a {type(value).__name__}")


def _decode_array(target: type, value: Any) -> Any:
    if target is np.ndarray or getattr(target, "__origin__", None) is np.ndarray:
        dtype, shape, data = value
        return np.frombuffer(data, dtype=dtype).reshape(shape)
    raise NotImplementedError(f"cannot receive a {target}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)


def encode(message: Any) -> bytes:
    """Serialise a message struct; arrays travel as their raw bytes."""
    return _encoder.encode(message)


class Decoder(Generic[T]):
    """Decoder of one message type (or union of tagged structs); arrays come back read-only.

    Raises `msgspec.ValidationError` on anything that is not such a message.
    """

    def __init__(self, message_type: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(message_type, dec_hook=_decode_array)

    def decode(self, data: bytes) -> T:
        """The message in `data`."""
        result: T = self._decoder.decode(data)
        return result
