"""What a worker on the nats request plane reads of its clients' signs of life."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import msgpack

from kvflash import RuntimeLimits
from kvflash.runtime.nats import NatsServer
from kvflash.runtime.serving import Serving


def test_odd_signs_take_no_memory_and_keep_no_other_back() -> None:
    server = NatsServer(Serving(1, RuntimeLimits()), host="127.0.0.1", port=0)
    name, heard = b"n" * 16, []
    answer: Any = SimpleNamespace(sign=heard.append)
    server._answers[name] = answer
    # Of a number bytes() makes as many bytes: the first one is more than any machine has.
    for odd in (2**62, 5, [1], "text", None):
        server._read_signs(msgpack.packb([[odd, 1], [name, 7]]))
    assert heard == [7] * 5
    server._read_signs(msgpack.packb([[name, math.inf]]))
    assert heard == [7] * 5
