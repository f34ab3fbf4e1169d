/* An engine as far as libkvflash sees one. What it publishes is compared by test_capi.py with what a
 * real index then matches; what it must be refused is checked here. */
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kvflash.h"

#define BLOCK_SIZE 4
#define THREADS 4
#define TURNS 100

static int faults = 0;

#define CHECK(condition)                                                                          \
    do {                                                                                          \
        if (!(condition)) {                                                                       \
            fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition,                    \
                    kvflash_last_error());                                                        \
            faults++;                                                                             \
        }                                                                                         \
    } while (0)

#define FAILS(call, code, text)                                                                   \
    do {                                                                                          \
        CHECK((call) == (code));                                                                  \
        CHECK(strstr(kvflash_last_error(), (text)) != NULL);                                      \
    } while (0)

static kvflash_publisher create(uint32_t dp_rank, uint16_t port, uint16_t replay_port) {
    kvflash_publisher_options options = KVFLASH_PUBLISHER_OPTIONS_INIT;
    options.kv_block_size = BLOCK_SIZE;
    options.dp_rank = dp_rank;
    options.port = port;
    options.replay_port = replay_port;
    kvflash_publisher publisher = 0;
    CHECK(kvflash_publisher_create(&options, &publisher) == KVFLASH_OK);
    return publisher;
}

/* Blocks whose tokens count on from `first`. */
static int store(kvflash_publisher publisher, const uint64_t *names, size_t blocks, uint32_t first,
                 const uint64_t *parent, const char *lora_name, const char *cache_salt) {
    uint32_t tokens[64 * BLOCK_SIZE];
    kvflash_stored stored = KVFLASH_STORED_INIT;
    for (size_t i = 0; i < blocks * BLOCK_SIZE; i++) tokens[i] = first + (uint32_t)i;
    stored.token_ids = tokens;
    stored.token_count = blocks * BLOCK_SIZE;
    stored.block_hashes = names;
    stored.block_count = blocks;
    stored.parent_hash = parent;
    stored.lora_name = lora_name;
    stored.cache_salt = cache_salt;
    return kvflash_publish_stored(publisher, &stored);
}

static void say_where(kvflash_publisher publisher) {
    char endpoint[128], replay_endpoint[128];
    CHECK(kvflash_publisher_endpoint(publisher, endpoint, sizeof endpoint) == KVFLASH_OK);
    CHECK(kvflash_publisher_replay_endpoint(publisher, replay_endpoint, sizeof replay_endpoint) ==
          KVFLASH_OK);
    printf("{\"endpoint\": \"%s\", \"replay_endpoint\": \"%s\"}\n", endpoint, replay_endpoint);
    fflush(stdout);
}

static void say_stats(kvflash_publisher publisher) {
    kvflash_publisher_stats stats = {.struct_size = sizeof stats};
    CHECK(kvflash_publisher_flush(publisher, 10000) == KVFLASH_OK);
    CHECK(kvflash_publisher_get_stats(publisher, &stats) == KVFLASH_OK);
    CHECK(stats.pending_events == 0);
    printf("{\"batches\": %" PRIu64 ", \"stored\": %" PRIu64 ", \"removed\": %" PRIu64
           ", \"dropped\": %" PRIu64 "}\n",
           stats.batches_total, stats.stored_blocks_total, stats.removed_blocks_total,
           stats.dropped_blocks_total);
    fflush(stdout);
}

static void wait_for_word(void) {
    char line[64];
    if (fgets(line, sizeof line, stdin) == NULL) exit(3);
}

struct work {
    kvflash_publisher publisher;
    uint32_t thread;
};

/* Each thread has prompts of its own: of two turns, one's block is evicted again. */
static void *publish_many(void *argument) {
    struct work *work = argument;
    for (uint32_t turn = 0; turn < TURNS; turn++) {
        uint64_t name = (uint64_t)(work->thread + 1) << 32 | turn;
        uint32_t first = 1000000 * (work->thread + 1) + turn * BLOCK_SIZE;
        CHECK(store(work->publisher, &name, 1, first, NULL, NULL, NULL) == KVFLASH_OK);
        if (turn % 2 == 1)
            CHECK(kvflash_publish_removed(work->publisher, &name, 1, NULL) == KVFLASH_OK);
    }
    return NULL;
}

static int engine(uint16_t port, uint16_t replay_port) {
    kvflash_publisher ranks[2] = {create(0, port, replay_port), create(1, 0, 0)};
    say_where(ranks[0]);
    say_where(ranks[1]);
    wait_for_word();
    pthread_t threads[THREADS];
    struct work work[THREADS];
    for (uint32_t i = 0; i < THREADS; i++) {
        work[i] = (struct work){ranks[0], i};
        pthread_create(&threads[i], NULL, publish_many, &work[i]);
    }
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    uint64_t names[] = {1, 2, (uint64_t)-3};
    CHECK(store(ranks[0], names, 2, 100, NULL, NULL, NULL) == KVFLASH_OK);
    CHECK(store(ranks[0], &names[2], 1, 108, &names[1], NULL, NULL) == KVFLASH_OK);
    uint64_t adapted = 4, salted[] = {5, 6}, behind = 7;
    CHECK(store(ranks[0], &adapted, 1, 200, NULL, "sql", NULL) == KVFLASH_OK);
    CHECK(store(ranks[0], salted, 2, 300, NULL, NULL, "tenant-a") == KVFLASH_OK);
    CHECK(store(ranks[0], &behind, 1, 308, &salted[1], NULL, NULL) == KVFLASH_OK);
    CHECK(store(ranks[1], names, 1, 100, NULL, NULL, NULL) == KVFLASH_OK);
    say_stats(ranks[0]);
    say_stats(ranks[1]);
    wait_for_word();
    CHECK(kvflash_publish_cleared(ranks[0]) == KVFLASH_OK);
    say_stats(ranks[0]);
    wait_for_word();
    CHECK(kvflash_publisher_destroy(ranks[0]) == KVFLASH_OK);
    CHECK(kvflash_publisher_destroy(ranks[1]) == KVFLASH_OK);
    return faults;
}

static int older(void) {
    uint32_t tokens[] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    size_t sizes[] = {4, 4, 1};
    uint64_t names[] = {11, 12, 13}, parent = 11;
    FAILS(kvflash_kv_event_publish_stored(0, tokens, sizes, names, 1, NULL, 0), KVFLASH_ERR,
          "kvflash_llm_init was not called");
    FAILS(kvflash_llm_shutdown(), KVFLASH_ERR, "kvflash_llm_init was not called");
    FAILS(kvflash_llm_init("tests", NULL, 9, 0), KVFLASH_ERR, "kv_block_size must be at least 1");
    FAILS(kvflash_llm_init("tests", NULL, -9, 4), KVFLASH_ERR, "worker_id must be at least 0");
    CHECK(kvflash_llm_init("tests", NULL, 9, BLOCK_SIZE) == KVFLASH_OK);
    FAILS(kvflash_llm_init("tests", NULL, 9, BLOCK_SIZE), KVFLASH_ERR, "was called before");
    CHECK(kvflash_kv_event_publish_stored(0, tokens, sizes, names, 1, NULL, 0) == KVFLASH_OK);
    CHECK(kvflash_kv_event_publish_stored(1, tokens + 4, sizes + 1, names + 1, 2, &parent, 0) ==
          KVFLASH_OK);
    /* As a fork's exit handler would: the stream is still this process's, and announced. */
    pid_t child = fork();
    if (child == 0) _exit(kvflash_llm_shutdown() == KVFLASH_ERR ? 0 : 1);
    int status = 1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    puts("published");
    fflush(stdout);
    wait_for_word();
    CHECK(kvflash_kv_event_publish_removed(2, names + 1, 1) == KVFLASH_OK);
    puts("removed");
    fflush(stdout);
    wait_for_word();
    CHECK(kvflash_kv_event_publish_cleared(3) == KVFLASH_OK);
    puts("cleared");
    fflush(stdout);
    wait_for_word();
    CHECK(kvflash_llm_shutdown() == KVFLASH_OK);
    FAILS(kvflash_kv_event_publish_cleared(4), KVFLASH_ERR, "kvflash_llm_init was not called");
    return faults;
}

/* Creates and destroys, while others publish to numbers that may be gone. */
static void *churn(void *argument) {
    kvflash_publisher *shared = argument;
    for (int turn = 0; turn < 5; turn++) {
        kvflash_publisher own = create(0, 0, 0);
        uint64_t name = 1;
        CHECK(store(own, &name, 1, 1, NULL, NULL, NULL) == KVFLASH_OK);
        int code = store(*shared, &name, 1, 1, NULL, NULL, NULL);
        CHECK(code == KVFLASH_OK || code == KVFLASH_NO_PUBLISHER);
        CHECK(kvflash_publisher_destroy(own) == KVFLASH_OK);
        FAILS(kvflash_publisher_destroy(own), KVFLASH_NO_PUBLISHER, "was destroyed");
        code = turn == 3 ? kvflash_publisher_destroy(*shared) : KVFLASH_OK;
        CHECK(code == KVFLASH_OK || code == KVFLASH_NO_PUBLISHER);
    }
    return NULL;
}

static void destroyed_at_once(void) {
    kvflash_publisher shared = create(0, 0, 0);
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, churn, &shared);
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    FAILS(kvflash_publish_cleared(shared), KVFLASH_NO_PUBLISHER, "was destroyed");
}

static void refused_options(void) {
    kvflash_publisher_options options = KVFLASH_PUBLISHER_OPTIONS_INIT;
    kvflash_publisher publisher = 77;
    FAILS(kvflash_publisher_create(NULL, &publisher), KVFLASH_INVALID_ARGUMENT, "options is NULL");
    FAILS(kvflash_publisher_create(&options, NULL), KVFLASH_INVALID_ARGUMENT, "publisher is NULL");
    FAILS(kvflash_publisher_create(&options, &publisher), KVFLASH_INVALID_ARGUMENT,
          "kv_block_size must be at least 1, got 0");
    options.kv_block_size = BLOCK_SIZE;
    options.struct_size = 8;
    FAILS(kvflash_publisher_create(&options, &publisher), KVFLASH_INVALID_ARGUMENT,
          "options->struct_size must be at least");
    options.struct_size = sizeof options;
    options.tick_us = 1000001;
    FAILS(kvflash_publisher_create(&options, &publisher), KVFLASH_INVALID_ARGUMENT,
          "tick_us must be in 0..=1000000, got 1000001");
    options.tick_us = 0;
    options.ring_bytes = 1;
    FAILS(kvflash_publisher_create(&options, &publisher), KVFLASH_INVALID_ARGUMENT,
          "ring_bytes must be in 1048576..=");
    options.ring_bytes = 0;
    options.host = "192.0.2.1";
    FAILS(kvflash_publisher_create(&options, &publisher), KVFLASH_IO,
          "host: can't bind 0 on 192.0.2.1");
    options.host = "no-such-interface";
    FAILS(kvflash_publisher_create(&options, &publisher), KVFLASH_IO,
          "host: can't bind 0 on no-such-interface");
    options.host = "\xff";
    FAILS(kvflash_publisher_create(&options, &publisher), KVFLASH_INVALID_ARGUMENT,
          "host is not UTF-8");
    options.host = NULL;
    options.component = "backend";
    FAILS(kvflash_publisher_create(&options, &publisher), KVFLASH_INVALID_ARGUMENT,
          "component is given and namespace is NULL");
    options.namespace_ = "a/b";
    FAILS(kvflash_publisher_create(&options, &publisher), KVFLASH_INVALID_ARGUMENT,
          "namespace must have 1 to 48 of the characters A-Z a-z 0-9 _ -, got \"a/b\"");
    options.namespace_ = "tests";
    options.component = "my.workers";
    FAILS(kvflash_publisher_create(&options, &publisher), KVFLASH_INVALID_ARGUMENT,
          "component must have 1 to 48 of the characters");
    CHECK(publisher == 77);
}

static void refused_calls(void) {
    kvflash_publisher publisher = create(0, 0, 0);
    uint32_t tokens[] = {1, 2, 3, 4, 5, 6, 7};
    size_t sizes[] = {4, 3};
    uint64_t names[] = {1, 2};
    char text[128];
    kvflash_publisher_stats stats = {.struct_size = sizeof stats};
    kvflash_stored stored = KVFLASH_STORED_INIT;
    FAILS(kvflash_publish_stored(publisher, NULL), KVFLASH_INVALID_ARGUMENT, "stored is NULL");
    stored.block_count = 1;
    FAILS(kvflash_publish_stored(publisher, &stored), KVFLASH_INVALID_ARGUMENT,
          "block_hashes is NULL");
    stored.block_hashes = (const uint64_t *)((const char *)names + 1);
    FAILS(kvflash_publish_stored(publisher, &stored), KVFLASH_INVALID_ARGUMENT,
          "block_hashes is not aligned to 8 bytes");
    stored.block_hashes = names;
    FAILS(kvflash_publish_stored(publisher, &stored), KVFLASH_INVALID_ARGUMENT,
          "num_block_tokens adds up to 4 tokens, token_ids has 0");
    stored.token_count = 4;
    FAILS(kvflash_publish_stored(publisher, &stored), KVFLASH_INVALID_ARGUMENT, "token_ids is NULL");
    stored.token_ids = tokens;
    stored.block_count = SIZE_MAX;
    FAILS(kvflash_publish_stored(publisher, &stored), KVFLASH_INVALID_ARGUMENT,
          "block_count must be at most");
    stored.block_count = 1;
    stored.lora_id = UINT64_MAX;
    FAILS(kvflash_publish_stored(publisher, &stored), KVFLASH_INVALID_ARGUMENT,
          "lora_id must be at most");
    stored.lora_id = 0;
    stored.cache_salt = "\xc3(";
    FAILS(kvflash_publish_stored(publisher, &stored), KVFLASH_INVALID_ARGUMENT,
          "cache_salt is not UTF-8");
    char *salt = calloc(70001, 1);
    memset(salt, 'x', 70000);
    stored.cache_salt = salt;
    FAILS(kvflash_publish_stored(publisher, &stored), KVFLASH_INVALID_ARGUMENT,
          "cache_salt may have 65536 bytes, got 70000");
    free(salt);
    stored.cache_salt = NULL;
    stored.num_block_tokens = sizes;
    stored.block_count = 2;
    stored.token_count = 7;
    FAILS(kvflash_publish_stored(publisher, &stored), KVFLASH_PARTIAL,
          "num_block_tokens[1] is 3 and kv_block_size 4: dropped 1 blocks");
    FAILS(kvflash_publish_removed(publisher, NULL, 1, NULL), KVFLASH_INVALID_ARGUMENT,
          "block_hashes is NULL");
    CHECK(kvflash_publish_removed(publisher, NULL, 0, NULL) == KVFLASH_OK);
    FAILS(kvflash_publisher_endpoint(publisher, text, 3), KVFLASH_INVALID_ARGUMENT,
          "size must be at least");
    FAILS(kvflash_publisher_endpoint(publisher, NULL, 3), KVFLASH_INVALID_ARGUMENT,
          "buffer is NULL");
    FAILS(kvflash_publisher_get_stats(publisher, NULL), KVFLASH_INVALID_ARGUMENT, "stats is NULL");
    CHECK(kvflash_publisher_flush(publisher, 10000) == KVFLASH_OK);
    CHECK(kvflash_publisher_get_stats(publisher, &stats) == KVFLASH_OK);
    CHECK(stats.stored_blocks_total == 1 && stats.dropped_blocks_total == 1);
    CHECK(stats.events_total == 1 && stats.batches_total == 1);
    FAILS(kvflash_publish_cleared(0), KVFLASH_NO_PUBLISHER, "publisher 0 was never created");
    FAILS(kvflash_publish_cleared(1 << 30), KVFLASH_NO_PUBLISHER, "was never created");
    CHECK(kvflash_publisher_destroy(publisher) == KVFLASH_OK);
    FAILS(kvflash_publish_stored(publisher, &stored), KVFLASH_NO_PUBLISHER, "was destroyed");
    FAILS(kvflash_publisher_flush(publisher, 0), KVFLASH_NO_PUBLISHER, "was destroyed");
    FAILS(kvflash_publisher_destroy(publisher), KVFLASH_NO_PUBLISHER, "was destroyed");
}

static void *other_thread(void *argument) {
    (void)argument;
    CHECK(strcmp(kvflash_last_error(), "") == 0);
    return NULL;
}

static void errors_are_of_a_thread(void) {
    pthread_t thread;
    FAILS(kvflash_publish_cleared(0), KVFLASH_NO_PUBLISHER, "never created");
    pthread_create(&thread, NULL, other_thread, NULL);
    pthread_join(thread, NULL);
}

static void a_fork_is_told(void) {
    kvflash_publisher publisher = create(0, 0, 0);
    pid_t child = fork();
    if (child == 0) {
        int code = kvflash_publish_cleared(publisher);
        int is_told = code == KVFLASH_NO_PUBLISHER && strstr(kvflash_last_error(), "not to a fork");
        is_told = is_told && kvflash_publisher_flush(publisher, 10) == KVFLASH_NO_PUBLISHER;
        _exit(is_told && kvflash_publisher_destroy(publisher) == KVFLASH_NO_PUBLISHER ? 0 : 1);
    }
    int status = 1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(kvflash_publisher_destroy(publisher) == KVFLASH_OK);
}

int main(int count, char **arguments) {
    if (count == 4 && strcmp(arguments[1], "engine") == 0)
        return engine((uint16_t)atoi(arguments[2]), (uint16_t)atoi(arguments[3]));
    if (count == 2 && strcmp(arguments[1], "older") == 0) return older();
    if (count == 2 && strcmp(arguments[1], "misuse") == 0) {
        errors_are_of_a_thread();
        refused_options();
        refused_calls();
        destroyed_at_once();
        a_fork_is_told();
        puts("refused what it must");
        return faults;
    }
    return 2;
}
