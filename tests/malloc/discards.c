/* Threads that free large blocks side by side: of freed memory more than is kept is given back each time, and
 * what one thread gave back is the next block of another. Each page of a block is looked at just before it
 * is freed: what was said to be forgotten already must not become zeros later. */
#include "check.h"
#include <pthread.h>

#define THREADS 4
#define HELD 8

static uint64_t next(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

struct block {
    uint64_t *words;
    size_t bytes;
    uint64_t seed;
};

static void make(struct block *block, uint64_t *random) {
    block->bytes = (2 + next(random) % 7) << 20;
    block->seed = next(random);
    block->words = need(block->bytes);
    for (size_t at = 0; at < block->bytes / 8; at += 512)
        block->words[at] = pattern(block->seed, at);
}

static void look(const struct block *block) {
    for (size_t at = 0; at < block->bytes / 8; at += 512)
        if (block->words[at] != pattern(block->seed, at))
            FAIL("page %zu of a live block of %zu bytes at %p: found %016" PRIx64, at / 512,
                 block->bytes, (void *)block->words, block->words[at]);
}

static void *churn(void *argument) {
    uint64_t random = (uintptr_t)argument;
    size_t laps = setting("LAPS", "1000");
    struct block held[HELD];
    for (size_t lap = 0; lap < laps; lap++) {
        for (size_t i = 0; i < HELD; i++)
            make(&held[i], &random);
        for (size_t i = 0; i < HELD; i++) {
            look(&held[i]);
            free(held[i].words);
        }
    }
    return NULL;
}

int main(void) {
    pthread_t threads[THREADS];
    for (size_t i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, churn, (void *)(i + 1)) == 0);
    for (size_t i = 0; i < THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    printf("ok discards\n");
    return 0;
}
