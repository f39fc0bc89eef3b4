/* A direct transfer between a device and managed memory that outlives every rest of the daemon's.
 *
 *   transfer prepare DEVICE              writes a pattern to the device
 *   transfer read DEVICE MIB [pin]       reads it into parked memory, under pressure, and checks it
 *   transfer write DEVICE MIB [pin]      writes parked memory to the device, under pressure
 *   transfer check DEVICE                checks what `write` wrote
 *
 * MIB is what is touched over and over while the transfer is under way, to have the memory that takes
 * part in it parked. With `pin` the memory is leased. The caller slows the device down. Says what came
 * of it and exits with 0; with 1 where bytes are wrong. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tiermgr.h>
#include <time.h>
#include <unistd.h>

#define BYTES ((size_t)1 << 20)
#define MIB ((size_t)1 << 20)

#define FAIL(...)                                                                                  \
    do {                                                                                           \
        fprintf(stderr, __VA_ARGS__);                                                              \
        fputc('\n', stderr);                                                                       \
        _exit(1);                                                                                  \
    } while (0)

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition))                                                                          \
            FAIL("line %d: %s (%s)", __LINE__, #condition, strerror(errno));                       \
    } while (0)

#define OK(call)                                                                                   \
    do {                                                                                           \
        tiermgr_status got = (call);                                                               \
        if (got != TIERMGR_OK)                                                                     \
            FAIL("%s: %s: %s", #call, tiermgr_status_name(got), tiermgr_last_error());             \
    } while (0)

enum { ON_DEVICE = 1, IN_MEMORY, BEFORE, PRESSURE };

static tiermgr_client *client;
static uint64_t *buffer, *rest;
static size_t rest_bytes;
static bool is_read;
static int device;
static atomic_bool done;
static double took_s;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void fill(uint64_t *words, size_t bytes, uint64_t seed) {
    for (size_t i = 0; i < bytes / 8; i++)
        words[i] = (i + 1) * 0x9e3779b97f4a7c15u + seed;
}

static void verify(const volatile uint64_t *words, size_t bytes, uint64_t seed, const char *what) {
    size_t wrong = 0, first = 0, old = 0;

    for (size_t i = 0; i < bytes / 8; i++) {
        uint64_t found = words[i];

        if (found == (i + 1) * 0x9e3779b97f4a7c15u + seed)
            continue;
        old += found == (i + 1) * 0x9e3779b97f4a7c15u + BEFORE;
        first = wrong++ == 0 ? i : first;
    }
    if (wrong > 0)
        FAIL("%s: %zu of %zu words are wrong, %zu of them as they were before; the first is word %zu",
             what, wrong, bytes / 8, old, first);
}

static void *transfer(void *unused) {
    double began = now();
    ssize_t moved = is_read ? pread(device, buffer, BYTES, 0) : pwrite(device, buffer, BYTES, 0);

    if (moved != (ssize_t)BYTES)
        FAIL("the transfer ended with %zd of %zu bytes (%s)", moved, BYTES, strerror(errno));
    took_s = now() - began;
    atomic_store(&done, true);
    return unused;
}

static void press(void) {
    verify(rest, rest_bytes, PRESSURE, "what makes pressure");
    fill(rest, rest_bytes, PRESSURE);
}

static uint64_t parked_bytes(void) {
    tiermgr_residency where = {.size = sizeof where};

    OK(tiermgr_residency_query(client, buffer, BYTES, &where));
    return where.parked_bytes;
}

static void under_pressure(bool is_pinned) {
    tiermgr_region *first, *second;
    uint64_t before, lease;
    pthread_t thread;

    OK(tiermgr_connect(NULL, &client));
    OK(tiermgr_region_create(client, BYTES, NULL, &first));
    OK(tiermgr_region_create(client, rest_bytes, NULL, &second));
    buffer = tiermgr_region_address(first);
    rest = tiermgr_region_address(second);
    fill(rest, rest_bytes, PRESSURE);
    fill(buffer, BYTES, is_read ? BEFORE : IN_MEMORY);
    for (int i = 0; i < 20 && parked_bytes() < BYTES; i++)
        press();
    before = parked_bytes();
    if (before < BYTES / 2)
        FAIL("only %zu of %zu bytes were parked before the transfer", (size_t)before, BYTES);
    if (is_pinned)
        OK(tiermgr_pin(client, buffer, BYTES, &lease));
    CHECK(pthread_create(&thread, NULL, transfer, NULL) == 0);
    while (!atomic_load(&done))
        press();
    CHECK(pthread_join(thread, NULL) == 0);
    printf("%zu KiB were parked before the transfer and %zu KiB after it; it took %.1f s\n",
           (size_t)before >> 10, (size_t)parked_bytes() >> 10, took_s);
    fflush(stdout);
    verify(buffer, BYTES, is_read ? ON_DEVICE : IN_MEMORY, "after the transfer");
    press();
    verify(buffer, BYTES, is_read ? ON_DEVICE : IN_MEMORY, "after more pressure");
    if (is_pinned)
        OK(tiermgr_unpin(client, lease));
    OK(tiermgr_disconnect(client));
}

int main(int argc, char **argv) {
    const char *mode = argc > 2 ? argv[1] : "";

    rest_bytes = argc > 3 ? strtoul(argv[3], NULL, 10) * MIB : 0;
    is_read = strcmp(mode, "read") == 0;
    if (argc < 3 || (device = open(argv[2], O_RDWR | O_DIRECT)) < 0) {
        fprintf(stderr, "usage: %s prepare|read|write|check DEVICE [MIB [pin]]\n", argv[0]);
        return 2;
    }
    if (is_read || strcmp(mode, "write") == 0) {
        under_pressure(argc > 4);
        return 0;
    }
    CHECK(posix_memalign((void **)&buffer, 4096, BYTES) == 0);
    if (strcmp(mode, "prepare") == 0) {
        fill(buffer, BYTES, ON_DEVICE);
        CHECK(pwrite(device, buffer, BYTES, 0) == (ssize_t)BYTES);
        return 0;
    }
    CHECK(pread(device, buffer, BYTES, 0) == (ssize_t)BYTES);
    verify(buffer, BYTES, IN_MEMORY, "on the device");
    return 0;
}
