/* THREADS threads map, advise and unmap memory of their own and allocate and free managed blocks as
 * fast as they can; beside them one thread reads its working set at random and measures. No access
 * may take longer than LATENCY_MS_MAX. */
#include "check.h"
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>

static atomic_bool done;
static atomic_ullong rounds;

static void *storm(void *argument) {
    uint64_t number = (uint64_t)(uintptr_t)argument;
    size_t bytes = 512 << 10;
    for (uint64_t round = 0; !atomic_load(&done); round++) {
        unsigned char *map =
            mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(map != MAP_FAILED);
        fill(map, 64 << 10, number);
        CHECK(madvise(map, bytes, MADV_DONTNEED) == 0);
        verify_zero(map, 64 << 10, "after MADV_DONTNEED");
        CHECK(munmap(map, bytes) == 0);
        unsigned char *block = need(bytes);
        fill(block, 64 << 10, round);
        verify(block, 64 << 10, round, "a block in the storm");
        free(block);
        atomic_fetch_add(&rounds, 1);
    }
    return NULL;
}

static int by_time(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

int main(void) {
    enum { SAMPLES = 20000, ACCESSES_MIN = 2000 };
    static uint64_t times[SAMPLES];
    size_t bytes = working_set(), threads = setting("THREADS", "16");
    size_t seconds = setting("SECONDS", "5"), worst = setting("LATENCY_MS_MAX", "2000");
    pthread_t handles[64];
    CHECK(threads <= 64);
    unsigned char *block = need(bytes);
    fill(block, bytes, 1);
    for (size_t i = 0; i < threads; i++)
        CHECK(pthread_create(&handles[i], NULL, storm, (void *)(uintptr_t)i) == 0);
    uint64_t chance = 1, end = now_ns() + seconds * 1000000000u;
    size_t samples = 0;
    uint64_t longest = 0;
    /* However little of the processor the storm leaves: fewer would show nothing. */
    while (now_ns() < end || samples < ACCESSES_MIN) {
        chance = chance * 6364136223846793005u + 1442695040888963407u;
        size_t word = (chance >> 20) % (bytes / 8);
        uint64_t before = now_ns();
        uint64_t found = ((volatile uint64_t *)block)[word];
        uint64_t took = now_ns() - before;
        longest = took > longest ? took : longest;
        times[samples++ % SAMPLES] = took;
        if (found != pattern(1, word))
            FAIL("word %zu: found %016" PRIx64 ", wanted %016" PRIx64, word, found,
                 pattern(1, word));
    }
    atomic_store(&done, true);
    for (size_t i = 0; i < threads; i++)
        CHECK(pthread_join(handles[i], NULL) == 0);
    size_t kept = samples < SAMPLES ? samples : SAMPLES;
    qsort(times, kept, sizeof *times, by_time);
    if (longest > worst * 1000000)
        FAIL("an access took %" PRIu64 " ms", longest / 1000000);
    printf("ok storm: %zu threads, %llu rounds; %zu accesses, p50 %" PRIu64 " us, p99 %" PRIu64
           " us, longest %" PRIu64 " us\n",
           threads, atomic_load(&rounds), samples, times[kept / 2] / 1000,
           times[kept * 99 / 100] / 1000, longest / 1000);
    return 0;
}
