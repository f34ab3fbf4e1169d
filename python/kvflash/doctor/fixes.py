"""The fixes for the warnings of GET /health, by their codes."""

_SILENT = (
    "check that events= is the endpoint of the engine's --kv-events-config, and that events are "
    "enabled there"
)
_FIXES = {
    "worker_error": "correct what the message names; the worker is checked again by itself",
    "worker_refused": "correct what the message names where the worker is announced; it is tried "
    "again by itself",
    "no_decode_worker": "start a decode worker of that model, or one that does both",
    "no_prefill_worker": "start or repair a prefill worker, or set --enforce-disagg off",
    "alias_not_served": "start an engine of that model, or correct --model-alias",
    "events_not_given": "give the worker events=tcp://HOST:PORT",
    "events_not_announced": "enable KV events in that worker, or set --no-kv-events",
    "events_need_broker": "start the frontend with --event-plane nats",
    "nothing_published": _SILENT,
    "event_socket": _SILENT,
    "lost_batches": "give the worker its replay_endpoint, and its engine a larger buffer_steps",
    "undecodable": "report engine and version",
    "refused_blocks": "raise --max-blocks",
    "block_size_mismatch": "give all engines of the model the same block size",
    "block_size_unknown": "register workers with block_size, or set --router-block-size",
    "token_counts_differ": "set --tokenizer to the model's own folder, with the chat template that "
    "the engine uses",
    "token_ids_refused": "none is needed, as the engine tokenizes by itself; restart it to try "
    "ids again",
    "chat_template": "set --tokenizer to the model's own folder, or add a chat_template.jinja that "
    "works",
    "encoder_differs": "report it, with the model's name",
    "cluster": "start what the message names, or open the way to it from the service's host",
    "remote_indexer": "run the doctor on the indexer, too, and correct --use-remote-indexer",
    "policy": "correct what the message names; the log has its errors",
    "state_file": "let the service's user write the file and its folder, free space there, and "
    "register again what the message names",
    "keys": "kvflash keys list --keys-file FILE names the line that is wrong; correct it",
}


def fix_of(code: str) -> str:
    """The next step for a warning; one without an entry here is looked up in the manual."""
    return _FIXES.get(code, 'see "What /health warns of" in docs/frontend.md')
