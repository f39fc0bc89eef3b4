/* Every function of tiermgr.h, from C11, against a running daemon that may use half of SIZE. */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <tiermgr.h>
#include <unistd.h>

#define FAIL(...)                                                                                  \
    do {                                                                                           \
        fprintf(stderr, "FAILED line %d: ", __LINE__);                                             \
        fprintf(stderr, __VA_ARGS__);                                                              \
        fputc('\n', stderr);                                                                       \
        _exit(1);                                                                                  \
    } while (0)

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition))                                                                          \
            FAIL("%s", #condition);                                                                \
    } while (0)

/* The call succeeds. */
#define OK(call)                                                                                   \
    do {                                                                                           \
        tiermgr_status got = (call);                                                               \
        if (got != TIERMGR_OK)                                                                     \
            FAIL("%s: %s: %s", #call, tiermgr_status_name(got), tiermgr_last_error());             \
    } while (0)

/* The call fails in this way, and says something about it. */
#define FAILS(wanted, call)                                                                        \
    do {                                                                                           \
        tiermgr_status got = (call);                                                               \
        if (got != (wanted))                                                                       \
            FAIL("%s gave %s, wanted %s", #call, tiermgr_status_name(got),                         \
                 tiermgr_status_name(wanted));                                                     \
        if (tiermgr_last_error()[0] == 0)                                                          \
            FAIL("%s failed without a word", #call);                                               \
    } while (0)

static void fill(uint64_t *words, size_t bytes, uint64_t seed) {
    for (size_t i = 0; i < bytes / 8; i++)
        words[i] = (i + 1) * 0x9e3779b97f4a7c15u + seed;
}

static void verify(const uint64_t *words, size_t bytes, uint64_t seed) {
    for (size_t i = 0; i < bytes / 8; i++)
        if (words[i] != (i + 1) * 0x9e3779b97f4a7c15u + seed)
            FAIL("word %zu of %p (seed %llu) is wrong", i, (const void *)words,
                 (unsigned long long)seed);
}

static tiermgr_client *client;

static void statics(void) {
    int major, minor, patch;
    CHECK(sscanf(tiermgr_version(), "%d.%d.%d", &major, &minor, &patch) == 3);
    CHECK(major == TIERMGR_VERSION_MAJOR && minor == TIERMGR_VERSION_MINOR);
    CHECK(patch == TIERMGR_VERSION_PATCH);
    CHECK(tiermgr_page_size() == (size_t)sysconf(_SC_PAGESIZE));
    CHECK(strcmp(tiermgr_status_name(TIERMGR_OK), "OK") == 0);
    CHECK(strcmp(tiermgr_status_name(TIERMGR_E_NO_DAEMON), "NO_DAEMON") == 0);
    CHECK(strcmp(tiermgr_status_name(TIERMGR_E_TOO_MANY_CLIENTS), "TOO_MANY_CLIENTS") == 0);
    CHECK(strcmp(tiermgr_status_name((tiermgr_status)-999), "UNKNOWN") == 0);
}

static void connecting(void) {
    tiermgr_client_options options = {.size = sizeof options, .class_ = 77};
    FAILS(TIERMGR_E_INVALID_ARGUMENT, tiermgr_connect(&options, &client));
    options.class_ = TIERMGR_CLASS_BULK;
    FAILS(TIERMGR_E_INVALID_ARGUMENT, tiermgr_connect(&options, NULL));
    options.socket = "/nonexistent";
    FAILS(TIERMGR_E_NO_DAEMON, tiermgr_connect(&options, &client));
    options.size = 0;
    FAILS(TIERMGR_E_INVALID_ARGUMENT, tiermgr_connect(&options, &client));

    /* A program that was compiled against a later header: what it does not use is no matter. */
    struct {
        tiermgr_client_options known;
        uint64_t later;
    } newer = {.known = {.size = sizeof newer, .name = "newer"}};
    newer.later = 1;
    FAILS(TIERMGR_E_UNSUPPORTED, tiermgr_connect(&newer.known, &client));
    newer.later = 0;
    OK(tiermgr_connect(&newer.known, &client));
    OK(tiermgr_disconnect(client));
    OK(tiermgr_disconnect(NULL));

    options = (tiermgr_client_options){.size = sizeof options, .name = "every_call"};
    OK(tiermgr_connect(&options, &client));
}

static void regions(size_t bytes) {
    tiermgr_region *region, *second;
    FAILS(TIERMGR_E_INVALID_ARGUMENT, tiermgr_region_create(client, 0, NULL, &region));
    FAILS(TIERMGR_E_INVALID_ARGUMENT, tiermgr_region_create(NULL, 1, NULL, &region));
    FAILS(TIERMGR_E_INVALID_ARGUMENT, tiermgr_region_create(client, 1, NULL, NULL));
    FAILS(TIERMGR_E_NO_MEMORY, tiermgr_region_create(client, (size_t)1 << 60, NULL, &region));
    FAILS(TIERMGR_E_INVALID_ARGUMENT, tiermgr_region_create(client, SIZE_MAX, NULL, &region));
    tiermgr_region_options options = {.size = sizeof options, .backing = TIERMGR_BACKING_SHARED};
    FAILS(TIERMGR_E_UNSUPPORTED, tiermgr_region_create(client, 1, &options, &region));
    options.backing = 9;
    FAILS(TIERMGR_E_INVALID_ARGUMENT, tiermgr_region_create(client, 1, &options, &region));
    options.backing = TIERMGR_BACKING_PRIVATE;
    options.class_ = TIERMGR_CLASS_LATENCY;
    FAILS(TIERMGR_E_UNSUPPORTED, tiermgr_region_create(client, 1, &options, &region));
    options.class_ = TIERMGR_CLASS_STANDARD;
    options.kind = 9;
    FAILS(TIERMGR_E_INVALID_ARGUMENT, tiermgr_region_create(client, 1, &options, &region));
    options.kind = TIERMGR_KIND_WEIGHTS;
    options.name = "weights";

    OK(tiermgr_region_create(client, bytes - 1, &options, &region));
    uint64_t *words = tiermgr_region_address(region);
    CHECK(tiermgr_region_bytes(region) == bytes && (uintptr_t)words % (2 << 20) == 0);
    CHECK(words[0] == 0 && words[bytes / 8 - 1] == 0);
    fill(words, bytes, 1);
    OK(tiermgr_region_create(client, 1, NULL, &second));
    CHECK(tiermgr_region_bytes(second) == 2 << 20);
    fill(tiermgr_region_address(second), 2 << 20, 2);
    verify(words, bytes, 1);
    verify(tiermgr_region_address(second), 2 << 20, 2);
    OK(tiermgr_region_destroy(second));
    OK(tiermgr_region_destroy(NULL));

    /* Ranges. */
    size_t page = tiermgr_page_size();
    for (int advice = TIERMGR_ADVICE_NORMAL; advice <= TIERMGR_ADVICE_READ_MOSTLY; advice++)
        OK(tiermgr_advise(client, words, bytes, (tiermgr_advice)advice));
    FAILS(TIERMGR_E_INVALID_ARGUMENT, tiermgr_advise(client, words, bytes, (tiermgr_advice)99));
    FAILS(TIERMGR_E_INVALID_ARGUMENT, tiermgr_advise(client, words, 1, TIERMGR_ADVICE_COLD));
    FAILS(TIERMGR_E_INVALID_ARGUMENT, tiermgr_advise(client, words, 0, TIERMGR_ADVICE_COLD));
    FAILS(TIERMGR_E_INVALID_ARGUMENT,
          tiermgr_advise(client, (char *)words + 1, page, TIERMGR_ADVICE_COLD));
    static char foreign[65536] __attribute__((aligned(65536)));
    FAILS(TIERMGR_E_NOT_MANAGED, tiermgr_advise(client, foreign, page, TIERMGR_ADVICE_COLD));
    FAILS(TIERMGR_E_NOT_MANAGED, tiermgr_prefetch(client, foreign, page));
    OK(tiermgr_prefetch(client, words, 4 << 20));
    verify(words, 4 << 20, 1);

    uint64_t lease, other;
    OK(tiermgr_pin(client, words, 1 << 20, &lease));
    OK(tiermgr_pin(client, words, 64 << 10, &other));
    CHECK(lease != other);
    tiermgr_residency residency = {.size = sizeof residency};
    OK(tiermgr_residency_query(client, words, 1 << 20, &residency));
    CHECK(residency.parked_bytes == 0 && residency.poisoned_bytes == 0);
    OK(tiermgr_unpin(client, lease));
    OK(tiermgr_unpin(client, other));
    FAILS(TIERMGR_E_INVALID_ARGUMENT, tiermgr_unpin(client, lease));
    FAILS(TIERMGR_E_NOT_MANAGED, tiermgr_pin(client, foreign, page, &lease));

    OK(tiermgr_residency_query(client, words, bytes, &residency));
    CHECK(residency.resident_bytes + residency.parked_bytes + residency.absent_bytes +
              residency.unarmed_bytes + residency.poisoned_bytes == bytes);
    FAILS(TIERMGR_E_INVALID_ARGUMENT, tiermgr_residency_query(client, words, bytes, NULL));
    residency.size = 0;
    FAILS(TIERMGR_E_INVALID_ARGUMENT, tiermgr_residency_query(client, words, bytes, &residency));

    /* Dropped bytes read as zeros, their neighbours do not. */
    OK(tiermgr_advise(client, (char *)words + (2 << 20), 2 << 20, TIERMGR_ADVICE_DONTNEED));
    for (size_t i = 0; i < (2 << 20) / 8; i++)
        CHECK(words[(2 << 20) / 8 + i] == 0);
    verify(words, 2 << 20, 1);

    /* Nobody drops what the program has locked. */
    OK(tiermgr_region_create(client, 1, NULL, &second));
    uint64_t *locked = tiermgr_region_address(second);
    fill(locked, 64 << 10, 4);
    CHECK(mlock(locked, 64 << 10) == 0);
    FAILS(TIERMGR_E_UNSUPPORTED,
          tiermgr_advise(client, locked, 64 << 10, TIERMGR_ADVICE_DONTNEED));
    verify(locked, 64 << 10, 4);
    CHECK(munlock(locked, 64 << 10) == 0);
    OK(tiermgr_advise(client, locked, 64 << 10, TIERMGR_ADVICE_DONTNEED));
    CHECK(locked[0] == 0);
    OK(tiermgr_region_destroy(second));

    /* A child has the same bytes, and is a client of its own. */
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        verify(words, 2 << 20, 1);
        fill(words, bytes, 3);
        verify(words, bytes, 3);
        tiermgr_statistics own = {.size = sizeof own};
        OK(tiermgr_statistics_query(client, &own));
        CHECK(own.forks >= 1);
        OK(tiermgr_region_destroy(region));
        OK(tiermgr_disconnect(client));
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    verify(words, 2 << 20, 1);
    OK(tiermgr_region_destroy(region));
}

static void allocations(size_t bytes) {
    void *address = NULL;
    FAILS(TIERMGR_E_INVALID_ARGUMENT, tiermgr_alloc(client, 0, 0, &address));
    FAILS(TIERMGR_E_INVALID_ARGUMENT, tiermgr_alloc(client, 1, 3, &address));
    FAILS(TIERMGR_E_INVALID_ARGUMENT, tiermgr_alloc(client, 1, (size_t)2 << 30, &address));
    FAILS(TIERMGR_E_INVALID_ARGUMENT, tiermgr_alloc(client, 1, 0, NULL));
    FAILS(TIERMGR_E_NO_MEMORY, tiermgr_alloc(client, SIZE_MAX, 0, &address));
    CHECK(address == NULL);
    enum { BLOCKS = 16 };
    uint64_t *blocks[BLOCKS];
    size_t each = bytes / BLOCKS;
    for (size_t i = 0; i < BLOCKS; i++) {
        OK(tiermgr_alloc(client, each, (size_t)4096 << i % 4, &address));
        CHECK((uintptr_t)address % ((size_t)4096 << i % 4) == 0);
        blocks[i] = address;
        fill(blocks[i], each, i);
    }
    for (size_t i = 0; i < BLOCKS; i++)
        verify(blocks[i], each, i);
    for (size_t i = 0; i < BLOCKS; i++) {
        OK(tiermgr_free(client, blocks[i]));
        FAILS(TIERMGR_E_INVALID_ARGUMENT, tiermgr_free(client, blocks[i]));
    }
    FAILS(TIERMGR_E_INVALID_ARGUMENT, tiermgr_free(client, &bytes));
    OK(tiermgr_free(client, NULL));
    for (size_t i = 0; i < BLOCKS; i++) {
        OK(tiermgr_alloc_zeroed(client, each, 0, &address));
        blocks[i] = address;
        for (size_t word = 0; word < each / 8; word++)
            if (blocks[i][word] != 0)
                FAIL("zeroed block %zu: word %zu is not", i, word);
        fill(blocks[i], each, i + 100);
    }
    for (size_t i = 0; i < BLOCKS; i++) {
        verify(blocks[i], each, i + 100);
        OK(tiermgr_free(client, blocks[i]));
    }
}

static void statistics(size_t bytes) {
    tiermgr_statistics stats = {.size = sizeof stats};
    OK(tiermgr_statistics_query(client, &stats));
    CHECK(stats.poisoned_pages == 0 && stats.store_errors == 0);
    if (stats.parked_pages * tiermgr_page_size() < bytes / 4)
        FAIL("only %llu pages were parked: was there pressure?",
             (unsigned long long)stats.parked_pages);
    FAILS(TIERMGR_E_INVALID_ARGUMENT, tiermgr_statistics_query(client, NULL));
    FAILS(TIERMGR_E_INVALID_ARGUMENT, tiermgr_statistics_query(NULL, &stats));
    /* A program that was compiled against an older header gets what it knows. */
    tiermgr_statistics older;
    memset(&older, 0xee, sizeof older);
    older.size = 16;
    OK(tiermgr_statistics_query(client, &older));
    CHECK(older.faults >= stats.faults && older.recalled_pages == 0xeeeeeeeeeeeeeeee);
}

static void many_clients(void) {
    tiermgr_client *clients[15], *one_more;
    for (size_t i = 0; i < 15; i++)
        OK(tiermgr_connect(NULL, &clients[i]));
    FAILS(TIERMGR_E_TOO_MANY_CLIENTS, tiermgr_connect(NULL, &one_more));
    void *address;
    for (size_t i = 0; i < 15; i++) {
        OK(tiermgr_alloc(clients[i], 1 << 20, 0, &address));
        fill(address, 1 << 20, i);
        verify(address, 1 << 20, i);
        FAILS(TIERMGR_E_INVALID_ARGUMENT, tiermgr_free(client, address));
    }
    for (size_t i = 0; i < 15; i++)
        OK(tiermgr_disconnect(clients[i]));
    OK(tiermgr_connect(NULL, &one_more));
    OK(tiermgr_disconnect(one_more));
}

int main(void) {
    const char *size = getenv("SIZE");
    size_t bytes = (size ? strtoull(size, NULL, 10) : (size_t)256 << 20) & ~((size_t)0xffffff);
    statics();
    connecting();
    regions(bytes);
    allocations(bytes);
    statistics(bytes);
    many_clients();
    OK(tiermgr_disconnect(client));
    printf("ok every_call: %zu bytes\n", bytes);
    return 0;
}
