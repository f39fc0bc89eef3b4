/* Threads end while others fault, and leave their blocks to them. */
#include "check.h"
#include <pthread.h>
#include <stdatomic.h>

#define BLOCK ((size_t)1 << 20)
#define SLOTS 16

static unsigned char *shared;
static size_t shared_bytes;
static atomic_bool done;
static _Atomic(void *) left[SLOTS];

static void *scan(void *argument) {
    size_t from = (size_t)(uintptr_t)argument;
    while (!atomic_load(&done))
        for (size_t page = from; page < shared_bytes / 4096 && !atomic_load(&done); page += 37)
            verify_part(shared, page * 4096, 4096, 1, "the scanning thread");
    return NULL;
}

static void *brief(void *argument) {
    uint64_t number = (uint64_t)(uintptr_t)argument;
    unsigned char *block = need(BLOCK);
    fill(block, BLOCK, number % SLOTS + 50);
    verify_part(shared, number * 7919 % (shared_bytes / 4096) * 4096, 4096, 1, "a brief thread");
    void *before = atomic_exchange(&left[number % SLOTS], block);
    if (before) {
        verify(before, BLOCK, number % SLOTS + 50, "a block of a thread that has ended");
        free(before);
    }
    return NULL;
}

int main(void) {
    shared_bytes = working_set() - SLOTS * BLOCK;
    shared = need(shared_bytes);
    fill(shared, shared_bytes, 1);
    pthread_t scanners[2];
    for (size_t i = 0; i < 2; i++)
        CHECK(pthread_create(&scanners[i], NULL, scan, (void *)(uintptr_t)(i * 17)) == 0);
    size_t threads = setting("THREADS", "400");
    for (size_t i = 0; i < threads; i += 4) {
        pthread_t handles[4];
        for (size_t k = 0; k < 4; k++)
            CHECK(pthread_create(&handles[k], NULL, brief, (void *)(uintptr_t)(i + k)) == 0);
        for (size_t k = 0; k < 4; k++)
            CHECK(pthread_join(handles[k], NULL) == 0);
    }
    atomic_store(&done, true);
    for (size_t i = 0; i < 2; i++)
        CHECK(pthread_join(scanners[i], NULL) == 0);
    for (size_t i = 0; i < SLOTS; i++) {
        if (left[i])
            verify(left[i], BLOCK, i + 50, "at the end");
        free(left[i]);
    }
    printf("ok thread_exit: %zu threads ended\n", threads);
    return 0;
}
