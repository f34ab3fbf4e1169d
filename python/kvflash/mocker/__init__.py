"""An LLM engine without a model, to run, test and benchmark a KV-aware router without a GPU.

A file imports only from files before it in this list: config, block_hash, block_manager,
perf_model, request, scheduler, tokenizer, publisher, engine, fields, handover, options, protocol,
schema_text, schema, plan, logprobs, answer, completions, responses, messages, audio, pooling,
generation, middleware, admin, api, worker, app, args, __main__.

Start it with ``python -m kvflash.mocker``, or in-process with ``kvflash.mocker.app.serve``.
"""
