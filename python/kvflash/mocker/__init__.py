"""An LLM engine without a model, to run, test and benchmark a KV-aware router without a GPU.

A file imports only from files before it in this list: config, blocks, scheduler, metrics,
tokenizer, publisher, engine, fields, handover, options, protocol, schema_text, schema, plan,
answer, completions, responses, messages, audio, pooling, generation, middleware, api, worker, app,
args, __main__.

Start it with ``python -m kvflash.mocker``, or in-process with ``kvflash.mocker.app.serve``.
"""
