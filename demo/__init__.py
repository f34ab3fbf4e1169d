"""Three router modes, the same workloads, no GPU: ``python -m demo`` (``make demo``).

A tool beside the product: neither the wheel nor the sdist has it. ``cluster`` is another one, of
its own: replicas on a real NATS and etcd (``make demo-cluster``).

The rooms, from the ground up; a file imports only from files above it in this list:

- ``args``: the flags.
- ``workload``: conversations, all of them a function of a seed (pure).
- ``record``: what the client saw of a request (words).
- ``report``: the records of one run to figures (pure).
- ``summary``: figures of all seeds to means, a table and a verdict (pure).
- ``plot``: figures to PNG and SVG (needs matplotlib).
- ``screen``: the terminal (needs rich).
- ``child``: processes that are started, watched and stopped.
- ``fleet``: mock engines and a frontend, ready to serve.
- ``client``: the users who send the workload.
- ``app``, ``__main__``: seed after seed, all modes side by side, then the answer.
"""
