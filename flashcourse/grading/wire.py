"""Plain data between the grader and the process that runs an answer: JSON and raw numbers.

What comes from that process was written by somebody else's program, so nothing in it is ever
executed: no pickle, no ``torch.load``, a fixed list of dtypes, and limits on every size.

A frame is two lengths (8 bytes each, big-endian), a JSON header, and the bytes of the tensors one
after another.
"""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass, field
from typing import Any

import torch

MIB = 2**20
MAX_HEADER = 4 * MIB
MAX_BYTES = 512 * MIB  # of tensors in one frame
MAX_NODES = 100_000
MAX_DEPTH = 24
MAX_INTEGER_BITS = 1024
MAX_TEXT = 20_000
PREFIX = struct.Struct(">QQ")
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class WireError(ValueError):
    """A frame that does not keep the format, or a value that cannot be sent."""


class Foreign:
    """Stands for an object that is no plain data. Its class carries the object's type name."""


def foreign(type_name: str) -> Foreign:
    """A stand-in whose type has the given name, so that messages can say what came."""
    name = re.sub(r"[^\w.\[\] ]", "", type_name)[:60] or "object"
    return type(name, (Foreign,), {})()


@dataclass
class _Packing:
    strict: bool
    blobs: list[bytes] = field(default_factory=list)
    nodes: int = 0
    bytes: int = 0


def pack(message: dict[str, Any], values: dict[str, Any], *, strict: bool = True) -> bytes:
    """One frame: a message of JSON values, and further values that may hold tensors.

    Args:
        message: what JSON can hold as it is.
        values: nested lists, tuples and dicts of numbers, strings, tensors, dtypes and None.
        strict: refuse anything else; otherwise it is replaced with the name of its type.

    Raises:
        WireError: a value cannot be sent, or there is too much.
    """
    packing = _Packing(strict)
    nodes = {name: _encode(value, packing, 0) for name, value in values.items()}
    sizes = [len(blob) for blob in packing.blobs]
    header = json.dumps({"message": message, "values": nodes, "blobs": sizes}).encode()
    if len(header) > MAX_HEADER:
        raise WireError(f"a message of {len(header):,} bytes; {MAX_HEADER:,} are allowed")
    return b"".join([PREFIX.pack(len(header), sum(sizes)), header, *packing.blobs])


def frame_sizes(prefix: bytes) -> tuple[int, int]:
    """The lengths of the header and of the tensors, from the first 16 bytes of a frame.

    Raises:
        WireError: they are beyond the limits.
    """
    header, body = PREFIX.unpack(prefix)
    if header > MAX_HEADER or body > MAX_BYTES:
        raise WireError(f"a frame of {header:,} + {body:,} bytes is announced; that is too much")
    return header, body


@dataclass
class _Unpacking:
    blobs: list[bytes]
    dense: bool
    nodes: int = 0
    bytes: int = 0


def unpack(
    header: bytes, body: bytes, *, dense: bool = True
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The message and the values of a frame.

    Args:
        dense: make every tensor contiguous; otherwise give it the strides it had.

    Raises:
        WireError: the frame does not keep the format.
    """
    try:
        parts = json.loads(header.decode("utf-8"))
        message, nodes, sizes = parts["message"], parts["values"], parts["blobs"]
        if not isinstance(message, dict) or not isinstance(nodes, dict):
            raise WireError("message and values must be objects")
        if not all(type(size) is int and size >= 0 for size in sizes) or sum(sizes) != len(body):
            raise WireError("the sizes do not add up")
        blobs, start = [], 0
        for size in sizes:
            blobs.append(body[start : start + size])
            start += size
        unpacking = _Unpacking(blobs, dense)
        return message, {str(name): _decode(node, unpacking, 0) for name, node in nodes.items()}
    except WireError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, RuntimeError, RecursionError) as error:
        raise WireError(f"not a frame of the grader: {type(error).__name__}: {error}") from error


# Values to JSON ------------------------------------------------------------------------------


def _encode(value: Any, packing: _Packing, depth: int) -> Any:
    packing.nodes += 1
    if packing.nodes > MAX_NODES or depth > MAX_DEPTH:
        raise WireError(f"a structure of more than {MAX_NODES:,} parts or {MAX_DEPTH} levels")
    kind = type(value)  # what it is, not what its __class__ says
    if value is None or kind is bool:
        return value
    if issubclass(kind, str):
        return str.__str__(value)[:MAX_TEXT]
    if issubclass(kind, int):
        number = int.__int__(value)
        if number.bit_length() <= MAX_INTEGER_BITS:
            return {"i": str(number)}
    elif issubclass(kind, float):
        return {"f": float.__float__(value).hex()}
    elif issubclass(kind, (list, tuple)):
        items = list.__iter__(value) if issubclass(kind, list) else tuple.__iter__(value)
        name = "l" if issubclass(kind, list) else "t"
        return {name: [_encode(item, packing, depth + 1) for item in items]}
    elif issubclass(kind, dict):
        pairs = dict.items(value)
        return {
            "d": [[_encode(k, packing, depth), _encode(v, packing, depth + 1)] for k, v in pairs]
        }
    elif kind in (torch.Tensor, torch.nn.Parameter) and _can_be_sent(value):
        return _encode_tensor(value, packing)
    elif kind is torch.dtype:
        return {"dtype": str(value).removeprefix("torch.")}
    elif kind is torch.device:
        return {"device": str(value)}
    if packing.strict:
        raise WireError(f"a {kind.__name__} cannot be sent to another process")
    return {"o": kind.__name__}


def _can_be_sent(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.dtype in _NAMES and not tensor.is_meta


def _encode_tensor(tensor: torch.Tensor, packing: _Packing) -> dict[str, Any]:
    """Shape, strides and numbers; a dimension of stride 0 is sent once."""
    shape, stride = list(tensor.shape), list(tensor.stride())
    place = tuple(
        slice(0, 1) if step == 0 and size > 1 else slice(None)
        for step, size in zip(stride, shape, strict=True)
    )
    packing.bytes += tensor.numel() * tensor.element_size()
    if packing.bytes > MAX_BYTES:
        gibibytes = packing.bytes / 2**30
        raise WireError(f"tensors of {gibibytes:.1f} GiB; {MAX_BYTES / 2**30:g} GiB are taken")
    once = tensor.detach()[place].cpu().clone(memory_format=torch.contiguous_format)
    packing.blobs.append(once.reshape(-1).view(torch.uint8).numpy().tobytes())
    return {
        "x": len(packing.blobs) - 1,
        "dtype": _NAMES[tensor.dtype],
        "shape": shape,
        "stride": stride,
        "device": str(tensor.device),
        "grad": bool(tensor.requires_grad and tensor.is_leaf),
    }


# JSON to values ------------------------------------------------------------------------------


def _decode(node: Any, unpacking: _Unpacking, depth: int) -> Any:
    unpacking.nodes += 1
    if unpacking.nodes > MAX_NODES or depth > MAX_DEPTH:
        raise WireError("a structure with too many parts or levels")
    if node is None or isinstance(node, (bool, str)):
        return node
    if not isinstance(node, dict):
        raise WireError(f"unexpected {type(node).__name__}")
    if "x" in node:
        return _decode_tensor(node, unpacking)
    ((kind, content),) = node.items()
    if kind == "i":
        if len(content) > MAX_INTEGER_BITS:
            raise WireError("an integer too long")
        return int(content)
    if kind == "f":
        return float.fromhex(content)
    if kind in ("l", "t"):
        items = [_decode(item, unpacking, depth + 1) for item in content]
        return items if kind == "l" else tuple(items)
    if kind == "d":
        return {
            _decode(key, unpacking, depth): _decode(item, unpacking, depth + 1)
            for key, item in content
        }
    if kind == "dtype":
        return DTYPES[content]
    if kind == "device":
        return _device(content)
    if kind == "o":
        return foreign(str(content))
    raise WireError(f"unknown kind {kind!r}")


def _device(name: Any) -> torch.device:
    if not isinstance(name, str) or not re.fullmatch(r"cpu|cuda(:\d{1,2})?", name):
        raise WireError("neither the CPU nor a GPU")
    return torch.device(name)


def _decode_tensor(node: dict[str, Any], unpacking: _Unpacking) -> torch.Tensor:
    dtype, shape, stride = DTYPES[node["dtype"]], node["shape"], node["stride"]
    for numbers in (shape, stride):
        if len(numbers) > 64 or not all(type(n) is int and 0 <= n < 2**48 for n in numbers):
            raise WireError("a shape of something else than small whole numbers")
    if type(node["x"]) is not int or node["x"] < 0:
        raise WireError("a tensor without numbers")
    once = [1 if step == 0 and size > 1 else size for step, size in zip(stride, shape, strict=True)]
    blob = unpacking.blobs[node["x"]]
    if math.prod(once) * dtype.itemsize != len(blob):
        raise WireError("a tensor whose shape does not fit its numbers")
    unpacking.bytes += math.prod(shape) * dtype.itemsize
    if unpacking.bytes > MAX_BYTES:
        raise WireError("tensors that are larger than they may be")
    tensor = torch.empty(once, dtype=dtype)
    if blob:
        tensor = torch.frombuffer(bytearray(blob), dtype=torch.uint8).view(dtype).reshape(once)
    tensor = tensor.to(_device(node["device"]))
    if unpacking.dense:
        return tensor.expand(shape).contiguous()
    if blob and tensor.stride() != tuple(stride):
        laid_out = torch.empty_strided(once, stride, dtype=dtype, device=tensor.device)
        tensor = laid_out.copy_(tensor)
    tensor = tensor.expand(shape)
    return tensor.requires_grad_() if node["grad"] is True else tensor
