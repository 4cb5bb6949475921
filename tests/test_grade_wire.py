"""The wire between grader and answers: everything comes back as it was, and nothing else comes."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashcourse.grading import confine, wire
from flashcourse.grading.replies import how_it_ended
from flashcourse.grading.wire import DTYPES, PREFIX, WireError, pack, unpack


def there_and_back(value, *, strict=True, dense=False):
    frame = pack({"kind": "x"}, {"value": value}, strict=strict)
    header, body = wire.frame_sizes(frame[: PREFIX.size])
    rest = frame[PREFIX.size :]
    assert len(rest) == header + body
    message, values = unpack(rest[:header], rest[header:], dense=dense)
    assert message == {"kind": "x"}
    return values["value"]


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**200), 2**200) | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=20,
)


def same(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return a == b


@settings(deadline=None, max_examples=200)
@given(PLAIN)
def test_plain_data_comes_back(value):
    assert same(there_and_back(value), value)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x,
        lambda x: x.permute(2, 0, 1),
        lambda x: x[:, ::2, 1:],
        lambda x: x[:1].expand(4, -1, -1),
        lambda x: x[0, 0, 0],
        lambda x: x[:, :0],
        lambda x: x.flatten()[:1].expand(3, 2),
    ],
)
def test_tensors_come_back_with_their_strides(dtype, layout):
    x = layout((torch.randn(2, 4, 5) * 3).to(dtype))
    y = there_and_back([x])[0]
    assert (y.dtype, y.shape) == (x.dtype, x.shape)
    assert x.numel() == 0 or y.stride() == x.stride()
    assert torch.equal(y, x)
    dense = there_and_back((x,), dense=True)[0]
    assert dense.is_contiguous()
    assert torch.equal(dense, x)


def test_special_numbers_and_gradients():
    x = torch.tensor([float("nan"), -0.0, math.inf, -math.inf, 1e-45], requires_grad=True)
    y = there_and_back(x)
    assert y.requires_grad
    assert y.detach().view(torch.int32).tolist() == x.detach().view(torch.int32).tolist()
    assert there_and_back([torch.bfloat16, torch.device("cpu")]) == [
        torch.bfloat16,
        torch.device("cpu"),
    ]


class Sly(torch.Tensor):
    """A subclass is no tensor."""


class Pair(NamedTuple):
    a: int
    b: int


class Number(IntEnum):
    ONE = 1


class Friendly(float):
    def __eq__(self, other):
        return True

    __hash__ = float.__hash__


def test_objects_arrive_as_their_type_name_or_not_at_all():
    objects = [object(), Sly(), torch.zeros(2).to_sparse(), torch.zeros(1, dtype=torch.cfloat), {1}]
    names = [type(item).__name__ for item in there_and_back(objects, strict=False)]
    assert names == ["object", "Sly", "Tensor", "Tensor", "set"]
    for value in objects:
        with pytest.raises(WireError, match="cannot be sent"):
            pack({}, {"value": value})
    assert there_and_back([Pair(1, 2), Number.ONE, Friendly(2)], strict=False) == [(1, 2), 1, 2.0]
    assert type(there_and_back(Friendly(2))) is float


def test_limits_on_what_is_sent(monkeypatch):
    endless = []
    endless.append(endless)
    for value in (endless, [0] * (wire.MAX_NODES + 1), torch.zeros(1).expand(2**31)):
        with pytest.raises(WireError):
            pack({}, {"value": value}, strict=False)
    assert type(there_and_back(10**400, strict=False)).__name__ == "int"
    with pytest.raises(WireError, match="too much"):
        wire.frame_sizes(PREFIX.pack(10, 2**40))


def frame(node, blobs=(), body=b""):
    return json.dumps({"message": {}, "values": {"v": node}, "blobs": list(blobs)}).encode(), body


TENSOR = {"x": 0, "dtype": "float32", "shape": [2], "stride": [1], "device": "cpu", "grad": False}


@pytest.mark.parametrize(
    "made",
    [
        (b"", b""),
        (b"[]", b""),
        (b"\xff\xfe", b""),
        (b"[" * 100_000, b""),
        (b'{"message": 1, "values": {}, "blobs": []}', b""),
        frame({"unknown": 1}),
        frame({"i": "9" * 5000}),
        frame({"i": "1; import os"}),
        frame({"f": "xyz"}),
        frame({"d": [[{"l": []}, 1]]}),
        frame({"dtype": "qint8"}),
        frame({"device": "meta"}),
        frame(3.5),
        frame(TENSOR),
        frame(TENSOR, [8], b"1234"),
        frame(TENSOR, [4], b"1234"),
        frame(TENSOR | {"shape": [-2]}, [8], b"12345678"),
        frame(TENSOR | {"shape": ["2"]}, [8], b"12345678"),
        frame(TENSOR | {"shape": [2, 2**40], "stride": [1, 0]}, [8], b"12345678"),
        frame(TENSOR | {"x": -1}, [8], b"12345678"),
        frame(TENSOR | {"device": "meta"}, [8], b"12345678"),
        frame(TENSOR | {"dtype": "object"}, [8], b"12345678"),
        frame(None, [-1, 1], b""),
    ],
    ids=range(23),
)
def test_a_bad_frame_is_refused(made):
    with pytest.raises(WireError):
        unpack(*made)


def test_a_good_frame_made_by_hand_is_taken():  # else the test above would prove nothing
    _, values = unpack(*frame(TENSOR, [8], torch.tensor([1.0, 2.0]).numpy().tobytes()))
    assert values["v"].tolist() == [1, 2]


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200), st.binary(max_size=20))
def test_noise_is_refused_and_never_crashes(header, body):
    with pytest.raises(WireError):
        unpack(header, body)


CONFINED = """
import json, os, resource, sys
report = {"limit": resource.getrlimit(resource.RLIMIT_FSIZE)[0], "wrote": [], "read": []}
for path in sys.argv[1:]:
    for name, mode in (("wrote", "a"), ("read", "r")):
        try:
            open(path, mode).close()
            report[name].append(path)
        except OSError:
            pass
print(json.dumps(report))
"""


@pytest.mark.skipif(
    confine.landlock_version() < 1, reason="not verified on this machine: no Landlock"
)
def test_landlock_leaves_what_was_named_and_nothing_else(tmp_path: Path):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "file").write_text("x")
    readable = ["/usr", "/lib", "/lib64", "/bin", "/etc", "/proc", sys.prefix, sys.base_prefix]
    asked = {
        "limits": {"RLIMIT_FSIZE": 12345, "RLIMIT_NOT_THERE": 1},
        "landlock": True,
        "readable": readable,
        "writable": [str(inside), "/dev/null"],
    }
    paths = [str(inside / "file"), str(outside / "file"), "/etc/hostname"]
    run = subprocess.run(
        [sys.executable, "-I", "-S", confine.__file__, json.dumps(asked), sys.executable, "-c",
         CONFINED, *paths],
        capture_output=True, text=True, check=True, cwd=inside, env=os.environ,
    )  # fmt: skip
    report = json.loads(run.stdout)
    assert report["limit"] == 12345
    assert report["wrote"] == [paths[0]]
    assert report["read"] == [paths[0], paths[2]]


def test_a_confinement_that_cannot_be_had_starts_nothing():
    asked = json.dumps({"limits": {}, "landlock": False})
    words = [sys.executable, "-I", "-S", confine.__file__, asked, "/no/such/program"]
    run = subprocess.run(words, capture_output=True, text=True, check=False)
    assert run.returncode == confine.FAILED
    assert "cannot confine" in run.stderr


def test_a_process_that_wrote_outside_a_tensor_is_told_where_to_look() -> None:
    for number in (signal.SIGABRT, signal.SIGSEGV):
        assert "outside a tensor; look at the masks and the strides" in how_it_ended(-number)
    assert how_it_ended(-signal.SIGKILL) == "the answer's process was killed by SIGKILL"
