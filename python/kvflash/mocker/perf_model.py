"""The duration of one engine pass, in modelled milliseconds.

The curves are those of NVIDIA Dynamo's mocker, fitted to a real GPU. Here a decode step also grows
with its batch, so that spreading load over workers pays off as on real hardware.
"""

# Milliseconds per token squared, per token, and per pass.
PREFILL_MS = (4.209989e-07, 1.518344e-02, 16.50142)
# Milliseconds per cache usage squared, per usage (0..1), and per pass.
DECODE_MS = (-25.74, 54.01, 5.74)
DECODE_MS_MIN = 1.0
# Each further request of a batch adds 0.5 % to its decode step: 256 requests take 2.3 times as long
# as one, so batching still raises throughput more than a hundredfold.
BATCH_COST = 0.005


def prefill_ms(new_tokens: int) -> float:
    """Time to compute the prompt tokens of a pass that are not cached."""
    if new_tokens == 0:
        return 0.0
    square, linear, constant = PREFILL_MS
    return square * new_tokens * new_tokens + linear * new_tokens + constant


def decode_ms(kv_usage: float) -> float:
    """Time of a decode step of one request, at this share of the KV cache; above 1 counts as 1."""
    usage = min(1.0, kv_usage)
    square, linear, constant = DECODE_MS
    return max(DECODE_MS_MIN, square * usage * usage + linear * usage + constant)


def decode_step_ms(kv_usage: float, batch_size: int) -> float:
    """Time of a decode step of a whole batch; 0 for an empty one."""
    if batch_size == 0:
        return 0.0
    return decode_ms(kv_usage) * (1.0 + BATCH_COST * (batch_size - 1))


def pass_ms(new_tokens: int, batch_size: int, kv_usage: float) -> float:
    """Time of a whole pass: its prefill, then its decode step."""
    return prefill_ms(new_tokens) + decode_step_ms(kv_usage, batch_size)
