/* The helper is stopped again and again, so that what it was ordered to do comes late, while addresses
 * change hands: regions end and other memory is mapped in their place, ranges are dropped and filled
 * anew, blocks are freed and allocated again. A late move would take the bytes of the next owner. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <tiermgr.h>
#include <time.h>
#include <unistd.h>

#define FAIL(...)                                                                                  \
    do {                                                                                           \
        fprintf(stderr, "FAILED line %d: ", __LINE__);                                             \
        fprintf(stderr, __VA_ARGS__);                                                              \
        fputc('\n', stderr);                                                                       \
        kill(helper, SIGCONT);                                                                     \
        _exit(1);                                                                                  \
    } while (0)

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition))                                                                          \
            FAIL("%s (%s)", #condition, strerror(errno));                                          \
    } while (0)

#define OK(call)                                                                                   \
    do {                                                                                           \
        tiermgr_status got = (call);                                                               \
        if (got != TIERMGR_OK)                                                                     \
            FAIL("%s: %s: %s", #call, tiermgr_status_name(got), tiermgr_last_error());             \
    } while (0)

enum { LIVE = 16 };
#define PIECE ((size_t)64 << 10)

static pid_t helper;
static atomic_bool done;
static atomic_uint stops;
static tiermgr_client *client;

static uint64_t chance(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

static void fill(uint64_t *words, size_t bytes, uint64_t seed) {
    for (size_t i = 0; i < bytes / 8; i++)
        words[i] = (i + 1) * 0x9e3779b97f4a7c15u + seed;
}

static void verify(const volatile uint64_t *words, size_t bytes, uint64_t seed, const char *what) {
    for (size_t i = 0; i < bytes / 8; i++) {
        uint64_t found = words[i];
        if (found != (i + 1) * 0x9e3779b97f4a7c15u + seed)
            FAIL("%s: word %zu of %p is %016llx, wanted %016llx", what, i, (const void *)words,
                 (unsigned long long)found,
                 (unsigned long long)((i + 1) * 0x9e3779b97f4a7c15u + seed));
    }
}

static pid_t find_helper(void) {
    char path[64], name[32];
    snprintf(path, sizeof path, "/proc/self/task/%d/children", (int)getpid());
    FILE *children = fopen(path, "r");
    int pid, found = 0;
    CHECK(children);
    while (!found && fscanf(children, "%d", &pid) == 1) {
        snprintf(path, sizeof path, "/proc/%d/comm", pid);
        FILE *comm = fopen(path, "r");
        if (comm && fgets(name, sizeof name, comm) && strcmp(name, "tiermgr-helper\n") == 0)
            found = pid;
        if (comm)
            fclose(comm);
    }
    fclose(children);
    if (!found)
        FAIL("this process has no helper");
    return found;
}

static void *delay(void *unused) {
    uint64_t state = 1;
    while (!atomic_load(&done)) {
        CHECK(kill(helper, SIGSTOP) == 0);
        usleep(1000 + chance(&state) % 20000);
        CHECK(kill(helper, SIGCONT) == 0);
        usleep(1000 + chance(&state) % 8000);
        atomic_fetch_add(&stops, 1);
    }
    return unused;
}

int main(void) {
    const char *size = getenv("SIZE"), *limit = getenv("SECONDS");
    size_t bytes = size ? strtoull(size, NULL, 10) : (size_t)256 << 20;
    size_t each = bytes / 64, base_bytes = bytes * 3 / 4;
    time_t end = time(NULL) + (limit ? atol(limit) : 6);
    struct live {
        tiermgr_region *region;
        void *foreign, *block;
        uint64_t seed, foreign_seed, block_seed;
    } live[LIVE] = {0};
    uint64_t state = 7, round = 0, reused = 0;
    pthread_t delayer;
    tiermgr_region *base;

    OK(tiermgr_connect(NULL, &client));
    helper = find_helper();
    OK(tiermgr_region_create(client, base_bytes, NULL, &base));
    char *words = tiermgr_region_address(base);
    uint64_t *seeds = calloc(base_bytes / PIECE, sizeof *seeds);
    CHECK(seeds);
    for (size_t i = 0; i < base_bytes / PIECE; i++)
        fill((uint64_t *)(words + i * PIECE), PIECE, i);
    for (size_t i = 0; i < base_bytes / PIECE; i++)
        seeds[i] = i;
    CHECK(pthread_create(&delayer, NULL, delay, NULL) == 0);

    for (; time(NULL) < end || round < 2 * LIVE; round++) {
        struct live *at = &live[round % LIVE];
        if (at->foreign) {
            verify(at->foreign, each, at->foreign_seed, "memory mapped where a region was");
            CHECK(munmap(at->foreign, each) == 0);
            at->foreign = NULL;
        }
        if (at->region) {
            void *address = tiermgr_region_address(at->region);
            verify(address, each, at->seed, "a region before its end");
            OK(tiermgr_region_destroy(at->region));
            void *map = mmap(address, each, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
            if (map != MAP_FAILED) {
                at->foreign = map;
                at->foreign_seed = round * 3 + 1;
                fill(map, each, at->foreign_seed);
                reused++;
            }
        }
        OK(tiermgr_region_create(client, each, NULL, &at->region));
        at->seed = round * 3;
        fill(tiermgr_region_address(at->region), each, at->seed);

        if (at->block) {
            verify(at->block, each / 4, at->block_seed, "a block before it is freed");
            OK(tiermgr_free(client, at->block));
        }
        OK(tiermgr_alloc(client, each / 4, 0, &at->block));
        at->block_seed = round * 3 + 2;
        fill(at->block, each / 4, at->block_seed);

        for (int i = 0; i < 16; i++) {
            size_t piece = chance(&state) % (base_bytes / PIECE);
            char *place = words + piece * PIECE;
            verify((uint64_t *)place, PIECE, seeds[piece], "a piece");
            if (i % 4 != 0)
                continue;
            OK(tiermgr_advise(client, place, PIECE, TIERMGR_ADVICE_DONTNEED));
            seeds[piece] = round * 100 + 50;
            fill((uint64_t *)place, PIECE, seeds[piece]);
        }
    }
    atomic_store(&done, true);
    CHECK(pthread_join(delayer, NULL) == 0);
    for (size_t i = 0; i < LIVE; i++) {
        if (live[i].foreign)
            verify(live[i].foreign, each, live[i].foreign_seed, "mapped memory, at the end");
        verify(tiermgr_region_address(live[i].region), each, live[i].seed, "a region, at the end");
        verify(live[i].block, each / 4, live[i].block_seed, "a block, at the end");
    }
    for (size_t i = 0; i < base_bytes / PIECE; i++)
        verify((uint64_t *)(words + i * PIECE), PIECE, seeds[i], "a piece, at the end");
    OK(tiermgr_disconnect(client));
    if (reused < LIVE || atomic_load(&stops) < 10)
        FAIL("only %llu addresses changed hands and %u stops", (unsigned long long)reused,
             atomic_load(&stops));
    printf("ok delayed_helper: %llu rounds, %llu addresses changed hands, %u stops\n",
           (unsigned long long)round, (unsigned long long)reused, atomic_load(&stops));
    return 0;
}
