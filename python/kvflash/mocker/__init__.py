"""An LLM engine without a model, to run, test and benchmark a KV-aware router without a GPU.

The modules, from the lowest layer up; a file imports only from files above it in this list:

- ``config``: every option and its legal values.
- ``block_hash``: token ids to chained block hashes.
- ``block_manager``: the paged KV cache with prefix caching and LRU eviction (pure).
- ``perf_model``: the duration of a step (pure).
- ``events``: block events and their two wire encodings (pure).
- ``request``: a request and its progress (data only).
- ``scheduler``: continuous batching over the block manager (pure, no clock).
- ``tokenizer``: text to token ids, chat templates, deterministic output.
- ``publisher``: ZMQ PUB socket and replay ROUTER.
- ``engine``: the asyncio loop that drives the scheduler in time.
- ``handover``: transfer of a prompt's KV to another worker.
- ``refusal``, ``options``, ``protocol``: request bodies to engine parameters.
- ``schema_text``, ``schema``: JSON schemas to values that they allow (pure).
- ``plan``: the tokens of an answer, and the part that clients see (pure).
- ``logprobs``, ``answer``, ``completions``, ``responses``, ``messages``, ``audio``, ``pooling``:
  answers in the form of each API.
- ``generation``: runs a request and writes its answer.
- ``admin``, ``middleware``, ``api``: the HTTP paths.
- ``tokens``, ``worker``: requests of the runtime instead.
- ``app``, ``args``, ``__main__``: workers in one process, the command line.

Start it with ``python -m kvflash.mocker``, or in-process with ``kvflash.mocker.app.serve``.
"""
