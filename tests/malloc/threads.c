/* THREADS threads share a working set of SIZE bytes: all is written, read in order, read at random,
 * rewritten in part, and read again. */
#include "check.h"
#include <pthread.h>

#define BLOCK ((size_t)4 << 20)

static size_t blocks_each;
/* All is written before anything is read: the whole working set is there at once. */
static pthread_barrier_t written;

static void *work(void *argument) {
    uint64_t thread = (uint64_t)(uintptr_t)argument;
    unsigned char **blocks = need(blocks_each * sizeof *blocks);
    uint64_t *seeds = need(blocks_each * sizeof *seeds);
    for (size_t i = 0; i < blocks_each; i++) {
        blocks[i] = need(BLOCK);
        seeds[i] = thread << 32 | i;
        fill(blocks[i], BLOCK, seeds[i]);
    }
    pthread_barrier_wait(&written);
    for (size_t i = 0; i < blocks_each; i++)
        verify(blocks[i], BLOCK, seeds[i], "reading in order");
    pthread_barrier_wait(&written);

    uint64_t chance = thread + 1;
    for (int i = 0; i < 4000; i++) {
        chance = chance * 6364136223846793005u + 1442695040888963407u;
        size_t block = (chance >> 33) % blocks_each;
        size_t page = (chance >> 20) % (BLOCK / 4096);
        verify_part(blocks[block], page * 4096, 4096, seeds[block], "reading at random");
    }
    for (size_t i = 0; i < blocks_each; i += 3) {
        seeds[i] ^= 0x5555;
        fill(blocks[i], BLOCK, seeds[i]);
    }
    for (size_t i = blocks_each; i-- > 0;)
        verify(blocks[i], BLOCK, seeds[i], "reading backwards after rewriting");
    /* New blocks in the place of old ones: freed memory must not shine through calloc. */
    for (size_t i = 1; i < blocks_each; i += 4) {
        free(blocks[i]);
        blocks[i] = calloc(1, BLOCK);
        CHECK(blocks[i]);
        verify_zero(blocks[i], BLOCK, "calloc");
        fill(blocks[i], BLOCK, seeds[i]);
    }
    for (size_t i = 0; i < blocks_each; i++) {
        verify(blocks[i], BLOCK, seeds[i], "at the end");
        free(blocks[i]);
    }
    free(blocks);
    free(seeds);
    return NULL;
}

int main(void) {
    size_t threads = setting("THREADS", "1");
    pthread_t handles[64];
    CHECK(threads >= 1 && threads <= 64);
    blocks_each = working_set() / BLOCK / threads;
    CHECK(blocks_each >= 1);
    CHECK(pthread_barrier_init(&written, NULL, (unsigned)threads) == 0);
    for (size_t i = 0; i < threads; i++)
        CHECK(pthread_create(&handles[i], NULL, work, (void *)(uintptr_t)i) == 0);
    for (size_t i = 0; i < threads; i++)
        CHECK(pthread_join(handles[i], NULL) == 0);
    printf("ok threads: %zu threads, %zu bytes each\n", threads, blocks_each * BLOCK);
    return 0;
}
