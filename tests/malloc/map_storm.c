/* Threads map, unmap in parts, discard, move and map again, each its own memory, while others read what nobody
 * changes and allocate blocks; all of it together is the working set. Every byte of each is looked at. With
 * FORKS that many children do the same on their own meanwhile. */
#include "check.h"
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>

enum { THREADS = 4, OWN = 4 };
#define PAGE ((size_t)4096)
#define PRIVATE (MAP_PRIVATE | MAP_ANONYMOUS)
#define ACCESS (PROT_READ | PROT_WRITE)

static unsigned char *kept;
static size_t share;
static atomic_bool done;
static atomic_ullong rounds;

static unsigned char *map(size_t bytes) {
    unsigned char *at = mmap(NULL, bytes, ACCESS, PRIVATE, -1, 0);
    if (at == MAP_FAILED)
        FAIL("mmap of %zu bytes: %s", bytes, strerror(errno));
    return at;
}

/* One round over one mapping; gives what is there afterwards. */
static unsigned char *change(unsigned char *at, size_t bytes, uint64_t seed) {
    size_t middle = bytes / 2 & ~(PAGE - 1), part = bytes / 4 & ~(PAGE - 1);
    verify(at, bytes, seed - 1, "a mapping");
    switch (seed % 6) {
    case 0:
        CHECK(madvise(at + PAGE, middle, MADV_DONTNEED) == 0);
        verify_zero(at + PAGE, middle, "discarded");
        verify_part(at, middle + PAGE, bytes - middle - PAGE, seed - 1, "beside what was discarded");
        break;
    case 1:
        /* A hole, and the same place again. */
        CHECK(munmap(at + part, middle) == 0);
        verify_part(at, part + middle, bytes - part - middle, seed - 1, "behind a hole");
        if (mmap(at + part, middle, ACCESS, PRIVATE | MAP_FIXED_NOREPLACE, -1, 0) != at + part) {
            /* Another thread has got it. */
            CHECK(errno == EEXIST);
            CHECK(munmap(at, part) == 0);
            CHECK(munmap(at + part + middle, bytes - part - middle) == 0);
            at = map(bytes);
            break;
        }
        verify_zero(at + part, middle, "mapped in a hole");
        break;
    case 2: {
        unsigned char *to = mremap(at, bytes, bytes + part, MREMAP_MAYMOVE);
        CHECK(to != MAP_FAILED);
        verify(to, bytes, seed - 1, "grown");
        verify_zero(to + bytes, part, "grown");
        CHECK(mremap(to, bytes + part, bytes, 0) == to);
        at = to;
        break;
    }
    case 3:
        CHECK(mmap(at, bytes, ACCESS, PRIVATE | MAP_FIXED, -1, 0) == at);
        verify_zero(at, bytes, "mapped over");
        break;
    case 4: {
        unsigned char *to = mremap(at, bytes, bytes, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, NULL);
        CHECK(to != MAP_FAILED && to != at);
        verify(to, bytes, seed - 1, "moved");
        verify_zero(at, bytes, "moved away");
        CHECK(munmap(at, bytes) == 0);
        at = to;
        break;
    }
    default:
        CHECK(munmap(at, bytes) == 0);
        at = map(bytes);
        verify_zero(at, bytes, "new");
    }
    fill(at, bytes, seed);
    return at;
}

static void *storm(void *argument) {
    uint64_t number = (uint64_t)(uintptr_t)argument, seeds[OWN];
    unsigned char *own[OWN];
    size_t bytes[OWN];
    for (size_t i = 0; i < OWN; i++) {
        bytes[i] = share / OWN / (i % 2 + 1) & ~(PAGE - 1);
        own[i] = map(bytes[i]);
        seeds[i] = number * 1000003 + i;
        fill(own[i], bytes[i], seeds[i]);
    }
    for (uint64_t round = number; !atomic_load(&done); round++) {
        size_t i = round % OWN;
        seeds[i]++;
        own[i] = change(own[i], bytes[i], seeds[i]);
        unsigned char *block = need(200 << 10);
        fill(block, 200 << 10, round);
        verify(block, 200 << 10, round, "a block in the storm");
        free(block);
        atomic_fetch_add(&rounds, 1);
    }
    for (size_t i = 0; i < OWN; i++) {
        verify(own[i], bytes[i], seeds[i], "at the end");
        CHECK(munmap(own[i], bytes[i]) == 0);
    }
    return NULL;
}

static void child(size_t bytes) {
    unsigned char *at = map(bytes);
    fill(at, bytes, 77);
    for (uint64_t seed = 78; seed < 84; seed++)
        at = change(at, bytes, seed);
    verify(kept, working_set() / 2, 5, "in a child");
    CHECK(munmap(kept, working_set() / 2) == 0);
    CHECK(munmap(at, bytes) == 0 && !can_read(kept) && !can_read(at));
    _exit(0);
}

int main(void) {
    size_t seconds = setting("SECONDS", "5"), forks = setting("FORKS", "0");
    pthread_t threads[THREADS];
    share = working_set() / 2 / THREADS;
    kept = map(working_set() / 2);
    CHECK(!getenv("EXPECT_MANAGED") || is_managed(kept));
    fill(kept, working_set() / 2, 5);
    for (uintptr_t i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, storm, (void *)i) == 0);
    uint64_t end = now_ns() + seconds * 1000000000u;
    for (size_t i = 0; i < forks; i++) {
        int status;
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0)
            child(share / OWN & ~(PAGE - 1));
        CHECK(waitpid(pid, &status, 0) == pid);
        if (status != 0)
            FAIL("a child ended with status %x", (unsigned)status);
    }
    while (now_ns() < end || atomic_load(&rounds) < 6 * OWN * THREADS) {
        verify(kept, working_set() / 2, 5, "beside the storm");
        usleep(10000);
    }
    atomic_store(&done, true);
    for (size_t i = 0; i < THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    verify(kept, working_set() / 2, 5, "after the storm");
    CHECK(munmap(kept, working_set() / 2) == 0);
    printf("ok map_storm: %llu rounds, %zu children\n", atomic_load(&rounds), forks);
    return 0;
}
