/* Dynamo's C names for libkvflash: `dynamo_llm_*` and `dynamo_kv_event_*`.
 *
 * An engine that was written against Dynamo's bindings includes this header instead of theirs and
 * links libkvflash. The calls are those of "One publisher for the process" in kvflash.h, with its
 * environment variables and results: 0 is success, 1 a failure that kvflash_last_error() explains.
 *
 * These are names for the compiler only: the library does not export them, so that a process may
 * load it beside Dynamo's.
 */
#ifndef KVFLASH_DYNAMO_H
#define KVFLASH_DYNAMO_H

#include "kvflash.h"

/* Dynamo's result type, with the same values. */
typedef int dynamo_llm_result_t;

#define dynamo_llm_init kvflash_llm_init
#define dynamo_llm_shutdown kvflash_llm_shutdown
#define dynamo_kv_event_publish_stored kvflash_kv_event_publish_stored
#define dynamo_kv_event_publish_removed kvflash_kv_event_publish_removed
#define dynamo_kv_event_publish_cleared kvflash_kv_event_publish_cleared

/* Does nothing and succeeds, as in Dynamo. */
static inline dynamo_llm_result_t dynamo_llm_load_publisher_create(void)
{
    return 0;
}

#endif /* KVFLASH_DYNAMO_H */
