"""Three router modes, the same workloads, no GPU: ``python -m demo`` (``make demo``).

A tool beside the product: neither the wheel nor the sdist contains it. ``cluster`` is a separate
demo: replicas on a real NATS and etcd (``make demo-cluster``).

The modules, from the lowest layer up; a file imports only from files above it in this list:

- ``args``: the flags.
- ``workload``: conversations, generated from a seed (pure).
- ``record``: the client's measurements of a request (data only).
- ``report``: the records of one run to figures (pure).
- ``summary``: figures of all seeds to means, a table and a verdict (pure).
- ``plot``: figures to PNG and SVG (needs matplotlib).
- ``screen``: the terminal (needs rich).
- ``child``: child processes, started, watched and stopped.
- ``fleet``: mock engines and a frontend, ready to serve.
- ``client``: the users that send the workload.
- ``app``, ``__main__``: seed by seed, all modes in parallel, then the result.
"""
