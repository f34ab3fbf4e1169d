/* libkvflash: tells KV-cache-aware routers what the KV cache of an engine holds.
 *
 *     kvflash_publisher_options options = KVFLASH_PUBLISHER_OPTIONS_INIT;
 *     options.kv_block_size = 16;
 *     options.port = 5557;
 *     options.replay_port = 5657;
 *     kvflash_publisher publisher;
 *     if (kvflash_publisher_create(&options, &publisher) != KVFLASH_OK)
 *         fprintf(stderr, "%s\n", kvflash_last_error());
 *
 *     kvflash_stored stored = KVFLASH_STORED_INIT;
 *     stored.token_ids = tokens;      stored.token_count = 32;
 *     stored.block_hashes = names;    stored.block_count = 2;
 *     stored.parent_hash = NULL;
 *     kvflash_publish_stored(publisher, &stored);
 *     kvflash_publisher_destroy(publisher);
 *
 * Every function may be called from any thread, at any time, beside any other. None aborts: what is
 * wrong is answered with a code, and kvflash_last_error() says what. A process may have up to 4,096
 * publishers. A publisher belongs to the process that created it, not to its forks.
 *
 * A publisher has a thread that owns its sockets; calls check, encode and queue, and wait only while
 * 16 MiB are queued. What was published within a tick goes out as one batch, in the order of the
 * calls. Batches are numbered from 0 and kept in a ring, from which routers that come late or lost
 * some ask again.
 */
#ifndef KVFLASH_H
#define KVFLASH_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Values are kept; new ones may come. */
typedef enum kvflash_result {
    KVFLASH_OK = 0,
    KVFLASH_ERR = 1,              /* an older function failed */
    KVFLASH_INVALID_ARGUMENT = 2, /* nothing of the call was published */
    KVFLASH_NO_PUBLISHER = 3,     /* never created, destroyed, or of the process that was forked */
    KVFLASH_IO = 4,               /* a port is taken, or the like */
    KVFLASH_LIMIT = 5,            /* too many publishers */
    KVFLASH_INTERNAL = 6,         /* a mistake of this library's */
    KVFLASH_PARTIAL = 7,          /* blocks before one of another size were published, the rest not */
    KVFLASH_TIMEOUT = 8
} kvflash_result;

/* Stands for a publisher. 0 is none, and no number is given twice: one of a publisher that was
 * destroyed is an error, never another publisher. */
typedef uint64_t kvflash_publisher;

typedef struct kvflash_publisher_options {
    size_t struct_size;      /* sizeof(kvflash_publisher_options) */
    uint32_t kv_block_size;  /* tokens in a block, at least 1 */
    uint32_t dp_rank;        /* data-parallel rank; each has a publisher of its own */
    const char *host;        /* interface to bind to; NULL: 127.0.0.1 */
    uint16_t port;           /* of the events; 0: a free one */
    uint16_t replay_port;    /* of the replay; 0: a free one */
    uint32_t tick_us;        /* how long the first event of a batch waits for more; up to 1,000,000 */
    const char *topic;       /* NULL: "kv-events" */
    uint64_t ring_batches;   /* batches kept for replay; 0: 10,000 */
    uint64_t ring_bytes;     /* memory that they may take, from 1 MiB; 0: 64 MiB */
    const char *namespace_;  /* announce under this namespace in the discovery folder; NULL: do not */
    const char *component;   /* and this component; NULL: "backend"; an error without namespace_ */
    uint64_t worker_id;      /* instance that the events are of; 0: a random one */
} kvflash_publisher_options;

#define KVFLASH_PUBLISHER_OPTIONS_INIT \
    { sizeof(kvflash_publisher_options), 0, 0, NULL, 0, 0, 1000, NULL, 0, 0, NULL, NULL, 0 }

/* Blocks that can now be reused, each the continuation of the one before. Nothing is kept of the
 * pointers after the call. */
typedef struct kvflash_stored {
    size_t struct_size;             /* sizeof(kvflash_stored) */
    const uint32_t *token_ids;      /* tokens of all the blocks */
    size_t token_count;
    const size_t *num_block_tokens; /* tokens of each block; NULL: kv_block_size each */
    const uint64_t *block_hashes;   /* the engine's names of the blocks */
    size_t block_count;
    const uint64_t *parent_hash;    /* name of the block before; NULL only at the start of a prompt */
    uint64_t lora_id;               /* number of the adapter; 0: none */
    const char *lora_name;          /* its name, which prompts are matched by; NULL: none */
    const char *cache_salt;         /* salt of the prompt; NULL: none, or the parent's */
    const char *medium;             /* where the blocks are: "GPU", "CPU", "DISK"; NULL: device */
} kvflash_stored;

#define KVFLASH_STORED_INIT \
    { sizeof(kvflash_stored), NULL, 0, NULL, NULL, 0, NULL, 0, NULL, NULL, NULL }

typedef struct kvflash_publisher_stats {
    size_t struct_size; /* sizeof(kvflash_publisher_stats) */
    uint64_t stored_blocks_total;
    uint64_t removed_blocks_total;
    uint64_t dropped_blocks_total; /* behind a block of another size, itself included */
    uint64_t events_total;
    uint64_t pending_events;
    uint64_t batches_total;
    uint64_t replays_total;
    uint64_t replays_refused_total; /* more than 64 at a time */
} kvflash_publisher_stats;

/* Text of this thread's last failure; "" if there was none. Stays until this thread's next one. */
const char *kvflash_last_error(void);

/* Bind the sockets, start, and announce if there is a namespace. Namespace and component have 1 to 48
 * of the characters A-Z a-z 0-9 _ -. */
int kvflash_publisher_create(const kvflash_publisher_options *options, kvflash_publisher *publisher);

/* Publish. A wrong argument publishes nothing; see KVFLASH_PARTIAL for blocks of another size. A call
 * has 2^24 blocks and 2^28 tokens at most. */
int kvflash_publish_stored(kvflash_publisher publisher, const kvflash_stored *stored);
int kvflash_publish_removed(kvflash_publisher publisher, const uint64_t *block_hashes,
                            size_t block_count, const char *medium);
/* The cache was reset: no block is left, in any medium. */
int kvflash_publish_cleared(kvflash_publisher publisher);

/* Wait until everything that was published is handed to the socket. */
int kvflash_publisher_flush(kvflash_publisher publisher, uint32_t timeout_ms);

/* Where the events are, and where they are replayed, e.g. "tcp://127.0.0.1:5557". A buffer that is too
 * short is KVFLASH_INVALID_ARGUMENT. */
int kvflash_publisher_endpoint(kvflash_publisher publisher, char *buffer, size_t size);
int kvflash_publisher_replay_endpoint(kvflash_publisher publisher, char *buffer, size_t size);

int kvflash_publisher_get_stats(kvflash_publisher publisher, kvflash_publisher_stats *stats);

/* Withdraw the announcement, send what is queued, close; waits for that. Of several calls one
 * succeeds, the others answer KVFLASH_NO_PUBLISHER. */
int kvflash_publisher_destroy(kvflash_publisher publisher);

/* --- One publisher for the process, as engines written for older libraries have it. Answers 0 or 1;
 * 0 also where blocks of another size were dropped (see KVFLASH_PARTIAL).
 *
 * Interface and ports come from KVFLASH_HOST, KVFLASH_EVENTS_PORT and KVFLASH_REPLAY_PORT. It
 * announces itself under namespace and component ("backend" if NULL); without a namespace it needs
 * a port, by which it is registered. Event ids are taken and not used: batches are numbered. */
int kvflash_llm_init(const char *namespace_, const char *component, int64_t worker_id,
                     uint32_t kv_block_size);
int kvflash_llm_shutdown(void);
int kvflash_kv_event_publish_stored(uint64_t event_id, const uint32_t *token_ids,
                                    const size_t *num_block_tokens, const uint64_t *block_ids,
                                    size_t num_blocks, const uint64_t *parent_hash,
                                    uint64_t lora_id);
int kvflash_kv_event_publish_removed(uint64_t event_id, const uint64_t *block_ids,
                                     size_t num_blocks);
int kvflash_kv_event_publish_cleared(uint64_t event_id);

#ifdef __cplusplus
}
#endif

#endif /* KVFLASH_H */
