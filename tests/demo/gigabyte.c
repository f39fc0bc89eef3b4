/* 1 GiB in as much DRAM as the daemon gives: fills it, reads it back in order, changes words at
 * random places, reads it back again. Every word is checked, so a page of zeros, a stale page and a
 * page of somebody else's all show. Exit status 0: all of it was right. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tiermgr.h"

#define BYTES (1024UL << 20)
#define WORDS (BYTES / sizeof(uint64_t))
#define CHANGES 20000UL

static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15U;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
    return x ^ (x >> 31);
}

static double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void require(tiermgr_status status, const char *what)
{
    if (status == TIERMGR_OK)
        return;
    fprintf(stderr, "%s: %s: %s\n", what, tiermgr_status_name(status), tiermgr_last_error());
    exit(1);
}

/* Reads everything in order. Changed words hold the complement of what was written first. */
static void check(const uint64_t *words, const unsigned char *changed, const char *when)
{
    for (uint64_t i = 0; i < WORDS; i++) {
        uint64_t want = mix(i);

        if (changed[i / 8] >> (i % 8) & 1)
            want = ~want;
        if (words[i] != want) {
            fprintf(stderr, "%s: word %lu is %016lx and should be %016lx\n", when,
                    (unsigned long)i, (unsigned long)words[i], (unsigned long)want);
            exit(1);
        }
    }
}

int main(void)
{
    tiermgr_client *client;
    tiermgr_region *region;
    tiermgr_residency where = {.size = sizeof where};
    unsigned char *changed = calloc(WORDS / 8, 1);
    uint64_t *words;
    double start, took;

    if (changed == NULL) {
        perror("16 MiB for the check");
        return 1;
    }
    require(tiermgr_connect(NULL, &client), "connecting");
    require(tiermgr_region_create(client, BYTES, NULL, &region), "making a region");
    words = tiermgr_region_address(region);

    start = now();
    for (uint64_t i = 0; i < WORDS; i++)
        words[i] = mix(i);
    took = now() - start;
    printf("  written in order   %6.2f s  %5.2f GB/s\n", took, (double)BYTES / took / 1e9);
    require(tiermgr_residency_query(client, words, BYTES, &where), "asking where it is");
    printf("  now %lu MiB of it are in DRAM, %lu MiB on the other tier\n",
           (unsigned long)((where.resident_bytes + where.unarmed_bytes) >> 20),
           (unsigned long)(where.parked_bytes >> 20));

    start = now();
    check(words, changed, "first reading");
    took = now() - start;
    printf("  read in order      %6.2f s  %5.2f GB/s\n", took, (double)BYTES / took / 1e9);

    start = now();
    for (uint64_t n = 0; n < CHANGES; n++) {
        uint64_t i = mix(n + WORDS) % WORDS;

        if (changed[i / 8] >> (i % 8) & 1)
            continue;
        words[i] = ~words[i];
        changed[i / 8] |= (unsigned char)(1U << (i % 8));
    }
    took = now() - start;
    printf("  changed at random  %6.2f s  %5.0f changes/s\n", took, (double)CHANGES / took);

    check(words, changed, "second reading");
    printf("  all %lu words are right\n", (unsigned long)WORDS);
    require(tiermgr_region_destroy(region), "freeing the region");
    require(tiermgr_disconnect(client), "disconnecting");
    free(changed);
    return 0;
}
