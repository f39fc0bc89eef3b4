/* Threads discard, unmap and map anew parts of their own while others read and write, all under pressure:
 * nobody finds bytes that were discarded, and nobody loses any. */
#include "check.h"
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>

enum { DISCARDING = 4, READING = 2 };

static unsigned char *shared_block;
static size_t slice;
static atomic_bool done;
static atomic_ullong discards;

static void *discard(void *argument) {
    uint64_t number = (uint64_t)(uintptr_t)argument;
    unsigned char *own = need(slice), *from = own + 4096 * (number + 1);
    size_t bytes = slice - 4096 * 9;
    for (uint64_t round = 0; !atomic_load(&done); round++) {
        fill(own, slice, number + round);
        verify(own, slice, number + round, "before the discard");
        switch (round % 3) {
        case 0: CHECK(madvise(from, bytes, MADV_DONTNEED) == 0); break;
        case 1:
            CHECK(mmap(from, bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == from);
            break;
        default:
            CHECK(munmap(from, bytes) == 0);
            free(own);
            own = need(slice);
            from = own + 4096 * (number + 1);
            fill(own, slice, number);
            CHECK(madvise(from, bytes, MADV_DONTNEED) == 0);
        }
        verify_zero(from, bytes, "after the discard");
        atomic_fetch_add(&discards, 1);
    }
    free(own);
    return NULL;
}

static void *look(void *argument) {
    uint64_t chance = (uint64_t)(uintptr_t)argument + 1;
    size_t words = working_set() / 2 / 8;
    while (!atomic_load(&done)) {
        chance = chance * 6364136223846793005u + 1442695040888963407u;
        size_t word = (chance >> 20) % words;
        uint64_t found = ((volatile uint64_t *)shared_block)[word];
        if (found != pattern(5, word))
            FAIL("word %zu: found %016" PRIx64 ", wanted %016" PRIx64, word, found,
                 pattern(5, word));
    }
    return NULL;
}

int main(void) {
    size_t seconds = setting("SECONDS", "5");
    pthread_t threads[DISCARDING + READING];
    slice = working_set() / 2 / DISCARDING & ~(size_t)4095;
    shared_block = need(working_set() / 2);
    fill(shared_block, working_set() / 2, 5);
    for (uintptr_t i = 0; i < DISCARDING + READING; i++)
        CHECK(pthread_create(&threads[i], NULL, i < DISCARDING ? discard : look, (void *)i) == 0);
    uint64_t end = now_ns() + seconds * 1000000000u;
    while (now_ns() < end || atomic_load(&discards) < 4 * DISCARDING)
        usleep(10000);
    atomic_store(&done, true);
    for (size_t i = 0; i < DISCARDING + READING; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    verify(shared_block, working_set() / 2, 5, "beside the discards");
    free(shared_block);
    printf("ok vm_threads: %llu discards\n", atomic_load(&discards));
    return 0;
}
