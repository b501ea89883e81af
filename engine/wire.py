"""Encoding of messages between processes: MessagePack structs with raw arrays inside."""

from __future__ import annotations

import functools
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

T = TypeVar("T")


_dtype = functools.lru_cache(64)(np.dtype)
_is_array: dict[Any, bool] = {}


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"cannot send a {type(value).__name__}")


def _decode_array(target: type, value: Any) -> Any:
    # Four times for each tree of a step: what is known of a type of arrays is looked up.
    is_array = _is_array.get(target)
    if is_array is None:
        is_array = target is np.ndarray or getattr(target, "__origin__", None) is np.ndarray
        _is_array[target] = is_array
    if not is_array:
        raise NotImplementedError(f"cannot receive a {target}")
    dtype, shape, data = value
    flat = np.frombuffer(data, dtype=_dtype(dtype))
    return flat if len(shape) == 1 and shape[0] == len(flat) else flat.reshape(shape)


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
