"""An LLM engine without a model, to run, test and benchmark a KV-aware router without a GPU.

The rooms, from the ground up; a file imports only from files above it in this list:

- ``config``: every option and what is legal.
- ``block_hash``: token ids to chained block hashes.
- ``block_manager``: the paged KV cache with prefix caching and LRU eviction (pure).
- ``perf_model``: how long a step takes (pure).
- ``events``: block events and their two wire encodings (pure).
- ``request``: a request and its progress (words).
- ``scheduler``: continuous batching over the block manager (pure, no clock).
- ``tokenizer``: text to token ids, chat templates, deterministic output.
- ``publisher``: ZMQ PUB socket and replay ROUTER.
- ``engine``: the asyncio loop that gives the scheduler a clock.
- ``handover``: how a prompt's KV comes to another worker.
- ``refusal``, ``options``, ``protocol``: request bodies to what the engine needs.
- ``schema_text``, ``schema``: JSON schemas to values that they allow (pure).
- ``plan``, ``choice``: what an answer will be, token by token, and how much of it is told (pure).
- ``logprobs``, ``answer``, ``completions``, ``responses``, ``messages``, ``audio``, ``pooling``:
  answers in the form of each API.
- ``generation``: runs a request and writes its answer.
- ``metrics``, ``admin``, ``middleware``, ``api``: the paths over HTTP.
- ``tokens``, ``worker``: requests of the runtime instead.
- ``app``, ``args``, ``__main__``: workers in one process, the command line.

Start it with ``python -m kvflash.mocker``, or in-process with ``kvflash.mocker.app.serve``.
"""
